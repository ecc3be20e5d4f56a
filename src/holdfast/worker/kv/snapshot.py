"""The immutable typed form of live state at a token boundary: what is kept when a sequence goes,
and what a new one begins from.

What grows with the sequence (full KV) is cut into blocks of tokens; what does not (windows,
recurrent states) is taken whole, at one boundary. Snapshots are made on the device thread, share no
buffer with live state, and are evaluated with the step that makes them. Restoring writes into fresh
objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from holdfast.worker.kv.form import CheckpointLayout, Codec, ModelForm
from holdfast.worker.kv.layer import LayerState, SnapshotMismatch

__all__ = [
    "KVBlock",
    "SnapshotMismatch",
    "StateCheckpoint",
    "all_finite",
    "can_be_kept",
    "fork",
    "form_of",
    "restore",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlock:
    """Keys and values of a run of tokens, of every growing layer, as they are or packed.

    arrays: those of each growing layer (mostly keys and values), tokens on axis 2, in the order of
        the layers. Packed by another
    codec than `native`, there are three for each of them: codes uint32, scales and biases.
    dtype: of keys and values, however they are kept.
    """

    start: int
    tokens: int
    arrays: tuple[mx.array, ...]
    codec: Codec = "native"
    dtype: mx.Dtype = mx.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def cut(self, tokens: int, *, offset: int = 0) -> KVBlock:
        """`tokens` tokens of the block from its token `offset` on; lazy, sharing its buffers."""
        if (offset, tokens) == (0, self.tokens):
            return self
        arrays = tuple(array[:, :, offset : offset + tokens] for array in self.arrays)
        return replace(self, start=self.start + offset, tokens=tokens, arrays=arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCheckpoint:
    """Windows and recurrent states of all layers after exactly `position` tokens. arrays: in the
    order of the layers.
    """

    position: int
    layers: tuple[CheckpointLayout, ...]
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


def _leaves(layers: Sequence[LayerState], *, grow: bool) -> list[LayerState]:
    """Composites taken apart: the leaves that grow, or those that do not."""
    return [leaf for layer in layers for leaf in layer.leaves() if leaf.grows == grow]


def can_be_kept(layers: Sequence[LayerState]) -> bool:
    """Whether every layer has a snapshot form; mlx-lm's own cache objects have none."""
    return not any(leaf.is_foreign for layer in layers for leaf in layer.leaves())


def form_of(layers: Sequence[LayerState]) -> ModelForm | None:
    """What is kept of a model looks like, told by layers that have read something; None when they
    have no snapshot form.
    """
    if not can_be_kept(layers):
        return None
    fixed = _leaves(layers, grow=False)
    return ModelForm(
        block=tuple(form for leaf in _leaves(layers, grow=True) for form in leaf.form()),
        layers=tuple(leaf.layout() for leaf in fixed),
        checkpoint=tuple(form for leaf in fixed for form in leaf.form()),
    )


def all_finite(arrays: Iterable[mx.array]) -> mx.array:
    """bool []: whether none of the arrays holds NaN or infinity; lazy."""
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    return (
        mx.stack([mx.isfinite(array).all() for array in floats]).all() if floats else mx.array(True)
    )


def copy_block(layers: Sequence[LayerState], *, start: int, tokens: int) -> KVBlock:
    """Copy a run of tokens out of the growing layers, lazily."""
    arrays = tuple(
        array
        for leaf in _leaves(layers, grow=True)
        for array in leaf.copy_out(start, start + tokens)
    )
    return KVBlock(
        start=start, tokens=tokens, arrays=arrays, dtype=arrays[0].dtype if arrays else mx.float32
    )


def copy_checkpoint(layers: Sequence[LayerState], *, position: int) -> StateCheckpoint:
    """Copy windows and recurrent states as they are after the tokens that were appended last,
    lazily.
    """
    fixed = _leaves(layers, grow=False)
    arrays = tuple(array for leaf in fixed for array in leaf.copy_out(0, position))
    return StateCheckpoint(
        position=position, layers=tuple(leaf.layout() for leaf in fixed), arrays=arrays
    )


def fork(
    layers: Sequence[LayerState], fresh: Sequence[LayerState], *, tokens: int
) -> list[LayerState]:
    """Layers of another sequence: those that grow share the first `tokens` tokens of these, the
    others are the fresh ones.

    Only where each of those can, and has frozen so many. `restore` takes what follows: blocks, the
    checkpoint of the others.
    """
    pairs = [
        (old, new)
        for layer, other in zip(layers, fresh, strict=True)
        for old, new in zip(layer.leaves(), other.leaves(), strict=True)
    ]
    leaves = iter([old.fork(tokens) if old.grows else new for old, new in pairs])
    return [layer.with_leaves(leaves) for layer in fresh]


def append_block(layers: Sequence[LayerState], block: KVBlock) -> None:
    """Write a block into what grows, behind what is there. Lazy. Raises as `restore`."""
    growing = _leaves(layers, grow=True)
    assert block.codec == "native", "a block is unpacked before it is restored"
    _restore(
        growing, block.arrays, [leaf.layout() for leaf in growing], end=block.start + block.tokens
    )


def restore(
    layers: Sequence[LayerState],
    blocks: Sequence[KVBlock],
    checkpoint: StateCheckpoint | None,
    *,
    begin: int = 0,
) -> int:
    """Write snapshots into layers that grow and hold `begin` tokens, or hold nothing; returns how
    many they now hold. Lazy.

    blocks: adjoining, from token `begin` on. Raises SnapshotMismatch when kinds, shapes or
    positions do not fit, and spoils the layers.
    """
    growing, fixed = _leaves(layers, grow=True), _leaves(layers, grow=False)
    end = begin
    for block in blocks:
        if block.start != end:
            raise SnapshotMismatch(
                f"a run begins at token {block.start}, the one before it ends at {end}"
            )
        end += block.tokens
        append_block(layers, block)
    if not fixed:
        return end
    if checkpoint is None:
        raise SnapshotMismatch("the model has layers that can only be resumed at a stored boundary")
    if growing and checkpoint.position != end:
        raise SnapshotMismatch(
            f"the boundary is at token {checkpoint.position}, the keys and values end at {end}"
        )
    _restore(fixed, checkpoint.arrays, checkpoint.layers, end=checkpoint.position)
    return checkpoint.position


def _restore(
    leaves: Sequence[LayerState],
    arrays: Sequence[mx.array],
    layouts: Sequence[CheckpointLayout],
    *,
    end: int,
) -> None:
    """Give each layer its arrays, all of which must be taken."""
    left = iter(arrays)
    if len(layouts) != len(leaves):
        raise SnapshotMismatch(f"the boundary has {len(layouts)} layers, the model {len(leaves)}")
    for leaf, layout in zip(leaves, layouts, strict=True):
        own = leaf.layout()
        if (layout.kind, layout.slots) != (own.kind, own.slots):
            raise SnapshotMismatch(
                f"a snapshot of a {layout.kind} layer does not fit a {type(leaf).__name__}"
            )
        try:
            leaf.restore(left, layout, end=end)
        except StopIteration:
            raise SnapshotMismatch(
                f"{len(arrays)} arrays are too few for the model's {len(leaves)} layers"
            ) from None
    if next(left, None) is not None:
        raise SnapshotMismatch(
            f"{len(arrays)} arrays are too many for the model's {len(leaves)} layers"
        )
