"""The Hub's cache on this machine, as huggingface_hub lays it out.

Reads names only, without importing that library (0.3 s).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.models.demo import demo_folder
from holdfast.models.download import ModelSource

_PREFIX = "models--"
_MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model of the Hub of which something lies in the cache."""

    hub_id: str
    folder: Path  # the files of one revision


def hub_cache_folder(environ: Mapping[str, str]) -> Path:
    """Where the cache is. It need not be there. Source: huggingface_hub's `constants`."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return _expanded(environ[variable])
    if environ.get("HF_HOME"):
        return _expanded(environ["HF_HOME"]) / "hub"
    return (
        _expanded(
            environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "~", ".cache")
        )
        / "huggingface"
        / "hub"
    )


def _expanded(path: str) -> Path:
    """Without an error for a user without a home, for whom there is just nothing there."""
    return Path(os.path.expanduser(os.path.expandvars(path)))


def cached_models(cache: Path) -> list[CachedModel]:
    """The models in a cache, by their ids: of each the main branch, or else the revision that was
    fetched last.
    """
    try:
        names = sorted(name for name in os.listdir(cache) if name.startswith(_PREFIX))
    except OSError:
        return []
    found = (_cached(cache / name) for name in names)
    return [model for model in found if model is not None]


def local_folder(source: ModelSource, environ: Mapping[str, str]) -> Path | None:
    """Where a model's files are; None for a revision of the Hub of which nothing was fetched.

    Raises ModelLoadError.
    """
    match source.kind:
        case "bundled":
            return demo_folder(source.name)
        case "folder":
            return Path(source.name)
    cached = _cached(
        hub_cache_folder(environ) / (_PREFIX + source.name.replace("/", "--")),
        wanted=source.revision,
    )
    return None if cached is None else cached.folder


def hub_id_of(cache: Path, folder: Path) -> str | None:
    """The id of the model to which a folder of the cache belongs; None for folders elsewhere."""
    name = next(iter(folder.relative_to(cache).parts), "") if folder.is_relative_to(cache) else ""
    return _hub_id(name) if name.startswith(_PREFIX) else None


def _hub_id(name: str) -> str:
    return name.removeprefix(_PREFIX).replace("--", "/")


def _cached(repository: Path, *, wanted: str = "") -> CachedModel | None:
    try:
        commits = {path.name: path.stat().st_mtime for path in (repository / "snapshots").iterdir()}
    except OSError:
        return None
    refs = {
        name: commit for name, commit in _refs(repository / "refs").items() if commit in commits
    }
    if wanted:
        if refs.get(wanted, wanted) not in commits:
            return None
        revision = wanted
    elif _MAIN in refs:
        revision = _MAIN
    elif refs:
        revision = max(refs, key=lambda name: commits[refs[name]])
    elif commits:
        revision = max(commits, key=lambda commit: commits[commit])
    else:
        return None
    return CachedModel(
        hub_id=_hub_id(repository.name),
        folder=repository / "snapshots" / refs.get(revision, revision),
    )


def _refs(folder: Path) -> dict[str, str]:
    """Branches and tags → commits."""
    try:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_text().strip() for file in files}
    except (OSError, UnicodeDecodeError):
        return {}
