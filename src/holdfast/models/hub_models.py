"""Models of the Hub on this machine: pulled whole and checked, found by what the settings say,
removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from holdfast.config import ModelSettings
from holdfast.errors import NoSuchModel
from holdfast.models.demo import is_demo
from holdfast.models.download import ModelSource, fetch, hub_source
from holdfast.models.hub_cache import hub_id_of
from holdfast.models.integrity import check_files

PullStage: TypeAlias = Literal["download", "checking"]
OnStep: TypeAlias = Callable[[PullStage, int, int], None]
"""Told the stage, and how many bytes are done of how many; by several threads.

What it raises ends the pull.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model of the Hub in its cache, each file of which has the hash that the Hub tells."""

    folder: Path
    files: int
    file_bytes: int


def hub_model_of(settings: ModelSettings, cache: Path) -> ModelSource | None:
    """The model of the Hub that settings mean, by its id or by its folder in the cache; None for
    all other models.
    """
    if (hub_id := hub_id_of(cache, Path(settings.path))) is not None:
        return ModelSource(kind="hub", name=hub_id)
    is_here = is_demo(settings.path) or os.path.exists(os.path.expanduser(settings.path))
    return None if is_here else hub_source(settings.path, revision=settings.revision)


def pull_model(source: ModelSource, *, with_code: bool = False, on_step: OnStep) -> PulledModel:
    """Fetch a model of the Hub.

    What is there already is kept and checked; what was cut off goes on.

    with_code: Python files too. Raises ModelLoadError.
    """
    folder = fetch(
        source, with_code=with_code, on_bytes=lambda done, total: on_step("download", done, total)
    ).folder
    files = [file for file in folder.rglob("*") if file.is_file()]
    total, done = sum(file.stat().st_size for file in files), 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        on_step("checking", done, total)

    check_files(files, read=read)
    return PulledModel(folder=folder, files=len(files), file_bytes=total)


def removal_of(hub_id: str, cache: Path) -> Any:
    """The removal of all that the Hub's cache has of a model: `expected_freed_size` tells the
    bytes, `execute()` does it.

    Raises NoSuchModel where there is nothing of it. Source: huggingface_hub's DeleteCacheStrategy.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(cache)
    except CacheNotFound:
        raise NoSuchModel(
            f"{hub_id} has not been downloaded: there is no Hub cache at {cache}"
        ) from None
    revisions = [
        revision.commit_hash
        for repository in found.repos
        if (repository.repo_type, repository.repo_id) == ("model", hub_id)
        for revision in repository.revisions
    ]
    if not revisions:
        raise NoSuchModel(
            f"{hub_id} is not in the Hub's cache; `holdfast models ls` shows what is there"
        )
    return found.delete_revisions(*revisions)
