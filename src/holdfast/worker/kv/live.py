"""The live state of one sequence in all layers, and its snapshots.

A live state outlives the request that created it, and later requests start from it. While no
sequence runs on a live state, it is parked. A sequence that continues at the end of a parked state
takes that state over. A sequence that continues at an earlier token, or from a state that is
running, shares the frozen prefix, or copies it if a layer cannot be shared.

Snapshots are immutable and share no buffer with live state. What grows with the sequence (full KV)
is cut into blocks of tokens; the rest (windows, recurrent states) is saved as a whole, as a
checkpoint at one position. Snapshots are evaluated with the step that creates them, and restored
into empty layers. Device thread only.

A layer that grows keeps the keys and values of every token (`LayerState.grows`). Frozen tokens are
in buffers that are never written to again, so that several states can hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import mlx.core as mx

from holdfast.worker.kv.bits import Bits, KVBits, form_of
from holdfast.worker.kv.full import FrozenPart, FullKV
from holdfast.worker.kv.layer import (
    CheckpointLayout,
    Layer,
    LayerState,
    SnapshotForm,
    SnapshotMismatch,
    joined,
)
from holdfast.worker.kv.quantized import QuantizedKV

BaseUse: TypeAlias = Literal["moved", "shared", "copied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A block: keys and values of a run of tokens, in all layers that grow. Or a state: the windows
    and recurrent states of all other layers, after the first `start` tokens; it has no tokens.

    arrays: in the order of the layers; those of a block (usually keys and values) have the tokens
        on axis 2. If they are quantized, each is replaced by three: codes (uint32), scales, biases.
    form: of the keys and values; of a state, always "native".
    layers: what the arrays of a state are; empty for a block.
    finite: bool [], whether the arrays contain neither NaN nor infinity; None if they were checked
        before.
    """

    start: int
    tokens: int = 0
    arrays: tuple[mx.array, ...]
    form: KVBits = "native"
    layers: tuple[CheckpointLayout, ...] = ()
    finite: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def end(self) -> int:
        """The number of tokens of the chain up to the end of the block, or to the state."""
        return self.start + self.tokens

    @property
    def is_quantized(self) -> bool:
        """Whether a block has codes instead of keys and values."""
        return self.form != "native"

    def checked(self) -> Snapshot:
        """The snapshot with `finite`, to be evaluated with its arrays. Lazy."""
        return replace(self, finite=all_finite(self.arrays))

    @property
    def is_finite(self) -> bool:
        """Whether the arrays contain neither NaN nor infinity; otherwise they must not be cached."""
        return self.finite is None or bool(self.finite.item())

    @property
    def outputs(self) -> tuple[mx.array, ...]:
        """What has to be evaluated."""
        return self.arrays if self.finite is None else (*self.arrays, self.finite)

    def cut(self, tokens: int, *, offset: int = 0) -> Snapshot:
        """The block's `tokens` tokens from its token `offset` on. Lazy; shares the buffers."""
        if (offset, tokens) == (0, self.tokens):
            return self
        arrays = tuple(array[:, :, offset : offset + tokens] for array in self.arrays)
        return replace(self, start=self.start + offset, tokens=tokens, arrays=arrays)

    def joined_with(self, following: Snapshot) -> Snapshot:
        """The tokens of this block up to the beginning of `following`, which has the same form, and
        then those of `following`. Lazy.
        """
        beginning = self.cut(following.start - self.start)
        return replace(
            self,
            tokens=beginning.tokens + following.tokens,
            arrays=joined((beginning.arrays, following.arrays)),
        )


