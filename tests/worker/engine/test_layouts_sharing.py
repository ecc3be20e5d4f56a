"""Whether common prefixes are held once."""

from __future__ import annotations

import pytest

from holdfast.worker.engine.layouts import (
    RowsRunner,
    Runner,
    SoloRunner,
    SplitRunner,
    choose_sharing,
)
from tests.fakes.tiny_models import kept_tiny


def chosen(runner: Runner, *, composes_attention: bool = True) -> Runner:
    choose_sharing(runner, composes_attention=composes_attention)
    return runner


def can_share(runner: Runner) -> set[bool]:
    return {
        leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves() if leaf.grows
    }


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_with_composed_attention_prefixes_are_held_once(name: str) -> None:
    runner = chosen(RowsRunner(kept_tiny(name), None))
    assert runner.shares
    assert can_share(runner) == {True}
    assert runner.reason.endswith(
        "common prefixes are held once: attention takes several buffers as they are"
    )


def test_with_a_fused_kernel_only_parked_sequences_share() -> None:
    runner = chosen(RowsRunner(kept_tiny("llama"), None), composes_attention=False)
    assert not runner.shares
    assert can_share(runner) == {False}
    assert runner.reason.endswith(
        "held once while parked, and copied for each running sequence: "
        "fused attention takes one buffer"
    )


def test_gathered_copies_are_made_from_one_buffer() -> None:
    runner = chosen(SplitRunner(kept_tiny("llama"), None, gather_mask_dimensions=4))
    assert can_share(runner) == {False}
    assert runner.reason.endswith("running sequence: attention outside the seam takes one buffer")


def test_models_without_anything_to_share_give_no_reason() -> None:
    for runner in (
        SplitRunner(kept_tiny("mamba2"), None, gather_mask_dimensions=None),
        SoloRunner(kept_tiny("deepseek_v41"), None),
    ):
        assert chosen(runner).reason == ""
