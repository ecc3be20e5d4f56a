"""Where Holdfast keeps things: what it may lose (among the user's caches), what it is told
(settings), what it tells (state).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import ConfigError

# of folders that belong to a running process (`claims`); short, for the paths of sockets
CLAIM_PREFIX = "holdfast."


def expanded(path: str | Path) -> Path:
    """An absolute path, with `~` and `~user` replaced by their homes.

    Raises ConfigError where there is no such home.
    """
    found = os.path.expanduser(path)
    if str(found).startswith("~"):
        raise ConfigError(
            f"{path}: there is no home folder of {Path(found).parts[0]}; a folder of that name is "
            f"./{found}"
        )
    return Path(found).absolute()


def caches_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder among the user's caches.

    It need not be there. Raises RuntimeError for a user without a home.
    """
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "holdfast"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "holdfast"


def state_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder for what is kept and is no cache, such as logs.

    It need not be there. Raises RuntimeError as above.
    """
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]).absolute() / "holdfast"
    return (
        Path.home()
        / ("Library/Application Support" if sys.platform == "darwin" else ".local/state")
        / "holdfast"
    )


def store_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the store. It need not be there. Raises RuntimeError as above.

    macOS may delete what lies in ~/Library/Caches when a disk becomes full, so there it lies in
    ~/Library/Application Support.
    """
    if sys.platform == "darwin" and not environ.get("XDG_CACHE_HOME"):
        return state_folder(environ) / "store"
    return caches_folder(environ) / "store"


def logs_folder(environ: Mapping[str, str]) -> Path:
    """The folder for log files. Raises RuntimeError as above."""
    return state_folder(environ) / "logs"


def crash_reports_folder(environ: Mapping[str, str]) -> str:
    """The folder for reports of workers that died; empty for a user without a home."""
    try:
        return str(state_folder(environ) / "crashes")
    except RuntimeError:
        return ""


def configuration_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder among the user's settings.

    It need not be there. Raises RuntimeError for a user without a home.
    """
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]).absolute() / "holdfast"
    return (Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / ".config" / "holdfast"


def hash_cache_file(environ: Mapping[str, str]) -> str:
    """The file in which hashes of model files are kept from one start to the next; empty for a user
    without a home.
    """
    return _place(environ, "hashes", "model-files.json")


def compiled_code_folder(environ: Mapping[str, str]) -> str:
    """The folder in which what MLX compiles is kept from one start to the next; empty for a user
    without a home.
    """
    return _place(environ, "compiled")


def _place(environ: Mapping[str, str], *names: str) -> str:
    try:
        return str(caches_folder(environ).joinpath(*names))
    except RuntimeError:
        return ""
