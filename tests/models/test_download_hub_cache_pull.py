from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError, NoSuchModel
from holdfast.models.download import DEMO_ID, PullStage, hub_model_of, pull_model, removal_of
from holdfast.models.hub import ModelSource
from tests.fakes.hub import HubState, hub_in_place

MODEL = "coast/kelp-small"
SOURCE = ModelSource(kind="hub", name=MODEL)
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        state.repositories[MODEL] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": WEIGHTS,
        }
        state.lfs_files = {"model.safetensors"}
        yield state


def test_each_stage_is_reported_in_bytes_to_its_end(hub: HubState) -> None:
    told: list[tuple[PullStage, int, int]] = []
    pulled = pull_model(SOURCE, on_step=lambda *step: told.append(step))
    total = len(WEIGHTS) + len(hub.repositories[MODEL]["config.json"])
    assert (pulled.files, pulled.file_bytes) == (2, total)
    assert told[0] == ("download", 0, total)
    assert ("download", total, total) in told
    assert told[-1] == ("checking", total, total)
    told.clear()
    assert pull_model(SOURCE, on_step=lambda *step: told.append(step)) == pulled
    assert {stage for stage, _, _ in told} == {"checking"}


def test_a_missing_model_is_distinguished_from_a_refused_one(hub: HubState) -> None:
    with pytest.raises(NoSuchModel):
        pull_model(ModelSource(kind="hub", name="coast/none"), on_step=lambda *step: None)
    hub.gated.add(MODEL)
    with pytest.raises(ModelLoadError, match="gated") as refused:
        pull_model(SOURCE, on_step=lambda *step: None)
    assert not isinstance(refused.value, NoSuchModel)


def test_removing_a_model_removes_all_its_cached_files(hub: HubState, tmp_path: Path) -> None:
    pulled = pull_model(SOURCE, on_step=lambda *step: None)
    removal = removal_of(MODEL, tmp_path / "cache")
    assert removal.expected_freed_size == pulled.file_bytes
    removal.execute()
    assert not pulled.folder.exists()
    with pytest.raises(NoSuchModel, match=r"is not in the Hub.s cache"):
        removal_of(MODEL, tmp_path / "cache")
    with pytest.raises(NoSuchModel, match="there is no Hub cache at"):
        removal_of(MODEL, tmp_path / "other")


def test_settings_name_a_hub_model_by_id_or_cache_folder(tmp_path: Path) -> None:
    def meant(path: str) -> str | None:
        source = hub_model_of(ModelSettings(path=path), tmp_path)
        return None if source is None else source.name

    snapshot = tmp_path / "models--coast--kelp-small" / "snapshots" / "c1"
    assert meant(str(snapshot)) == meant(MODEL) == MODEL  # whether it exists or not
    assert [
        meant(path)
        for path in ("", DEMO_ID, str(tmp_path), str(tmp_path / "spaces--a--b"), "/gone")
    ] == [None] * 5
