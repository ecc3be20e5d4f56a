"""Building the loop over a real model: the served files are of the fingerprint's version."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.config import ModelSettings, SchedulerSettings, StoreSettings
from holdfast.errors import ModelLoadError
from holdfast.machine.memory_plan import MemoryPlan
from holdfast.wire.commands import MemoryChange, WorkerSettings
from holdfast.wire.events import BudgetChanged, ModelInfo
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.engine.quality import load_with_fingerprint
from holdfast.worker.loop import serving, worker_memory
from holdfast.worker.loop.inbox import Pulse
from tests.fakes.caching_worker import greedy, random_prompt
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.slow import slow
from tests.fakes.tiny_models import write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "llama")


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The opened caches."""
    opened: list[str] = []
    real = serving.open_cache

    def noted(*arguments: Any, **options: Any) -> Any:
        memory = real(*arguments, **options)
        assert memory is not None
        opened.append(memory.index.fingerprint)
        return memory

    monkeypatch.setattr(serving, "open_cache", noted)
    yield opened
    mx.clear_cache()


def build(
    folder: Path,
    *,
    inbox: ScriptInbox | None = None,
    model: ModelSettings | None = None,
    draft: Path | None = None,
) -> ModelInfo:
    loop, info = serving.build_loop(
        inbox or ScriptInbox([]),
        lambda stage, fraction: None,
        settings=WorkerSettings(
            folder=str(folder),
            model=model or ModelSettings(),
            draft_folder="" if draft is None else str(draft),
            draft_name="" if draft is None else draft.name,
            scheduler=SchedulerSettings(),
            store=StoreSettings(folder=""),
        ),
        pulse=Pulse(),
    )
    if inbox is not None:
        loop.run()
    del loop
    return info


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], None]) -> list[int]:
    """Call `change` after each load, with its number."""
    loads: list[int] = []
    real = serving.load_model

    def load(*arguments: Any, **options: Any) -> Any:
        loaded = real(*arguments, **options)
        loads.append(len(loads))
        change(loads[-1])
        return loaded

    monkeypatch.setattr(serving, "load_model", load)
    return loads


def test_a_model_changed_during_loading_is_loaded_again(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fingerprints: list[str],
) -> None:
    def replace_once(number: int) -> None:
        if number == 0:
            write_tiny(folder, "llama", seed=1)

    loads = changing(monkeypatch, replace_once)
    with caplog.at_level(logging.WARNING):
        build(folder)
    assert loads == [0, 1]
    assert [record.message for record in caplog.records if "changed" in record.message] != []
    build(write_tiny(tmp_path / "same", "llama", seed=1))
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1


def test_a_model_that_keeps_changing_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fingerprints: list[str]
) -> None:
    loads = changing(monkeypatch, lambda number: (folder / "config.json").touch())
    with pytest.raises(
        ModelLoadError, match=r"config\.json was changed while the model was loaded"
    ):
        build(folder)
    assert len(loads) == serving.LOAD_ATTEMPTS
    assert fingerprints == []


def test_worker_and_measuring_process_agree_on_the_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    def measured() -> str:
        settings = ModelSettings(path=str(folder))
        _, found = load_with_fingerprint(settings, hash_cache="", progress=lambda *_: None)
        return found

    before = measured()
    assert build(folder).fingerprint == before
    write_tiny(folder, "llama", seed=1)
    assert build(folder).fingerprint == measured() != before


WIDE = {"head_dim": 64, "max_position_embeddings": 16_384}
NATIVE_BYTES = 2048  # of a token


@pytest.mark.parametrize(
    ("kv_bits", "shown"), [("auto", "8"), ("4", "4"), *slow(("native", "native"), ("8", "8"))]
)
def test_the_context_of_auto_is_that_of_8_bits(tmp_path: Path, kv_bits: Any, shown: str) -> None:
    folder = write_tiny(tmp_path / "model", "llama", changes=WIDE)
    budget = 3000 * NATIVE_BYTES
    info = build(folder, model=ModelSettings(kv_bits=kv_bits, memory_bytes=budget))
    fitting = info.context_tokens_by_bits
    assert fitting["native"] == 2816
    assert fitting["auto"] == fitting["8"] > 3 * fitting["native"]
    assert info.context_tokens == fitting[shown]
    plenty = build(folder, model=ModelSettings(kv_bits=kv_bits, memory_bytes=budget * 10))
    assert set(plenty.context_tokens_by_bits.values()) == {16_384}


