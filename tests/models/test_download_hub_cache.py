"""The Hub's cache, in the place and with the contents of huggingface_hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.models.download import (
    cached_models,
    hub_cache_folder,
    local_folder,
    model_source,
)
from tests.fakes.server_process import python_output


def cached(cache: Path, hub_id: str, commits: dict[str, float], refs: dict[str, str]) -> None:
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    for commit, time in commits.items():
        (repository / "snapshots" / commit).mkdir(parents=True)
        os.utime(repository / "snapshots" / commit, (time, time))
    for name, commit in refs.items():
        file = repository / "refs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)


def test_the_main_branch_of_a_model_is_used(tmp_path: Path) -> None:
    cached(tmp_path, "o/a", {"old": 1, "new": 2}, {"main": "old", "dev": "new"})
    ((hub_id, folder),) = cached_models(tmp_path).items()
    assert (hub_id, folder.name) == ("o/a", "old")


@pytest.mark.parametrize(
    ("model", "found"),
    [("o/a", "old"), ("o/a@dev", "new"), ("o/a@new", "new"), ("o/a@v2", None), ("o/b", None)],
)
def test_a_models_files_are_those_of_the_requested_revision(
    tmp_path: Path, model: str, found: str | None
) -> None:
    cached(tmp_path, "o/a", {"old": 1, "new": 2}, {"main": "old", "dev": "new"})
    folder = local_folder(model_source(model), {"HF_HUB_CACHE": str(tmp_path)})
    assert (None if folder is None else folder.name) == found


def test_without_a_main_branch_the_latest_revision_is_used(tmp_path: Path) -> None:
    cached(tmp_path, "o/a", {"c1": 1, "c2": 2}, {"v1": "c1", "refs/pr/2": "c2", "main": "gone"})
    cached(tmp_path, "o/b", {"c1": 1, "c2": 2}, {})
    found = cached_models(tmp_path)
    assert {hub_id: folder.name for hub_id, folder in found.items()} == {"o/a": "c2", "o/b": "c2"}


def test_folders_without_a_model_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "datasets--o--d" / "snapshots" / "c").mkdir(parents=True)
    (tmp_path / "models--o--empty" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--o--bare").mkdir()
    assert cached_models(tmp_path) == {}
    assert cached_models(tmp_path / "none") == {}


def test_the_cache_is_where_huggingface_hub_has_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    environs = [
        {**home, **variables}
        for variables in (
            {},
            {"XDG_CACHE_HOME": "/x/cache"},
            {"HF_HOME": "~/hf"},
            {"HF_HOME": "/hf", "HF_HUB_CACHE": "$HOME/hub"},
            {"HUGGINGFACE_HUB_CACHE": "/old"},
        )
    ]
    code = (
        "import importlib, os; from huggingface_hub import constants\n"
        f"for environ in {environs}:\n"
        "    os.environ.clear(); os.environ.update(environ)\n"
        "    print(importlib.reload(constants).HF_HUB_CACHE)"
    )
    found = python_output(code).splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        assert [str(hub_cache_folder(environ)) for environ in environs] == found
