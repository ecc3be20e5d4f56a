"""A private folder for what a server needs only while it runs: sockets, sessions on their way in or
out, other temporary files.

It lies among the user's caches, is readable by its owner only, and is removed at the end. What a
killed server has left is removed by the next one that starts; what belongs to a living one is left
alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.files import CLAIM_PREFIX, Claim, caches_folder, claim, sweep
from holdfast.front.link.worker_link import SHORT_FOLDER

_VARIABLE = "TMPDIR"

logger = logging.getLogger("holdfast.front.run")


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder of this process.

    While the context lasts, all temporary files of this process and its children lie in it.

    For a process of our own only: it changes the variable TMPDIR and what `tempfile` takes for the
    folder for temporary files. Raises ConfigError when there is no place for it at all.
    """
    try:
        claimed = _claimed(environ)
    except OSError as error:
        raise ConfigError(f"there is no place for temporary files: {error}") from error
    before, before_variable = tempfile.tempdir, os.environ.get(_VARIABLE)
    tempfile.tempdir = os.environ[_VARIABLE] = str(claimed.folder)
    try:
        yield claimed.folder
    finally:
        tempfile.tempdir = before
        if before_variable is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before_variable
        claimed.give_back()


def _claimed(environ: Mapping[str, str]) -> Claim:
    outside = Path(tempfile.gettempdir())
    for shared in {outside, SHORT_FOLDER}:
        sweep(shared, prefix=CLAIM_PREFIX)
    try:
        place = caches_folder(environ) / "run"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(place, prefix=CLAIM_PREFIX)
        return claim(place, prefix=CLAIM_PREFIX)
    except (OSError, RuntimeError) as error:
        # read-only, full, without locks; or a user without a home
        logger.info("temporary files lie in %s: %s", outside, error)
        return claim(outside, prefix=CLAIM_PREFIX)
