"""The immutable typed form of live state at a token boundary: what is kept when a sequence goes, and what a new one begins from.

What grows with the sequence (full KV) is cut into runs of tokens; what does not (windows, recurrent states) is taken whole, at
one boundary. Snapshots are made on the device thread, share no buffer with live state, and are evaluated with the step that makes
them. Restoring writes into fresh objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from holdfast.kv.foreign import ForeignState
from holdfast.kv.form import ModelForm
from holdfast.kv.kinds import Composite, FullKV, LayerState, RecurrentState, WindowKV


class SnapshotMismatch(Exception):
    """A snapshot does not fit the model's layers: a miss, with the reason as message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlock:
    """Keys and values of a run of tokens, of every growing layer.

    arrays: two per growing layer (keys, values), each [1, kv_heads, tokens, head_dim], in the order of the layers.
    """

    start: int
    tokens: int
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def cut(self, tokens: int) -> KVBlock:
        """The first `tokens` tokens of the run; they share the run's buffers."""
        if tokens == self.tokens:
            return self
        return KVBlock(start=self.start, tokens=tokens, arrays=tuple(array[:, :, :tokens] for array in self.arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSnapshot:
    """The tokens of a window that later ones can see. keys, values: [1, kv_heads, held, head_dim]."""

    keys: mx.array
    values: mx.array

    def arrays(self) -> tuple[mx.array, ...]:
        """Both."""
        return (self.keys, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSnapshot:
    """State arrays of a recurrent layer, [1, …] each; a slot that the model has not filled is left out."""

    slots: int
    filled: tuple[tuple[int, mx.array], ...]

    def arrays(self) -> tuple[mx.array, ...]:
        """The filled ones."""
        return tuple(array for _, array in self.filled)


FixedSnapshot = WindowSnapshot | RecurrentSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCheckpoint:
    """Windows and recurrent states of all layers after exactly `position` tokens."""

    position: int
    layers: tuple[FixedSnapshot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> Iterator[mx.array]:
        """All arrays, in the order of the layers."""
        for layer in self.layers:
            yield from layer.arrays()


def leaves(layers: Sequence[LayerState]) -> Iterator[LayerState]:
    """All layers' states with composites taken apart, in order."""
    for layer in layers:
        if isinstance(layer, Composite):
            yield from leaves(layer.parts)
        else:
            yield layer


def can_be_kept(layers: Sequence[LayerState]) -> bool:
    """Whether every layer has a snapshot form; mlx-lm's own cache objects have none."""
    return not any(isinstance(leaf, ForeignState) for leaf in leaves(layers))


def form_of(layers: Sequence[LayerState]) -> ModelForm | None:
    """What is kept of a model looks like, told by layers that have read something; None when they have no snapshot form."""
    if not can_be_kept(layers):
        return None
    return ModelForm(
        growing=tuple(leaf.form() for leaf in leaves(layers) if isinstance(leaf, FullKV)),
        fixed=tuple(leaf.form() for leaf in leaves(layers) if isinstance(leaf, WindowKV | RecurrentState)),
    )


def all_finite(arrays: Iterable[mx.array]) -> mx.array:
    """bool []: whether none of the arrays holds NaN or infinity; lazy."""
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    return mx.stack([mx.isfinite(array).all() for array in floats]).all() if floats else mx.array(True)


def take_run(layers: Sequence[LayerState], *, start: int, tokens: int) -> KVBlock:
    """Copy a run of tokens out of the growing layers, lazily."""
    arrays = [copy for leaf in leaves(layers) if isinstance(leaf, FullKV) for copy in leaf.copied(start, start + tokens)]
    return KVBlock(start=start, tokens=tokens, arrays=tuple(arrays))


def take_state(layers: Sequence[LayerState], *, position: int) -> StateCheckpoint:
    """Copy windows and recurrent states as they are after the tokens that were appended last, lazily."""
    return StateCheckpoint(
        position=position, layers=tuple(_fixed(leaf) for leaf in leaves(layers) if not isinstance(leaf, FullKV))
    )


def _fixed(leaf: LayerState) -> FixedSnapshot:
    if isinstance(leaf, WindowKV):
        keys, values = leaf.copied_visible()
        return WindowSnapshot(keys=keys, values=values)
    if isinstance(leaf, RecurrentState):
        return RecurrentSnapshot(slots=leaf.slots, filled=tuple(leaf.copied()))
    raise SnapshotMismatch(f"{type(leaf).__name__} has no snapshot form")


def restore(layers: Sequence[LayerState], runs: Sequence[KVBlock], state: StateCheckpoint | None) -> int:
    """Write snapshots into fresh layers; returns how many tokens they now hold. Lazy.

    runs: adjoining, from token 0 on. Raises SnapshotMismatch when kinds, shapes or positions do not fit; which spoils the layers.
    """
    tokens = _adjoining_tokens(runs)
    growing = [leaf for leaf in leaves(layers) if isinstance(leaf, FullKV)]
    fixed = [leaf for leaf in leaves(layers) if not isinstance(leaf, FullKV)]
    if any(len(run.arrays) != 2 * len(growing) for run in runs):
        raise SnapshotMismatch(f"a run does not have the model's {len(growing)} growing layers")
    for index, leaf in enumerate(growing):
        for run in runs:
            keys, values = run.arrays[2 * index : 2 * index + 2]
            if keys.shape[2] != run.tokens or values.shape[2] != run.tokens:
                raise SnapshotMismatch(
                    f"a run of {run.tokens} tokens has keys of {keys.shape[2]} and values of {values.shape[2]}"
                )
            leaf.append(keys, values)
    if not fixed:
        return tokens
    if state is None:
        raise SnapshotMismatch("the model has layers that can only be resumed at a stored boundary")
    if growing and state.position != tokens:
        raise SnapshotMismatch(f"the boundary is at token {state.position}, the keys and values end at {tokens}")
    if len(state.layers) != len(fixed):
        raise SnapshotMismatch(f"the boundary has {len(state.layers)} layers, the model {len(fixed)}")
    for layer, snapshot in zip(fixed, state.layers, strict=True):
        _restore_fixed(layer, snapshot, position=state.position)
    return state.position


def _adjoining_tokens(runs: Sequence[KVBlock]) -> int:
    end = 0
    for run in runs:
        if run.start != end:
            raise SnapshotMismatch(f"a run begins at token {run.start}, the one before it ends at {end}")
        end += run.tokens
    return end


def _restore_fixed(leaf: LayerState, snapshot: FixedSnapshot, *, position: int) -> None:
    if isinstance(leaf, WindowKV) and isinstance(snapshot, WindowSnapshot):
        if snapshot.keys.shape[2] != leaf.visible(position):
            raise SnapshotMismatch(f"a window of {leaf.window} tokens was kept with {snapshot.keys.shape[2]} at token {position}")
        leaf.restore(snapshot.keys, snapshot.values, tokens=position)
    elif isinstance(leaf, RecurrentState) and isinstance(snapshot, RecurrentSnapshot) and leaf.slots == snapshot.slots:
        for index, array in snapshot.filled:
            leaf[index] = array
    else:
        raise SnapshotMismatch(f"a {type(snapshot).__name__} does not fit a {type(leaf).__name__}")