class StateBytes(NamedTuple):
    """The size in bytes of a sequence's state before and after it was quantized."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """The types and shapes of the snapshots of one model.

    block: the arrays of a KV block. layers, checkpoint: the layers and arrays of a checkpoint;
    empty if every layer grows.
    """

    block: tuple[SnapshotForm, ...]
    layers: tuple[CheckpointLayout, ...] = ()
    checkpoint: tuple[SnapshotForm, ...] = ()

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a sequence can be resumed at any token, not only at a checkpoint."""
        return not self.layers


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state to return to: its number of tokens, and the saved states of those layers that cannot
    drop tokens (None for the others).
    """

    tokens: int
    leaves: Sequence[Any]


@dataclass(slots=True, eq=False)
class LiveState:
    """The state of one sequence in all layers of the model.

    tokens: the number of tokens in the state, including the tokens of dispatched steps.
    leaves: the states of all layers in one flat tuple. A composite layer contributes several: one
        for each state that it is composed of.
    is_valid: False after a `quantize` that failed when it had already converted some layers; the
        state is then unusable.
    """

    layers: list[Layer]
    tokens: int = 0
    is_valid: bool = field(init=False, default=True)
    leaves: tuple[LayerState, ...] = field(init=False)
    _first_and_last_growing: tuple[LayerState, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = tuple(leaf for layer in self.layers for leaf in layer.leaves())
        growing = self.growing
        self._first_and_last_growing = (*growing[:1], *growing[-1:])

    @property
    def growing(self) -> list[LayerState]:
        """The states that keep every token."""
        return [leaf for leaf in self.leaves if leaf.grows]

    @property
    def fixed(self) -> list[LayerState]:
        """The other states (windows, recurrent states), which are saved only as checkpoints."""
        return [leaf for leaf in self.leaves if not leaf.grows]

    @property
    def is_quantized(self) -> bool:
        """Whether the layers that grow hold the keys and values of earlier blocks quantized."""
        return any(leaf.bits for leaf in self.leaves)

    def bytes_per_token(self) -> int:
        return sum(leaf.bytes_per_token() for leaf in self.leaves)

    def fixed_bytes(self) -> int:
        return sum(leaf.fixed_bytes() for leaf in self.leaves)

    def arrays(self) -> Iterator[mx.array]:
        for leaf in self.leaves:
            yield from leaf.arrays()

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in total."""
        for leaf in self.leaves:
            leaf.reserve(tokens)

    def trim(self) -> None:
        """Release the data that only the last forward pass needed. Call it once the graph of that
        pass is built.
        """
        for leaf in self.leaves:
            leaf.trim()

    def can_rewind(self, tokens: int) -> bool:
        """Whether the state can go back to its first `tokens` tokens without a checkpoint."""
        return all(leaf.can_rewind(self.tokens - tokens) for leaf in self.leaves)

    def resumable_prefix(self, tokens: int) -> int:
        """The length of the longest prefix, at most `tokens`, after which another sequence can continue
        from the present state, if the layers that do not grow have a checkpoint there.
        """
        return min((leaf.resumable_prefix(tokens) for leaf in self.growing), default=tokens)

    def lasting_prefix(self, tokens: int) -> int:
        """As `resumable_prefix`, for a prefix that stays usable when the state grows."""
        return min((leaf.lasting_prefix(tokens) for leaf in self.growing), default=tokens)

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens. Requires `can_rewind`."""
        for leaf in self.leaves:
            leaf.rewind(tokens)
        self.tokens -= tokens

    @property
    def can_drop_last(self) -> bool:
        """Whether the tokens of the last forward pass can always be dropped; if the state is
        quantized, only those of the current block.
        """
        return all(leaf.can_drop_last for leaf in self.leaves)

    def saved(self) -> SavedState:
        """What `return_to` needs to return to the current state. Copies nothing."""
        return SavedState(
            self.tokens, [None if leaf.can_drop_last else leaf.saved() for leaf in self.leaves]
        )

    def return_to(self, saved: SavedState) -> None:
        """Drop all tokens that were added in one forward pass after `saved` was made."""
        for leaf, state in zip(self.leaves, saved.leaves, strict=True):
            if leaf.can_drop_last:
                leaf.rewind(self.tokens - saved.tokens)
            else:
                leaf.return_to(state)
        self.tokens = saved.tokens

    def can_quantize(self) -> bool:
        """Whether `quantize` supports these layers and has not quantized them yet."""
        growing = self.growing
        return bool(growing) and all(isinstance(leaf, FullKV) for leaf in growing)

    def quantize(self, fresh: list[Layer]) -> None:
        """Quantize the keys and values of a running sequence, one layer after the other, except
        those of the current block. Waits for the device. Requires `can_quantize`.

        fresh: empty layers of the same model that hold keys and values quantized. If the device
        fails, the state is unchanged, unless `is_valid` is False.
        """
        empty_leaves = LiveState(fresh).leaves
        for leaf, quantized_leaf in zip(self.leaves, empty_leaves, strict=True):
            if isinstance(leaf, FullKV):
                assert isinstance(quantized_leaf, QuantizedKV)
                quantized_leaf.take_over(leaf)
                self.is_valid = False
        new_leaves = iter(
            [
                quantized_leaf if leaf.grows else leaf
                for leaf, quantized_leaf in zip(self.leaves, empty_leaves, strict=True)
            ]
        )
        self.layers = [layer.with_leaves(new_leaves) for layer in fresh]
        self.__post_init__()
        self.is_valid = True

    # -- sharing

    @property
    def can_share(self) -> bool:
        """Whether several running sequences can hold the same prefix of the layers that grow."""
        return all(leaf.can_share for leaf in self.growing)

    @property
    def frozen_tokens(self) -> int:
        """How many of the first tokens are frozen in every layer that grows."""
        return min((leaf.frozen_tokens for leaf in self.growing), default=0)

    @property
    def frozen_version(self) -> tuple[int, ...]:
        """The versions of the frozen arrays in the first and in the last growing layer. They change
        with every change of the state's frozen arrays, since a change goes through the layers in
        order and may fail midway. No two states with growing layers have the same.
        """
        return tuple(leaf.frozen_version for leaf in self._first_and_last_growing)

    def freeze(self) -> None:
        """Freeze all current tokens: their buffers are never written to again, so that other
        sequences can share them. Also releases unused capacity. Does not wait.
        """
        for leaf in self.leaves:
            leaf.freeze()
        self._evaluate_async()

    def share_prefix(self, other: LiveState, tokens: int) -> None:
        """Use the buffers of another parked state, whose first `tokens` tokens are equal."""
        for leaf, other_leaf in zip(self.leaves, other.leaves, strict=True):
            if leaf.grows:
                leaf.share_prefix(other_leaf, tokens)
        self._evaluate_async()

    def park(self) -> None:
        """Release unused memory and freeze all tokens: no sequence runs now. Does not wait."""
        self.trim()
        self.freeze()

    def _evaluate_async(self) -> None:
        """Compute the arrays, so that those that they were made from are freed. Does not wait."""
        mx.async_eval(list(self.arrays()))  # type: ignore[no-untyped-call]

    # -- snapshots

    @property
    def is_foreign(self) -> bool:
        """Whether any layer's cache is an mlx-lm object that cannot be snapshotted."""
        return any(leaf.is_foreign for leaf in self.leaves)

    def form(self) -> ModelForm | None:
        """The form of the snapshots, known after the first token; None if there are none."""
        if self.is_foreign:
            return None
        return ModelForm(
            block=tuple(form for leaf in self.growing for form in leaf.form()),
            layers=tuple(leaf.layout() for leaf in self.fixed),
            checkpoint=tuple(form for leaf in self.fixed for form in leaf.form()),
        )

    def copy_block(self, *, start: int, tokens: int) -> Snapshot:
        """Copy a run of tokens out of the layers that grow. Lazy."""
        growing = self.growing
        copies = [leaf.copy_out(start, start + tokens) for leaf in growing]
        arrays = tuple(itertools.chain(*copies))
        is_quantized = any(array.dtype == mx.uint32 for array in arrays[:1])
        form = form_of(growing[0].bits if is_quantized else None)
        return Snapshot(start=start, tokens=tokens, arrays=arrays, form=form)

    def copy_checkpoint(self) -> Snapshot:
        """Copy the current state of the layers that do not grow. Lazy."""
        return Snapshot(
            start=self.tokens,
            layers=tuple(leaf.layout() for leaf in self.fixed),
            arrays=tuple(array for leaf in self.fixed for array in leaf.copy_out(0, self.tokens)),
        )

    def append_block(self, block: Snapshot) -> None:
        """Append a block to the layers that grow. Lazy. Raises SnapshotMismatch."""
        if block.start != self.tokens:
            raise SnapshotMismatch(
                f"a block begins at token {block.start}, but the one before it ends at "
                f"{self.tokens}"
            )
        self.tokens += block.tokens
        growing = self.growing
        layouts = [leaf.layout() for leaf in growing]
        _restore(growing, block.arrays, layouts, end=self.tokens)

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Append adjoining blocks to the layers that grow, and restore the other layers from the
        state at their end. Lazy.

        Raises SnapshotMismatch when kinds, shapes or positions do not fit; the state is then
        unusable.
        """
        checkpoint: Snapshot | None = None
        for each in snapshots:
            if each.tokens:
                self.append_block(each)
            else:
                checkpoint = each
        if not self.fixed:
            return
        if checkpoint is None:
            raise SnapshotMismatch(
                "a sequence of this model can be resumed only at a checkpoint, and none is saved"
            )
        if self.growing and checkpoint.start != self.tokens:
            raise SnapshotMismatch(
                f"the checkpoint is at token {checkpoint.start}, but the keys and values end at "
                f"{self.tokens}"
            )
        self.tokens = checkpoint.start
        _restore(self.fixed, checkpoint.arrays, checkpoint.layers, end=self.tokens)


def _restore(
    leaves: Sequence[LayerState],
    arrays: Sequence[mx.array],
    layouts: Sequence[CheckpointLayout],
    *,
    end: int,
) -> None:
    """Give each layer its arrays. Raises SnapshotMismatch if arrays are missing or left over."""
    remaining_arrays = iter(arrays)
    if len(layouts) != len(leaves):
        raise SnapshotMismatch(
            f"the checkpoint has {len(layouts)} layers, but the model has {len(leaves)}"
        )
    for leaf, layout in zip(leaves, layouts, strict=True):
        expected_layout = leaf.layout()
        if (layout.kind, layout.slots) != (expected_layout.kind, expected_layout.slots):
            raise SnapshotMismatch(
                f"a snapshot of a {layout.kind} layer does not fit a {type(leaf).__name__}"
            )
        try:
            leaf.restore(remaining_arrays, layout, end=end)
        except StopIteration:
            raise SnapshotMismatch(
                f"{len(arrays)} arrays are too few for the model's {len(leaves)} layers"
            ) from None
    if next(remaining_arrays, None) is not None:
        raise SnapshotMismatch(
            f"{len(arrays)} arrays are too many for the model's {len(leaves)} layers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBase:
    """The live state that a new sequence starts from. Only its first `tokens` tokens are used.

    use: "moved": the sequence takes the state over, because no other sequence needs it. "shared":
        the sequence uses the state's frozen buffers. "copied": the tokens are copied.
    """

    state: LiveState
    tokens: int
    use: BaseUse


def start_from(base: LiveBase, fresh: list[Layer], *, is_restored: bool) -> LiveState:
    """Create a state that holds the first tokens of the base. Lazy.

    fresh: empty layers of the same model. In the result, the layers that do not grow have the right
        state only if the base was moved and could be rewound; otherwise they are empty, and the
        caller must restore them.
    is_restored: whether the caller restores the layers that do not grow in any case.
    """
    state = base.state
    tokens = base.tokens
    if base.use == "copied":
        copy = LiveState(fresh)
        quantized_end = state.growing[0].quantized_before(tokens)
        for start, end in ((0, quantized_end), (quantized_end, tokens)):
            if start < end:
                copy.append_block(state.copy_block(start=start, tokens=end - start))
        return copy
    empty_leaves = LiveState(fresh).leaves
    if base.use == "shared":
        if state.frozen_tokens < tokens:
            state.freeze()
        leaves = [
            leaf.fork(tokens) if leaf.grows else empty_leaf
            for leaf, empty_leaf in zip(state.leaves, empty_leaves, strict=True)
        ]
    else:
        is_rewound = state.can_rewind(tokens) and not is_restored
        leaves = [
            leaf if leaf.grows or is_rewound else empty_leaf
            for leaf, empty_leaf in zip(state.leaves, empty_leaves, strict=True)
        ]
        for leaf, taken_leaf in zip(state.leaves, leaves, strict=True):
            if taken_leaf is leaf:
                taken_leaf.rewind(state.tokens - tokens)
    remaining_leaves = iter(leaves)
    return LiveState([layer.with_leaves(remaining_leaves) for layer in fresh], tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The effect on memory of quantizing some sequences. Shared tokens count once.

    tokens: all tokens of the sequences. shared_tokens: those whose native buffers would stay,
        because other sequences hold them. converted_tokens: those that another sequence holds
        quantized already.
    """

    sequences: int
    tokens: int
    shared_tokens: int
    converted_tokens: int

    @staticmethod
    def of(states: Sequence[LiveState], bits: tuple[Bits, Bits]) -> Conversion:
        """Count the tokens of states that can be quantized (`can_quantize`) to these bits."""
        tokens = 0
        # how many of its first tokens each of the states holds that holds any
        token_counts_of_part: dict[FrozenPart, list[int]] = {}
        for state in states:
            first_full = _first_full(state)  # all layers share the same tokens
            tokens += first_full.tokens - first_full.frozen_tokens
            for part, part_tokens in first_full.frozen_parts:
                token_counts_of_part.setdefault(part, []).append(part_tokens)
        most_tokens_of_part = {
            part: max(token_counts) for part, token_counts in token_counts_of_part.items()
        }
        return Conversion(
            sequences=len(states),
            tokens=tokens + sum(most_tokens_of_part.values()),
            shared_tokens=sum(
                most_tokens_of_part[part]
                for part, token_counts in token_counts_of_part.items()
                if len(part.holders) > len(token_counts)
            ),
            converted_tokens=sum(
                part_tokens
                for part, part_tokens in most_tokens_of_part.items()
                if part.is_converted(bits)
            ),
        )


