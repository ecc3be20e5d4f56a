"""The equalities on every model type of the installed mlx-lm: a tiny random model of each, with a
generated configuration, loaded like any model. Fast tests cover a few types, slow tests the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.worker.engine.views import RowsView
from holdfast.worker.kv.full import FullKV
from tests.fakes.every_config import (
    NEED_METAL,
    ONE_AT_A_TIME,
    VARIANTS,
    WITHOUT_MEMORY,
    all_model_types,
    tiny_config,
    wide_config,
)
from tests.fakes.examination import Finding, examine

# Each has a special feature: shared keys, selected keys, a custom state class.
FEW = ["afm7", "deepseek_v32", "falcon_mamba"]


def examined(name: str, folder: Path, *, wide: dict[str, Any] | None = None) -> Finding:
    finding = examine(name, tiny_config(name), folder / "model", wide=wide)
    assert not finding.failed_at, f"{finding.failed_at}: {finding.error}"
    assert not finding.wrong, finding
    return finding


@pytest.mark.parametrize("name", FEW)
def test_a_few_model_types_batch_and_cache(name: str, tmp_path: Path) -> None:
    finding = examined(name, tmp_path)
    assert finding.layout in ("rows", "split"), finding.reason
    assert finding.remembers


@pytest.mark.slow
@pytest.mark.parametrize("name", [*all_model_types(), *VARIANTS])
def test_every_model_type_batches_and_caches(name: str, tmp_path: Path) -> None:
    if name in NEED_METAL:
        pytest.skip(NEED_METAL[name])
    finding = examined(name, tmp_path, wide=wide_config(name))
    assert (finding.layout == "solo") == (name in ONE_AT_A_TIME), finding.reason
    assert finding.remembers == (name not in WITHOUT_MEMORY)


def test_a_fault_beyond_the_probed_tokens_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test of the test: positions of rows are off by one from token 36 on."""
    plain = RowsView.__init__

    def shifted(self: RowsView, layers: Any, *, offset: Any, **more: Any) -> None:
        plain(self, layers, offset=offset + (offset > 35), **more)

    monkeypatch.setattr(RowsView, "__init__", shifted)
    finding = examine("phi3", tiny_config("phi3"), tmp_path / "model")
    assert finding.layout == "rows"
    assert finding.wrong == ["batched"], finding


def test_a_wrong_snapshot_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test of the test: restored keys are a little larger than the kept ones."""
    plain = FullKV.restore

    def changed(self: FullKV, arrays: Any, layout: Any, *, end: int) -> None:
        plain(self, iter([next(arrays) * 1.5, next(arrays)]), layout, end=end)

    monkeypatch.setattr(FullKV, "restore", changed)
    finding = examine("llama", tiny_config("llama"), tmp_path / "model")
    assert finding.wrong == ["cached"], finding
