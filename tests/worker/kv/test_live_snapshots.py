"""Snapshots of several layers together fit only their own layers."""

from __future__ import annotations

import mlx.core as mx
import pytest

from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite, ForeignState
from holdfast.worker.kv.layer import Layer, SnapshotMismatch
from holdfast.worker.kv.live import LiveState, Snapshot
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WindowKV

TOKENS = 12


def all_kinds() -> LiveState:
    return LiveState([FullKV(), WindowKV(5), Composite((RecurrentState(2), FullKV()))])


def read(state: LiveState, tokens: int = TOKENS) -> None:
    state.tokens += tokens
    for number, leaf in enumerate(state.leaves):
        if isinstance(leaf, RecurrentState):
            leaf[1] = mx.full((1, 3), float(number))
        elif isinstance(leaf, FullKV | WindowKV):
            keys = mx.random.normal((1, 2, tokens, 4), key=mx.random.key(number))
            leaf.append(keys, -keys)


def snapshots(state: LiveState) -> list[Snapshot]:
    """Two blocks, and the state at their end."""
    blocks = [state.copy_block(start=start, tokens=6) for start in (0, 6)]
    return [*blocks, state.copy_checkpoint()]


def test_restored_layers_equal_the_copied_ones() -> None:
    first, second = all_kinds(), all_kinds()
    read(first)
    *blocks, checkpoint = snapshots(first)
    second.restore([*blocks, checkpoint])
    assert second.tokens == TOKENS
    *again, checkpoint_again = snapshots(second)
    assert checkpoint_again.layers == checkpoint.layers
    for one, other in zip(checkpoint_again.arrays, checkpoint.arrays, strict=True):
        assert mx.array_equal(one, other)
    for block, other_block in zip(again, blocks, strict=True):
        assert all(
            mx.array_equal(one, other)
            for one, other in zip(block.arrays, other_block.arrays, strict=True)
        )


def test_the_form_describes_the_copy() -> None:
    state = all_kinds()
    read(state)
    *blocks, checkpoint = snapshots(state)
    form = state.form()
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
            "a window of 7 tokens was saved with 4 tokens",
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
            "the checkpoint has 2 layers, but the model has 1",
        ),
        (
            [FullKV(), FullKV(), WindowKV(5), ForeignState(object())],
            "a recurrent layer does not fit a ForeignState",
        ),
    ],
)
def test_layers_of_another_model_refuse_a_snapshot(fresh: list[Layer], message: str) -> None:
    state = all_kinds()
    read(state)
    with pytest.raises(SnapshotMismatch, match=message):
        LiveState(fresh).restore(snapshots(state))


def test_blocks_with_gaps_and_misplaced_boundaries_are_refused() -> None:
    state = all_kinds()
    read(state)
    *blocks, checkpoint = snapshots(state)
    for wrong, message in (
        ([*blocks[1:], checkpoint], "begins at token 6, but the one before it ends at 0"),
        (
            [*blocks[:1], checkpoint],
            "the checkpoint is at token 12, but the keys and values end at 6",
        ),
        (blocks, "can be resumed only at a checkpoint"),
    ):
        with pytest.raises(SnapshotMismatch, match=message):
            all_kinds().restore(wrong)


def test_foreign_state_cannot_be_snapshotted() -> None:
    state = LiveState([FullKV(), Composite((FullKV(), ForeignState(object())))])
    assert state.is_foreign
    assert state.form() is None
    with pytest.raises(SnapshotMismatch, match="ForeignState has no snapshot form"):
        state.copy_checkpoint()
