"""Where Holdfast keeps what it may lose: a folder among the caches of the user who runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def caches_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder among the user's caches. It need not be there. Raises RuntimeError for a user without a home."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "holdfast"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "holdfast"


def hash_cache_file(environ: Mapping[str, str]) -> str:
    """The file in which hashes of model files are kept from one start to the next; empty for a user without a home."""
    try:
        return str(caches_folder(environ) / "hashes" / "model-files.json")
    except RuntimeError:
        return ""
