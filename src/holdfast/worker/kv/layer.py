"""The live state of one sequence in one layer: the interface that every kind of state implements
(full KV, window, recurrent, composite), and the arrays that states consist of.

To understand a kind, read its file and this one. A live object is used by one sequence: other
sequences may hold its frozen arrays, but no other sequence writes to it. Device thread only, except
the forms (types and shapes of arrays).

A query sees a position, or the position is visible to it, if it attends to that position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import mlx.core as mx
import msgspec

from holdfast.worker.kv.bits import Bits

# creates the object that a model gets as its cache, from the states of several sequences
ShowStates: TypeAlias = Callable[[Sequence[Any]], Any]
# adjoining keys and values, one pair per buffer
KVParts: TypeAlias = tuple[tuple[mx.array, mx.array], ...]
# a run of tokens: the arrays that store it, and its start and end within them
StoredRun: TypeAlias = tuple[tuple[mx.array, ...], int, int]

DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, name)
    for name in (
        *("float32", "float16", "bfloat16", "bool_"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    )
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SnapshotMismatch(Exception):
    """A snapshot does not fit the model's layers; this counts as a cache miss."""


# -- types and shapes of the arrays of a snapshot; any thread


class ArrayForm(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of an array that does not depend on the number of tokens."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of_array(array: mx.array) -> ArrayForm:
        return ArrayForm(DTYPE_NAMES[array.dtype], tuple(array.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size

    def of(self, tokens: int) -> ArrayForm:
        """The form after this many tokens, which is always the same."""
        return self


@dataclass(frozen=True, slots=True)
class HeadsForm:
    """Type and shape of the keys, or of the values, of one layer: [1, heads, tokens, dimension].

    most_tokens: how many tokens a sliding window keeps at most; None: no window.
    chunk_tokens: the length of attention chunks, of which only the last is kept; None: no chunks.
    """

    heads: int
    dimension: int
    dtype: str
    most_tokens: int | None = None
    chunk_tokens: int | None = None

    @staticmethod
    def of_array(
        array: mx.array, *, most_tokens: int | None = None, chunk_tokens: int | None = None
    ) -> HeadsForm:
        return HeadsForm(
            array.shape[1], array.shape[3], DTYPE_NAMES[array.dtype], most_tokens, chunk_tokens
        )

    def of(self, tokens: int) -> ArrayForm:
        """The form of the layer's array after this many tokens of a sequence."""
        kept_tokens = tokens if self.most_tokens is None else min(tokens, self.most_tokens)
        if self.chunk_tokens is not None and tokens:
            kept_tokens = 1 + (tokens - 1) % self.chunk_tokens
        return ArrayForm(self.dtype, (1, self.heads, kept_tokens, self.dimension))


SnapshotForm: TypeAlias = HeadsForm | ArrayForm


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The arrays that the checkpoint of one layer consists of.

    slots, filled: the number of slots of a recurrent layer, and the indices of those with an array.
    """

    kind: str  # the layer's kind of state
    slots: int = 0
    filled: tuple[int, ...] = ()


# -- buffers
#
# Keys and values of equal shape and type are stored in one buffer, [1, 2 * kv_heads, capacity,
# head_dim], the heads of the keys first: a step then needs one write per sequence instead of two.
# Otherwise (most of MLA) keys and values have a buffer each. "Stored" arrays are a tuple of one or
# two buffers; a "pair" is always keys and values.


def are_alike(keys: mx.array, values: mx.array) -> bool:
    """Whether keys and values are stored in one buffer."""
    return keys.shape == values.shape and keys.dtype == values.dtype


def new_buffers(
    old: Sequence[mx.array], like: Sequence[mx.array], *, capacity: int, start: int, end: int
) -> tuple[mx.array, ...]:
    """New buffers for `capacity` tokens that begin with tokens `start` to `end` of the old buffers.

    like: stored arrays or a pair, which determine the shapes of the new buffers.
    """
    # if nothing is added, MLX would return slices that share the old buffers
    if old and end - start == capacity:
        return tuple(copied(old_buffer[:, :, start:end]) for old_buffer in old)
    arrays_per_buffer = 2 if len(like) == 2 and are_alike(*like) else 1
    buffers = tuple(
        mx.zeros((1, arrays_per_buffer * array.shape[1], capacity, array.shape[3]), array.dtype)
        for array in like[: len(like) // arrays_per_buffer]
    )
    if end > start:
        for buffer, old_buffer in zip(buffers, old, strict=True):
            buffer[:, :, : end - start] = old_buffer[:, :, start:end]
    return buffers


def write(buffers: Sequence[mx.array], arrays: Sequence[mx.array], *, start: int) -> None:
    """Write tokens into buffers, in place, beginning at token `start`. arrays: stored or a pair."""
    end = start + arrays[0].shape[2]
    if len(arrays) == len(buffers):
        for buffer, array in zip(buffers, arrays, strict=True):
            # if the buffer is replaced as a whole, MLX keeps the layout of the new contents
            buffer[:, :, start:end] = mx.contiguous(array) if end == buffer.shape[2] else array
        return
    (buffer,) = buffers
    keys, values = arrays
    heads = keys.shape[1]
    buffer[:, :heads, start:end] = keys
    buffer[:, heads:, start:end] = values


def keys_and_values(
    stored: Sequence[mx.array], *, start: int = 0, end: int | None = None
) -> tuple[mx.array, mx.array]:
    """Keys and values of tokens `start` to `end`; copies nothing."""
    if len(stored) == 2:
        keys, values = stored
        return keys[:, :, start:end], values[:, :, start:end]
    (both,) = stored
    heads = both.shape[1] // 2
    return both[:, :heads, start:end], both[:, heads:, start:end]


def joined(runs: Sequence[Sequence[mx.array]], *, capacity: int = 0) -> tuple[mx.array, ...]:
    """Concatenate runs of tokens (stored arrays or pairs), padded with zeros up to `capacity`."""
    padding_tokens = capacity - sum(run[0].shape[2] for run in runs)
    joined_arrays = []
    for arrays_of_runs in zip(*runs, strict=True):
        arrays = list(arrays_of_runs)
        if padding_tokens > 0:
            shape = (1, arrays_of_runs[0].shape[1], padding_tokens, arrays_of_runs[0].shape[3])
            arrays.append(mx.zeros(shape, arrays_of_runs[0].dtype))
        joined_arrays.append(mx.concatenate(arrays, axis=2))
    return tuple(joined_arrays)


def copied(array: mx.array) -> mx.array:
    """A bit-exact copy with its own buffer.

    `mx.contiguous` would share the buffer of a slice that happens to be contiguous.
    """
    return array * mx.ones((), array.dtype)


# -- kinds


class Layer(ABC):
    """One layer of a sequence: a single state, or a composite of several."""

    @abstractmethod
    def leaves(self) -> Iterator[LayerState]:
        """The state itself, or the states that the layer is composed of."""

    @abstractmethod
    def with_leaves(self, leaves: Iterator[LayerState]) -> Layer:
        """Create a layer of the same structure that takes its states from `leaves`."""

    @abstractmethod
    def view(self, layers: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """The object that a model gets as its cache for this layer of several sequences in one
        forward pass.

        layers: this layer of each sequence, including self; all of the same kind. for_kv,
        for_recurrent: create the view of `LayerKV`s and of `RecurrentState`s.
        """


class LayerState(Layer):
    """Live state of one sequence in one layer.

    kind: the name of this kind in stored checkpoints.
    grows: the layer keeps the keys and values of every token, so any span can be copied out.
        Other layers can only be saved as a checkpoint of their current state.
    is_foreign: only mlx-lm understands the state, so it cannot be batched or saved.
    window: how many tokens a query sees, including its own; None: all, or no attention.
    chunk: the length of attention chunks, if a query sees only tokens of its chunk; None: no chunks.
    bits: of the keys and of the values of earlier blocks; None: they are not quantized.
    can_drop_last: the tokens of the last append can always be dropped (`rewind`), but only tokens of the
        current block if earlier blocks are quantized.
    can_return: the state can return to its form before the last append (`saved`, `return_to`).
    can_share: several running sequences can hold the same frozen tokens (`fork`). A runner may set
        it to False; then only parked states share frozen tokens.
    """

    kind: str
    grows: bool = False
    is_foreign: bool = False
    window: int | None = None
    chunk: int | None = None
    bits: tuple[Bits, Bits] | None = None
    can_drop_last: bool = False
    can_return: bool = False
    can_share: bool = False

    def leaves(self) -> Iterator[LayerState]:
        yield self

    def with_leaves(self, leaves: Iterator[LayerState]) -> LayerState:
        return next(leaves)

    @abstractmethod
    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""

    def bytes_per_token(self) -> int:
        """Bytes that one more token takes; 0 before the first one."""
        return 0

    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the sequence."""
        return 0

    # Dropping the last tokens. A kind that cannot do this inherits these methods; its state can go
    # back only to a checkpoint.

    def can_rewind(self, tokens: int) -> bool:
        """Whether the last `tokens` tokens can be dropped."""
        return tokens == 0

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens, as if they had never been processed."""
        assert self.can_rewind(tokens), f"{type(self).__name__} cannot drop {tokens} tokens"

    def saved(self) -> Any:
        """The current state, for `return_to`, without copying it. Only for layers with `can_return`."""
        raise NotImplementedError

    def return_to(self, saved: Any) -> None:
        """Make the state what it was when `saved` was called."""
        raise NotImplementedError

    def resumable_prefix(self, tokens: int) -> int:
        """The longest prefix, at most `tokens` long, from which another sequence can continue with
        the present state. Only for layers that grow.
        """
        return tokens

    def lasting_prefix(self, tokens: int) -> int:
        """As `resumable_prefix`, for a prefix that stays usable when the state grows."""
        return tokens

    def quantized_before(self, tokens: int) -> int:
        """How many tokens this state holds quantized when it has `tokens` tokens in total."""
        return 0

    # Snapshots. Every kind implements them unless it is foreign.

    def form(self) -> tuple[SnapshotForm, ...]:
        """The forms of the arrays that `copy_out` returns. Call it after the first token."""
        raise self._no_snapshot()

    def layout(self) -> CheckpointLayout:
        """The arrays that a checkpoint of this layer consists of."""
        return CheckpointLayout(self.kind)

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Lazy copies with their own buffers.

        Layers that grow copy tokens `start` to `end`, with tokens on axis 2. Others copy their
        current state, which must be the state after token `end`.
        """
        raise self._no_snapshot()

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Restore what `copy_out` returned, taking the needed arrays from `arrays`. Lazy.

        end: the number of tokens after which the layer's state was copied. A layer that grows
        appends one block after another; other layers must be empty. Raises SnapshotMismatch.
        """
        raise self._no_snapshot()

    def _no_snapshot(self) -> SnapshotMismatch:
        """The error for methods that a foreign kind does not implement."""
        return SnapshotMismatch(f"{type(self).__name__} has no snapshot form")

    # Optional: kinds without spare buffers or frozen tokens inherit these methods.

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in total; never shrinks.

        Does nothing if the kind has no spare buffers.
        """

    def trim(self) -> None:
        """Release the data that only the last forward pass needed. Call it when the graph of that
        pass is built.

        Does nothing if the kind holds no such data.
        """

    def freeze(self) -> None:
        """Freeze all current tokens: their buffers are never written to again, so that other
        sequences can share them. Also releases unused capacity. Lazy.

        Does nothing if sequences cannot share the buffers of this kind.
        """

    @property
    def frozen_tokens(self) -> int:
        """The number of tokens, from the first one on, that are frozen."""
        return 0

    def frozen_arrays(self) -> Iterator[mx.array]:
        """The frozen arrays, which other sequences may also hold."""
        return iter(())

    @property
    def frozen_version(self) -> int:
        """A number that changes whenever `frozen_arrays` does, and that no other state has; 0 until
        the first change. A kind that overrides `frozen_arrays` must override this, too.
        """
        return 0

    def fork(self, tokens: int) -> Self:
        """Create a state for another sequence, with the first `tokens` tokens in the same buffers.

        Requires `can_share`, and `tokens` must be at most `frozen_tokens`.
        """
        raise TypeError(f"{type(self).__name__} cannot be shared")

    def share_prefix(self, other: LayerState, tokens: int) -> None:
        """Use the buffers of another state for the first `tokens` tokens, which must be equal and
        frozen in both. Lazy.

        Only for layers that grow.
        """
        raise TypeError(f"{type(self).__name__} cannot be shared")


class LayerKV(LayerState):
    """A kind with keys and values, [1, kv_heads, tokens, head_dim], after rotary embedding.

    This class stores them in `_buffers`, up to token `_end`; a kind may store them otherwise.
    Updates happen in place as long as no other reference to the buffer exists: do not hold on to
    the arrays that `last` returns.
    """

    can_drop_last = True

    def __init__(self) -> None:
        self.tokens = 0  # tokens appended so far
        self._end = 0  # tokens in the buffers
        self._buffers: tuple[mx.array, ...] = ()  # stored; empty before the first token

    @abstractmethod
    def form(self) -> tuple[HeadsForm, ...]:
        """The forms of keys and of values. Call it after the first token."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens. Lazy."""
        self.append_arrays((keys, values))

    @abstractmethod
    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Add the keys and values of the next tokens: a pair, or one array with both."""

    def make_room(self, like: mx.array, tokens: int) -> bool:
        """Prepare the buffer so that the next tokens can be written into it from outside MLX; after that,
        call `add_written`. Returns False if this state does not support that.

        like: an array with any number of tokens, [1, 2 * kv_heads, tokens, head_dim], of the type
        of keys and values, which are alike. Evaluate `arrays` before anything is written.
        """
        return False

    def write_position(self) -> tuple[mx.array, int]:
        """The buffer for the next tokens, and their position in it. Requires `make_room`."""
        (buffer,) = self._buffers
        return buffer, self._end

    def add_written(self, tokens: int) -> None:
        """Count tokens that are written at the end of the buffer."""
        self.tokens += tokens
        self._end += tokens

    def see_one_form(self, tokens: int) -> bool:
        """Whether the next tokens see all earlier tokens in the same form, quantized or not."""
        return True

    def kept_tokens(self) -> int:
        """How many tokens can be attended to: always the last ones of the sequence."""
        return self._end

    def visible_before_next(self) -> int:
        """The number of tokens in this state that the next token will attend to."""
        return self.tokens

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens, oldest first. count ≤ kept_tokens()."""
        return keys_and_values(self._buffers, start=self._end - count, end=self._end)

    def parts(self, count: int) -> KVParts:
        """As `last`, but one pair of keys and values per buffer; copies nothing."""
        return (self.last(count),)

    def attention_ranges(self, tokens: int, window: int | None) -> Iterator[tuple[slice, KVParts]]:
        """Yield what the last `tokens` appended tokens attend to: ranges of these tokens, each with
        the keys and values of all positions that its tokens see, as `parts` returns them.

        window: how many positions a token sees, including its own; None: all.
        """
        count = (
            self.kept_tokens() if window is None else min(self.kept_tokens(), window + tokens - 1)
        )
        yield slice(0, tokens), self.parts(count)

    def seen_by_last(self, window: int | None) -> int:
        """How many positions the last appended token sees, including its own.

        window: the maximum; None: all.
        """
        return self.kept_tokens() if window is None else min(self.kept_tokens(), window)

    @property
    def has_buffers(self) -> bool:
        """Whether `stored` works: False before the first token, and for kinds of layers whose
        tokens are not in buffers.
        """
        return bool(self._buffers)

    def stored(self, count: int) -> Iterator[StoredRun]:
        """Where the last `count` tokens are stored, oldest first: buffers, and start and end within
        them. Do not hold on to the buffers. Requires `has_buffers`.
        """
        yield self._buffers, self._end - count, self._end

    def view(self, layers: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        return for_kv(layers)

    def rewind(self, tokens: int) -> None:
        super().rewind(tokens)
        self.tokens -= tokens
        self._end -= tokens

    def arrays(self) -> Iterator[mx.array]:
        return iter(self._buffers)

    def _write(self, arrays: Sequence[mx.array]) -> None:
        """Write the next tokens at the end of the buffers, which have room for them."""
        write(self._buffers, arrays, start=self._end)
        self.add_written(arrays[0].shape[2])