def shared_beginning(state: LiveState) -> FrozenPart | None:
    """The first frozen part of an unquantized state, which all states have that share tokens with
    it; None if it shares nothing.
    """
    parts = _first_full(state).frozen_parts
    return parts[0][0] if parts else None


def _first_full(state: LiveState) -> FullKV:
    """The first growing layer of an unquantized state. The others share the same tokens."""
    first_growing = state.growing[0]
    assert isinstance(first_growing, FullKV), "the state is quantized"
    return first_growing


def all_finite(arrays: Iterable[mx.array]) -> mx.array:
    """bool []: whether none of the arrays contains NaN or infinity. Lazy."""
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    if not floats:
        return mx.array(True)
    return mx.stack([mx.isfinite(array).all() for array in floats]).all()


def frozen_bytes(states: Iterable[LiveState]) -> dict[int, int]:
    """Map the `id` of each frozen array of these states to its size in bytes. Ids may be reused once
    an array is freed.
    """
    leaves = (leaf for state in states for leaf in state.leaves)
    return {id(array): array.nbytes for leaf in leaves for array in leaf.frozen_arrays()}


def all_bytes(states: Iterable[LiveState]) -> dict[int, int]:
    """As `frozen_bytes`, for all arrays of these states."""
    return {id(array): array.nbytes for state in states for array in state.arrays()}