def test_without_quantization_the_context_of_auto_is_native(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama", changes={**WIDE, "head_dim": 24})
    info = build(folder, model=ModelSettings(kv_bits="auto", memory_bytes=4_000_000))
    assert info.kv.refused["8"]
    assert info.context_tokens == info.context_tokens_by_bits["auto"] < 16_384
    assert info.context_tokens == info.context_tokens_by_bits["native"]


def test_the_context_that_fits_follows_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "model", "llama", changes=WIDE)
    budgets = (3000 * NATIVE_BYTES, 2000 * NATIVE_BYTES, 3000 * NATIVE_BYTES)
    monkeypatch.setattr(
        worker_memory.memory_plan,
        "plan_memory",
        lambda memory, *, share, **more: MemoryPlan(
            kv_bytes=share.state_bytes or budgets[0], ram_tier_bytes=0
        ),
    )
    inbox = ScriptInbox([[MemoryChange(state_bytes=each)] for each in budgets[1:]])
    info = build(folder, inbox=inbox, model=ModelSettings(kv_bits="auto"))
    less, same = [each for each in inbox.events if isinstance(each, BudgetChanged)]
    assert info.with_budget(same) == info
    assert info.with_budget(less).context_tokens < info.context_tokens
    assert info.with_budget(less).context_tokens_by_bits["native"] == 1792
    assert info.with_budget(less).kv_budget_bytes == budgets[1]


def with_draft(folder: Path, draft: Path, speculation: str) -> ModelInfo:
    return build(
        folder,
        model=ModelSettings(speculation=speculation, memory_bytes=1 << 22),
        draft=draft,
    )


def test_a_draft_models_weights_and_states_are_counted(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "wide", "llama", changes=WIDE)
    draft = write_tiny(tmp_path / "draft", "llama", seed=1, changes=WIDE)
    alone = build(folder, model=ModelSettings(speculation="off", memory_bytes=1 << 22))
    pair = with_draft(folder, draft, speculation="draft")
    assert (alone.draft_model, alone.draft_weight_bytes) == ("", 0)
    assert (pair.draft_model, pair.draft_weight_bytes) == ("draft", pair.weight_bytes)
    # a draft model of equal size halves the tokens that fit
    native = [info.context_tokens_by_bits["native"] for info in (pair, alone)]
    assert abs(native[0] - native[1] // 2) <= 256


@pytest.mark.parametrize(("speculation", "is_loaded"), [("auto", False), ("draft", True)])
def test_a_discovered_draft_model_is_not_loaded_if_memory_is_short(
    speculation: str, is_loaded: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_tiny(tmp_path / "draft", "llama", seed=1)
    assert with_draft(folder, draft, "auto").draft_model == "draft"
    monkeypatch.setattr(serving, "_MOST_OF_FREE_MEMORY", 1e-9)
    assert bool(with_draft(folder, draft, speculation).draft_model) == is_loaded


def test_a_discovered_draft_model_that_cannot_load_is_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write_tiny(tmp_path / "draft", "llama", seed=1)
    (draft / "config.json").write_text('{"model_type": "llama", "hidden_size": 3}')
    with caplog.at_level(logging.INFO):
        assert with_draft(folder, draft, "auto").draft_model == ""
    assert "draft could draft for" in caplog.text
    with pytest.raises(ModelLoadError):
        with_draft(folder, draft, "draft")


def test_a_failing_draft_models_weights_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    draft = write_tiny(tmp_path / "draft", "llama", seed=1)
    loaded: list[weakref.ref[Any]] = []
    real = serving.load_model

    def load(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        loaded.append(weakref.ref(found.model))
        return found

    def failing(*arguments: Any) -> None:
        raise MemoryError("no memory for the draft model")

    monkeypatch.setattr(serving, "load_model", load)
    monkeypatch.setattr(DraftModel, "retain_only", failing)
    # pytest keeps logged records with the frames of the exception
    monkeypatch.setattr(logging.getLogger("holdfast"), "propagate", False)
    are_there: list[list[bool]] = []
    inbox = ScriptInbox(
        [[greedy(name, random_prompt(20), max_tokens=20)] for name in "ab"],
        in_turn=True,
        on_receive=lambda: are_there.append([each() is not None for each in loaded]),
    )
    build(folder, inbox=inbox, draft=draft, model=ModelSettings(speculation="draft"))
    assert (len(inbox.tokens("a")), len(inbox.tokens("b"))) == (20, 20)
    assert (are_there[0], are_there[-1]) == ([True, True], [True, False])
