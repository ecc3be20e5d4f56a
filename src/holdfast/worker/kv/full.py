"""Keys and values of every token: frozen parts, which other sequences may also hold, and a tail
that only this sequence writes to.

`freeze` turns the tail into a frozen part, and the next token begins a new tail. Parts are merged
as in a log-structured merge tree: the number of parts, and the number of times that a token is
copied, grow only with the logarithm of the sequence's length. When neighbouring parts are merged,
all their holders get the merged part. Two parts are not merged if a sequence holds the first one
but continues differently after it.

Stored arrays are one buffer with the heads of the keys and then those of the values, or a buffer for
each; a pair is always keys and values. A run is a range of adjoining tokens in one part or in the tail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

from holdfast.worker.kv.layer import (
    CheckpointLayout,
    HeadsForm,
    KVParts,
    LayerKV,
    LayerState,
    SnapshotMismatch,
    StoredRun,
    copied,
    joined,
    keys_and_values,
    new_buffers,
)

_SHORT_PART = 512  # tokens; merging such a part is cheaper than attending to it separately
_MANY_PARTS = 4  # with more, parts are merged without waiting for `freeze`
# Buffers are shrunk when their unused capacity exceeds one of these limits.
# For all parts that only this sequence holds, together: 1/16 of their tokens.
_UNUSED_SHARE = 16
# For a part that several sequences hold: 1/64 of its capacity. Each sequence grows in its own tail.
_UNUSED_SHARE_OF_MANY = 64
# For a single buffer: 1/8 of its tokens, because the next token copies the buffer anyway.
_UNUSED_SHARE_WHOLE = 8


# frozen versions, counted for the whole process: no two states ever have the same one
_versions = itertools.count(1)

# converts the arrays of a run of tokens to another form, each token independently. Lazy
Convert: TypeAlias = Callable[[Sequence[mx.array]], tuple[mx.array, ...]]


class FrozenPart:
    """Keys and values of a run of tokens, which never change.

    Each holder (the `FullKV` of a sequence) has the first `tokens_in(part)` tokens of the run. A holder that
    is garbage collected no longer counts.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = tuple(arrays)
        self.holders: WeakSet[FullKV] = WeakSet()
        # the first tokens, cut off for a holder; None: not computed
        self._first_tokens: tuple[mx.array, mx.array] | None = None
        # quantized copies, by form
        self._converted: WeakValueDictionary[object, FrozenPart] = WeakValueDictionary()

    def converted(self, form: object, convert: Convert, *, tokens: int) -> FrozenPart:
        """The part, converted to another form: at least its first `tokens` tokens. As long as a
        holder uses the converted part, further calls return the same one, so that sequences still
        share it. form: identifies that form. Lazy.
        """
        part = self._converted.get(form)
        if part is None or part.capacity < tokens:  # its holders may use less, and `shrink` it
            used_tokens = self._used_tokens
            part = FrozenPart(convert([array[:, :, :used_tokens] for array in self.arrays]))
            self._converted[form] = part
        return part

    def first(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first tokens; cached, because every step needs the same."""
        if self._first_tokens is None or self._first_tokens[0].shape[2] != tokens:
            self._first_tokens = keys_and_values(self.arrays, end=tokens)
        return self._first_tokens

    def is_converted(self, form: object) -> bool:
        """Whether a holder uses this part in another form, so that `converted` costs nothing."""
        return form in self._converted

    @property
    def capacity(self) -> int:
        """The number of tokens that the buffers have room for."""
        return self.arrays[0].shape[2]

    @property
    def unused_tokens(self) -> int:
        """The capacity, in tokens, that no holder uses."""
        return self.capacity - self._used_tokens

    def shrink(self) -> None:
        """Copy the tokens that holders use to buffers without unused capacity. Lazy."""
        used_tokens = self._used_tokens
        self.arrays = tuple(copied(array[:, :, :used_tokens]) for array in self.arrays)
        self._first_tokens = None
        for holder in self.holders:
            holder.renew_frozen_version()

    @property
    def _used_tokens(self) -> int:
        """How many of the first tokens any holder has."""
        return max((holder.tokens_in(self) for holder in self.holders), default=0)


class PartPrefix(NamedTuple):
    """The first `tokens` tokens of a frozen part, which a sequence holds."""

    part: FrozenPart
    tokens: int


class FullKV(LayerKV):
    """Keys and values of every token. Growth within the reserved capacity copies nothing."""

    kind = "full"
    grows = True
    can_share = True

    def __init__(self) -> None:
        super().__init__()
        self._reserved_tokens = 0  # capacity in tokens
        # parts at the beginning, which other sequences may hold, and how much of each
        self._frozen_parts: list[PartPrefix] = []
        self._frozen_tokens = 0
        self._frozen_version = 0  # changes whenever the frozen parts do

    @property
    def frozen_tokens(self) -> int:
        return self._frozen_tokens

    @property
    def frozen_version(self) -> int:
        return self._frozen_version

    def renew_frozen_version(self) -> None:
        """Note that the frozen arrays have changed."""
        self._frozen_version = next(_versions)

    def reserve(self, tokens: int) -> None:
        self._reserved_tokens = max(self._reserved_tokens, tokens) if self._buffers else tokens
        if self._frozen_parts and not self.can_share:
            self._thaw()

    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Add the next tokens, on axis 2: keys and values, or another form of them, such as codes."""
        self._make_room(arrays, arrays[0].shape[2])
        self._write(arrays)

    def make_room(self, like: mx.array, tokens: int) -> bool:
        self._make_room((like,), tokens)
        return True

    def _make_room(self, like: Sequence[mx.array], tokens: int) -> None:
        """Make room for the next tokens. like: arrays that determine the buffers' shapes, apart
        from the number of tokens.
        """
        capacity = max(self._reserved_tokens, self.tokens + tokens)
        if not self._buffers or self._buffers[0].shape[2] < capacity - self._frozen_tokens:
            if (
                self.can_share
                and self._end > _SHORT_PART
                and self._unused_tail_tokens * _UNUSED_SHARE <= self._end
            ):
                self._freeze_tail()  # instead of copying the tail to a longer buffer
                if len(self._frozen_parts) > _MANY_PARTS:
                    self._merge()
            capacity -= self._frozen_tokens
            self._buffers = new_buffers(
                self._buffers, like, capacity=capacity, start=0, end=self._end
            )

    def copy_arrays(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Lazy copies of the arrays of tokens `start` to `end`, in their appended form."""
        return self._copy_stored(start, end)

    def freeze(self) -> None:
        """Turn the tail into a frozen part, merge short parts, and release unused capacity. Lazy."""
        if not self.can_share:  # one part, until `reserve` turns it into a tail again
            if self._unused_tail_tokens * _UNUSED_SHARE_WHOLE > self._end:
                self._buffers = new_buffers(
                    self._buffers, self._buffers, capacity=self._end, start=0, end=self._end
                )
            self._freeze_tail()
            return
        self._freeze_tail()
        self._merge()
        # parts that only this sequence holds, with their unused capacity; shrink the emptiest first
        unused_of_part = {
            part: part.unused_tokens for part, _ in self._frozen_parts if len(part.holders) == 1
        }
        unshared_tokens = sum(
            tokens for part, tokens in self._frozen_parts if part in unused_of_part
        )
        for part in sorted(
            unused_of_part, key=lambda each: unused_of_part[each] / each.capacity, reverse=True
        ):
            if sum(unused_of_part.values()) * _UNUSED_SHARE <= unshared_tokens:
                break
            part.shrink()
            unused_of_part[part] = 0
        for part, _ in self._frozen_parts:
            if (
                part not in unused_of_part
                and part.unused_tokens * _UNUSED_SHARE_OF_MANY > part.capacity
            ):
                part.shrink()

    def fork(self, tokens: int) -> Self:
        """A state for another sequence that holds the same frozen parts up to `tokens` tokens."""
        assert tokens <= self._frozen_tokens, (
            f"{tokens} of {self._frozen_tokens} frozen tokens cannot be shared"
        )
        fork = type(self)()
        fork._set_frozen_parts(_prefix_of_parts(self._frozen_parts, tokens))
        fork.tokens = tokens
        return fork

    def converted(self, tokens: int, form: object, convert: Convert) -> FullKV:
        """A state with the first `tokens` tokens in another form, as `append_arrays` would add
        them. Frozen parts that several sequences hold are converted once. Lazy.
        """
        parts: list[PartPrefix] = []
        tail: tuple[mx.array, ...] = ()
        for part, low, high in self._runs(0, tokens):
            if part is None:
                tail = convert([array[:, :, low:high] for array in self._buffers])
            else:
                parts.append(PartPrefix(part.converted(form, convert, tokens=high), high))
        state = FullKV()
        state.can_share = self.can_share
        state._set_frozen_parts(parts)
        state.tokens = state._frozen_tokens
        state.reserve(self._reserved_tokens)
        if tail:
            state.append_arrays(tail)
        return state

    def release(self) -> None:
        """Drop all tokens, because another state has taken them over."""
        self._set_frozen_parts([])
        self._buffers = ()
        self.tokens = self._end = 0

    def share_prefix(self, other: LayerState, tokens: int) -> None:
        """Hold the other state's parts for the first `tokens` tokens, which are equal and frozen in
        both, in place of this state's own. Lazy.
        """
        assert isinstance(other, FullKV)
        assert tokens <= min(self._frozen_tokens, other._frozen_tokens), (
            f"{tokens} tokens are not frozen in both"
        )
        later_tokens = self._copy_stored(tokens, self.tokens)
        self._freeze_tail()
        parts = _prefix_of_parts(other._frozen_parts, tokens)
        if self.tokens > tokens:
            parts.append(PartPrefix(FrozenPart(later_tokens), self.tokens - tokens))
        self._set_frozen_parts(parts)

    @property
    def frozen_parts(self) -> tuple[PartPrefix, ...]:
        """The frozen parts, with the number of tokens that this sequence holds of each."""
        return tuple(self._frozen_parts)

    def tokens_in(self, part: FrozenPart) -> int:
        """How many tokens of a frozen part this sequence holds; 0 if it does not hold the part."""
        return max((tokens for each, tokens in self._frozen_parts if each is part), default=0)

    def replace_by_merged(self, parts: Sequence[FrozenPart], merged: FrozenPart) -> None:
        """Replace these adjoining parts by one in which they are merged."""
        tokens = sum(map(self.tokens_in, parts))
        new_parts = [
            PartPrefix(merged, tokens) if each.part is parts[0] else each
            for each in self._frozen_parts
        ]
        self._set_frozen_parts([each for each in new_parts if each.part not in parts[1:]])

    def kept_tokens(self) -> int:
        return self.tokens

    def parts(self, count: int) -> KVParts:
        return tuple(
            self._pair_of_run(*run) for run in self._runs(self.tokens - count, self.tokens)
        )

    def stored(self, count: int) -> Iterator[StoredRun]:
        for part, low, high in self._runs(self.tokens - count, self.tokens):
            yield self._stored_in(part), low, high

    def stored_from_start(self, end: int) -> Iterator[StoredRun]:
        """As `stored`, for all tokens before position `end`."""
        for part, low, high in self._runs(0, end):
            yield self._stored_in(part), low, high

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens; copied if they are in several buffers."""
        pairs = self.parts(count)
        if len(pairs) == 1:
            return pairs[0]
        return keys_and_values(self._copy_stored(self.tokens - count, self.tokens))

    def can_rewind(self, tokens: int) -> bool:
        return tokens <= self.tokens

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens, from the tail first."""
        dropped_frozen_tokens = max(0, tokens - self._end)
        super().rewind(tokens)
        self._end = max(0, self._end)
        if dropped_frozen_tokens:
            self._set_frozen_parts(
                _prefix_of_parts(self._frozen_parts, self._frozen_tokens - dropped_frozen_tokens)
            )

    def form(self) -> tuple[HeadsForm, ...]:
        return tuple(map(HeadsForm.of_array, keys_and_values(self._any_stored())))

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        return keys_and_values(self._copy_stored(start, end))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Append a block, a pair of arrays, after which the state has `end` tokens. Lazy. Raises
        SnapshotMismatch if the block has another length.
        """
        keys = next(arrays)
        values = next(arrays)
        if {keys.shape[2], values.shape[2]} != {end - self.tokens}:
            raise SnapshotMismatch(
                f"a block of {end - self.tokens} tokens has {keys.shape[2]} keys and "
                f"{values.shape[2]} values"
            )
        self.append(keys, values)

    def frozen_arrays(self) -> Iterator[mx.array]:
        for part, _ in self._frozen_parts:
            yield from part.arrays

    def arrays(self) -> Iterator[mx.array]:
        yield from self.frozen_arrays()
        yield from self._buffers

    def bytes_per_token(self) -> int:
        return sum(array.nbytes // array.shape[2] for array in self._any_stored())

    def _any_stored(self) -> tuple[mx.array, ...]:
        """Stored arrays of any tokens, to look up shapes and types; empty before the first token."""
        return self._buffers or next((part.arrays for part, _ in self._frozen_parts), ())

    def _runs(self, start: int, end: int) -> Iterator[tuple[FrozenPart | None, int, int]]:
        """Yield where tokens `start` to `end` are stored: the part (None: the tail), and the first
        token and the end within the part.
        """
        part_start = 0
        for part, tokens in self._frozen_parts:
            low = max(start - part_start, 0)
            high = min(end - part_start, tokens)
            if low < high:
                yield part, low, high
            part_start += tokens
        low = max(start - part_start, 0)
        high = end - part_start
        if low < high:
            yield None, low, high

    def _pair_of_run(
        self, part: FrozenPart | None, low: int, high: int
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of tokens `low` to `high` of a part (None: of the tail); copies nothing."""
        if part is not None and low == 0:
            return part.first(high)
        return keys_and_values(self._stored_in(part), start=low, end=high)

    def _stored_in(self, part: FrozenPart | None) -> tuple[mx.array, ...]:
        """The stored arrays of a part; None: of the tail."""
        return self._buffers if part is None else part.arrays

    def _copy_stored(self, start: int, end: int, *, capacity: int = 0) -> tuple[mx.array, ...]:
        """Copy tokens `start` to `end` to new buffers with room for `capacity` tokens."""
        runs = [
            tuple(array[:, :, low:high] for array in self._stored_in(part))
            for part, low, high in self._runs(start, end)
        ]
        if len(runs) > 1 or capacity > end - start:
            return joined(runs, capacity=capacity)
        if not runs:
            return tuple(array[:, :, :0] for array in self._any_stored())
        return tuple(map(copied, runs[0]))

    @property
    def _unused_tail_tokens(self) -> int:
        """The unused capacity of the tail, in tokens."""
        return self._buffers[0].shape[2] - self._end if self._buffers else 0

    def _freeze_tail(self) -> None:
        """Turn the tail, with its unused capacity, into a frozen part."""
        if self._end:
            self._set_frozen_parts(
                [*self._frozen_parts, PartPrefix(FrozenPart(self._buffers), self._end)]
            )
        self._buffers = ()
        self._end = 0

    def _thaw(self) -> None:
        """Move all tokens to one buffer, because a fused kernel needs one: with several parts, it
        would copy all tokens in every step.
        """
        part, tokens = self._frozen_parts[0]
        if tokens == self.tokens and len(part.holders) == 1:
            arrays = part.arrays
        else:
            arrays = self._copy_stored(
                0, self.tokens, capacity=max(self._reserved_tokens, self.tokens)
            )
        self._set_frozen_parts([])
        self._buffers = arrays
        self._end = self.tokens

    def _set_frozen_parts(self, parts: list[PartPrefix]) -> None:
        """Replace the frozen parts, and register as a holder of the new ones."""
        for part, _ in self._frozen_parts:
            part.holders.discard(self)
        for part, _ in parts:
            part.holders.add(self)
        self._frozen_parts = parts
        self._frozen_tokens = _token_count(parts)
        self.renew_frozen_version()

    def _merge(self) -> None:
        """Merge neighbouring parts for all their holders if the earlier part is short, or if the
        later part is at least half as long as the earlier one.
        """
        groups: list[list[PartPrefix]] = []
        for each in self._frozen_parts:
            groups.append([each])
            while len(groups) > 1 and _should_merge(*groups[-2:]):
                groups[-2:] = [groups[-2] + groups[-1]]
        for group in groups:
            if len(group) > 1:
                parts = [part for part, _ in group]
                runs = [[array[:, :, :tokens] for array in part.arrays] for part, tokens in group]
                merged = FrozenPart(joined(runs))
                for holder in _holders(group):
                    holder.replace_by_merged(parts, merged)


def _prefix_of_parts(parts: list[PartPrefix], tokens: int) -> list[PartPrefix]:
    """The first `tokens` tokens of these parts."""
    prefix = []
    for part, count in parts:
        if tokens > 0:
            prefix.append(PartPrefix(part, min(count, tokens)))
        tokens -= count
    return prefix


def _should_merge(earlier: list[PartPrefix], later: list[PartPrefix]) -> bool:
    """Whether to merge two groups of adjoining parts: if merging pays, and all holders agree."""
    is_right_size = _token_count(earlier) <= max(_SHORT_PART, _token_count(later) * 2)
    all_parts = (*earlier, *later)
    return is_right_size and all(_holds_prefix(holder, all_parts) for holder in _holders(all_parts))


def _holders(parts: Sequence[PartPrefix]) -> set[FullKV]:
    return {holder for part, _ in parts for holder in part.holders}


def _holds_prefix(holder: FullKV, parts: Sequence[PartPrefix]) -> bool:
    """Whether a holder has all tokens of these adjacent parts, or a prefix."""
    is_complete = True
    for part, tokens in parts:
        count = holder.tokens_in(part)
        if count > tokens or (count and not is_complete):
            return False
        is_complete = is_complete and count == tokens
    return True


def _token_count(parts: list[PartPrefix]) -> int:
    return sum(tokens for _, tokens in parts)
