"""Whether common beginnings are held once."""

from __future__ import annotations

import pytest

from holdfast.engine import sharing
from holdfast.engine.engine import Engine
from holdfast.engine.layouts import RowsRunner, Runner, SoloRunner, SplitRunner
from holdfast.engine.sharing import choose_sharing
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny


def chosen(runner: Runner, name: str, *, composes_attention: bool = True) -> Runner:
    form = Engine(runner, vocab_size=VOCAB_SIZE).measure_costs().form
    choose_sharing(runner, kept_tiny(name), form, composes_attention=composes_attention)
    return runner


def can_share(runner: Runner) -> set[bool]:
    return {leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves() if leaf.grows}


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_where_attention_is_composed_beginnings_are_held_once(name: str) -> None:
    runner = chosen(RowsRunner(kept_tiny(name), None), name)
    assert runner.shares
    assert can_share(runner) == {True}
    assert runner.reason.endswith("common beginnings are held once: attention takes several buffers as they are")


def test_where_parts_take_little_longer_beginnings_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_MOST_TIMES", 1000.0)
    runner = chosen(RowsRunner(kept_tiny("llama"), None), "llama", composes_attention=False)
    assert runner.shares
    assert can_share(runner) == {True}
    assert "common beginnings are held once: over 4,160 tokens in two buffers attention takes" in runner.reason


def test_where_parts_take_too_long_each_sequence_keeps_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_MOST_TIMES", 0.0)
    runner = chosen(RowsRunner(kept_tiny("llama"), None), "llama", composes_attention=False)
    assert not runner.shares
    assert can_share(runner) == {False}
    assert "common beginnings are copied: over 4,160 tokens in two buffers" in runner.reason


def test_gathered_copies_are_made_from_one_buffer() -> None:
    runner = chosen(SplitRunner(kept_tiny("llama"), None, gather_mask_dimensions=4), "llama")
    assert can_share(runner) == {False}
    assert runner.reason.endswith("common beginnings are copied: attention outside the seam takes one buffer")


def test_nothing_is_said_of_models_that_have_nothing_to_share() -> None:
    for runner, name in ((SplitRunner(kept_tiny("mamba2"), None, gather_mask_dimensions=None), "mamba2"),
                         (SoloRunner(kept_tiny("llama4"), None), "llama4")):  # fmt: skip
        assert chosen(runner, name).reason == ""
