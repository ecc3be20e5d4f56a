"""Snapshots of several layers together: what is taken out of them fits them again, and nothing else
does.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from holdfast.worker.kv.composite import Composite
from holdfast.worker.kv.foreign import ForeignState
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import LayerState
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.snapshot import (
    KVBlock,
    SnapshotMismatch,
    StateCheckpoint,
    can_be_kept,
    copy_block,
    copy_checkpoint,
    form_of,
    restore,
)
from holdfast.worker.kv.window import WindowKV

TOKENS = 12


def layers_of_all_kinds(*, slots: int = 2, window: int = 5) -> list[LayerState]:
    return [FullKV(), WindowKV(window), Composite((RecurrentState(slots), FullKV()))]


def read(layers: list[LayerState], tokens: int = TOKENS) -> None:
    for number, leaf in enumerate(leaf for layer in layers for leaf in layer.leaves()):
        if isinstance(leaf, RecurrentState):
            leaf[1] = mx.full((1, 3), float(number))
        elif isinstance(leaf, FullKV | WindowKV):
            keys = mx.random.normal((1, 2, tokens, 4), key=mx.random.key(number))
            leaf.append(keys, -keys)


def snapshots(layers: list[LayerState]) -> tuple[list[KVBlock], StateCheckpoint]:
    blocks = [copy_block(layers, start=start, tokens=6) for start in (0, 6)]
    return blocks, copy_checkpoint(layers, position=TOKENS)


def test_what_was_copied_out_is_what_fresh_layers_hold_after_the_restore() -> None:
    first, second = layers_of_all_kinds(), layers_of_all_kinds()
    read(first)
    blocks, checkpoint = snapshots(first)
    assert restore(second, blocks, checkpoint) == TOKENS
    again, checkpoint_again = snapshots(second)
    assert checkpoint_again.layers == checkpoint.layers
    for one, other in zip(checkpoint_again.arrays, checkpoint.arrays, strict=True):
        assert mx.array_equal(one, other)
    for block, other_block in zip(again, blocks, strict=True):
        assert all(
            mx.array_equal(one, other)
            for one, other in zip(block.arrays, other_block.arrays, strict=True)
        )


def test_the_form_says_what_is_copied_out() -> None:
    layers = layers_of_all_kinds()
    read(layers)
    blocks, checkpoint = snapshots(layers)
    form = form_of(layers)
    assert form is not None
    assert not form.resumes_anywhere
    assert [each.of(6).shape for each in form.block] == [array.shape for array in blocks[0].arrays]
    assert [each.of(TOKENS).shape for each in form.checkpoint] == [
        array.shape for array in checkpoint.arrays
    ]
    assert form.layers == checkpoint.layers


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        ([FullKV(), WindowKV(5), RecurrentState(2)], "too many"),
        ([FullKV(), WindowKV(5), Composite((RecurrentState(2), FullKV(), FullKV()))], "too few"),
        (
            [FullKV(), WindowKV(7), Composite((RecurrentState(2), FullKV()))],
            "a window of 7 tokens was kept with 4",
        ),
        (
            [FullKV(), WindowKV(5), Composite((RecurrentState(3), FullKV()))],
            "a recurrent layer does not fit",
        ),
        (
            [FullKV(), RecurrentState(2), Composite((WindowKV(5), FullKV()))],
            "a window layer does not fit",
        ),
        (
            [FullKV(), Composite((RecurrentState(2), FullKV()))],
            "the boundary has 2 layers, the model 1",
        ),
        (
            [FullKV(), FullKV(), WindowKV(5), ForeignState(object())],
            "a recurrent layer does not fit a ForeignState",
        ),
    ],
)
def test_layers_of_another_model_take_nothing(fresh: list[LayerState], message: str) -> None:
    layers = layers_of_all_kinds()
    read(layers)
    with pytest.raises(SnapshotMismatch, match=message):
        restore(fresh, *snapshots(layers))


def test_blocks_that_do_not_adjoin_and_boundaries_elsewhere_are_refused() -> None:
    layers = layers_of_all_kinds()
    read(layers)
    blocks, checkpoint = snapshots(layers)
    for wrong, where, message in (
        (blocks[1:], checkpoint, "begins at token 6, the one before it ends at 0"),
        (blocks[:1], checkpoint, "the boundary is at token 12, the keys and values end at 6"),
        (blocks, None, "only be resumed at a stored boundary"),
    ):
        with pytest.raises(SnapshotMismatch, match=message):
            restore(layers_of_all_kinds(), wrong, where)


def test_what_only_mlx_lm_understands_is_not_kept() -> None:
    layers: list[LayerState] = [FullKV(), Composite((FullKV(), ForeignState(object())))]
    assert not can_be_kept(layers)
    assert form_of(layers) is None
    with pytest.raises(SnapshotMismatch, match="ForeignState has no snapshot form"):
        copy_checkpoint(layers, position=1)
