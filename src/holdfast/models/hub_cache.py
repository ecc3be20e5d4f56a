"""The Hub's cache on this machine, as huggingface_hub lays it out. Reads names only, without importing that library (0.3 s)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "models--"
_MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model of the Hub of which something lies in the cache."""

    hub_id: str
    revision: str  # branch, tag or commit
    folder: Path  # the files of that revision


def hub_cache_folder(environ: Mapping[str, str]) -> Path:
    """Where the cache is. It need not be there. Source: huggingface_hub's `constants`."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(os.path.expandvars(environ[variable])).expanduser()
    if environ.get("HF_HOME"):
        home = Path(os.path.expandvars(environ["HF_HOME"])).expanduser()
    else:
        home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~", ".cache")).expanduser() / "huggingface"
    return home / "hub"


def cached_models(cache: Path) -> list[CachedModel]:
    """The models in a cache, by their ids: of each the main branch, or else the revision that was fetched last."""
    try:
        names = sorted(name for name in os.listdir(cache) if name.startswith(_PREFIX))
    except OSError:
        return []
    found = (_cached(cache / name) for name in names)
    return [model for model in found if model is not None]


def cached_model(cache: Path, hub_id: str) -> CachedModel | None:
    """One model of the cache; None where nothing of it is there."""
    return _cached(cache / (_PREFIX + hub_id.replace("/", "--")))


def hub_id_of(cache: Path, folder: Path) -> str | None:
    """The id of the model to which a folder of the cache belongs; None for folders elsewhere."""
    name = next(iter(folder.relative_to(cache).parts), "") if folder.is_relative_to(cache) else ""
    return _hub_id(name) if name.startswith(_PREFIX) else None


def _hub_id(name: str) -> str:
    return name.removeprefix(_PREFIX).replace("--", "/")


def _cached(repository: Path) -> CachedModel | None:
    try:
        commits = {path.name: path.stat().st_mtime for path in (repository / "snapshots").iterdir()}
    except OSError:
        return None
    refs = {name: commit for name, commit in _refs(repository / "refs").items() if commit in commits}
    if _MAIN in refs:
        revision = _MAIN
    elif refs:
        revision = max(refs, key=lambda name: commits[refs[name]])
    elif commits:
        revision = max(commits, key=lambda commit: commits[commit])
    else:
        return None
    return CachedModel(
        hub_id=_hub_id(repository.name), revision=revision, folder=repository / "snapshots" / refs.get(revision, revision)
    )


def _refs(folder: Path) -> dict[str, str]:
    """Branches and tags → commits."""
    try:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_text().strip() for file in files}
    except (OSError, UnicodeDecodeError):
        return {}
