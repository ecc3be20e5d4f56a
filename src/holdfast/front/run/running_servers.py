"""The servers of this user on this machine: each says in its run folder where it is, and its lock
says that it lives.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.files import CLAIM_PREFIX, atomic_write, caches_folder, living
from holdfast.front.link.worker_link import SHORT_FOLDER

_FILE = "server.json"


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that listens. Paths are empty where there is none."""

    pid: int
    url: str  # as this machine reaches it
    port: int
    started_at: float  # Unix time
    version: str
    store_folder: str
    log_file: str
    certificate: str  # file of what it shows its clients


def write_down(server: RunningServer, folder: Path) -> None:
    """Say in a run folder which server it belongs to. Raises OSError."""
    with atomic_write(folder / _FILE) as file:
        file.write(msgspec.json.encode(server))


def running_servers(environ: Mapping[str, str]) -> list[RunningServer]:
    """All that live, the oldest first."""
    places = {Path(tempfile.gettempdir()), SHORT_FOLDER}
    with contextlib.suppress(RuntimeError):
        places.add(caches_folder(environ) / "run")
    found = []
    for place in places:
        with contextlib.suppress(OSError):
            for folder in living(place, prefix=CLAIM_PREFIX):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    found.append(
                        msgspec.json.decode((folder / _FILE).read_bytes(), type=RunningServer)
                    )
    return sorted(found, key=lambda server: (server.started_at, server.pid))
