"""Announces a running server to other commands, by a file in its run folder.

A server's run folder holds the files that the server needs only while it runs: sockets, sessions in
transfer, temporary files. The folder is private, is in the user's cache folder, and is removed when
the server ends. If a server is killed, the next one removes its folder. A file in the folder
describes the server; the folder's lock tells whether the server is alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError
from holdfast.files import CLAIM_PREFIX, Claim, atomic_write, caches_folder, claim, living, sweep
from holdfast.front.link.worker_link import SHORT_FOLDER

_FILE = "server.json"
_TMPDIR = "TMPDIR"  # environment variable with the folder for temporary files

logger = logging.getLogger("holdfast.front.run")


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A listening server. A path is empty if the server has no such file."""

    pid: int
    url: str  # as used on this machine
    port: int
    started_at: float  # Unix time
    version: str
    store_folder: str
    log_file: str
    certificate: str  # path of the TLS certificate


def running_servers(environ: Mapping[str, str]) -> list[RunningServer]:
    """This user's servers on this machine, the oldest first."""
    parents = {Path(tempfile.gettempdir()), SHORT_FOLDER}
    with contextlib.suppress(RuntimeError):
        parents.add(caches_folder(environ) / "run")
    servers = []
    for parent in parents:
        with contextlib.suppress(OSError):
            for folder in living(parent, prefix=CLAIM_PREFIX):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    content = (folder / _FILE).read_bytes()
                    servers.append(msgspec.json.decode(content, type=RunningServer))
    return sorted(servers, key=lambda server: (server.started_at, server.pid))


def write_server(server: RunningServer, folder: Path) -> None:
    """Describe a server in its run folder, where `running_servers` finds it. Raises OSError."""
    with atomic_write(folder / _FILE) as file:
        file.write(msgspec.json.encode(server))


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """Create a folder for all temporary files of this process and its children.

    This changes TMPDIR and `tempfile.tempdir`, so use it only in a process that Holdfast owns.
    Raises ConfigError if no folder can be created.
    """
    try:
        claim_of_run = _claim_run_folder(environ)
    except OSError as error:
        raise ConfigError(f"no folder for temporary files can be created: {error}") from error
    tempfile_before = tempfile.tempdir
    variable_before = os.environ.get(_TMPDIR)
    tempfile.tempdir = str(claim_of_run.folder)
    os.environ[_TMPDIR] = str(claim_of_run.folder)
    try:
        yield claim_of_run.folder
    finally:
        tempfile.tempdir = tempfile_before
        if variable_before is None:
            del os.environ[_TMPDIR]
        else:
            os.environ[_TMPDIR] = variable_before
        claim_of_run.give_back()


def _claim_run_folder(environ: Mapping[str, str]) -> Claim:
    """Claim a folder for this server's temporary files, and delete those of servers that have
    ended.
    """
    shared_parent = Path(tempfile.gettempdir())
    for parent in {shared_parent, SHORT_FOLDER}:
        sweep(parent, prefix=CLAIM_PREFIX)
    try:
        parent = caches_folder(environ) / "run"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(parent, prefix=CLAIM_PREFIX)
        return claim(parent, prefix=CLAIM_PREFIX)
    except (OSError, RuntimeError) as error:  # read-only, full, no locks; or no home
        logger.info(
            "temporary files are put in %s, because the usual folder cannot be used: %s",
            shared_parent,
            error,
        )
        return claim(shared_parent, prefix=CLAIM_PREFIX)
