"""Keys and values of every token: parts that are frozen, which other sequences may hold too, and a
tail of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self
from weakref import WeakSet

import mlx.core as mx

from holdfast.worker.kv import buffers
from holdfast.worker.kv.form import CheckpointLayout, HeadsForm
from holdfast.worker.kv.layer import LayerKV, LayerState, SnapshotMismatch

_SHORT_PART = 512  # tokens: copied sooner than attended to one by one
_MANY_PARTS = 4  # from here on they are merged without waiting for `freeze`
# unused room is given back where it is more than one part in so many of what nobody else holds
_UNUSED_SHARE = 16
# the same of a part that several hold, so that others' short tails count beside it
_UNUSED_SHARE_OF_MANY = 64
_UNUSED_SHARE_WHOLE = 8  # the same where all is in one buffer, which the next token then copies


class PartHolder(Protocol):
    """Who holds the first tokens of a part."""

    def held_of(self, part: FrozenPart) -> int:
        """How many of its tokens."""

    def take_merged(self, parts: Sequence[FrozenPart], merged: FrozenPart) -> None:
        """One part stands for these from now on; it holds as many tokens of it as of them."""


class FrozenPart:
    """Keys and values of a run of tokens.

    Each holder has the first of them, as many as it says; none writes them any more.

    A holder that is gone counts no more, so nobody has to say that it goes.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        """arrays: keys and values, as `kv.buffers` stores them."""
        self.arrays = tuple(arrays)
        self.holders: WeakSet[PartHolder] = WeakSet()
        self._first: tuple[mx.array, mx.array] | None = None  # that were asked for last

    def first(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first tokens.

        Every step asks for the same ones, so that they are cut once.
        """
        if self._first is None or self._first[0].shape[2] != tokens:
            self._first = buffers.pair_of(self.arrays, end=tokens)
        return self._first

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.arrays[0].shape[2]

    @property
    def unused(self) -> int:
        """Tokens that there is room for and that no holder has."""
        return self.capacity - self._used

    def give_back(self) -> None:
        """Copy what is held to buffers of exactly its size, for all holders; lazy."""
        used = self._used
        self.arrays = tuple(buffers.copied(array[:, :, :used]) for array in self.arrays)
        self._first = None

    @property
    def _used(self) -> int:
        return max((holder.held_of(self) for holder in self.holders), default=0)


class FullKV(LayerKV):
    """Capacity is reserved, so that growth within it copies nothing.

    `freeze` makes a frozen part of the tail, and the next token begins another tail. Parts are
    merged as in a log-structured merge tree: their number is logarithmic, and each token is copied
    that often at most. Others who hold them, or their beginning, hold the merged one then; where
    one of them goes on otherwise in between, they are left alone.
    """

    kind = "full"
    grows = True
    can_share = True

    def __init__(self) -> None:
        super().__init__()
        self._reserved = 0
        self._frozen: list[tuple[FrozenPart, int]] = []  # and how many of its first tokens are held
        self._frozen_tokens = 0

    @property
    def frozen_tokens(self) -> int:
        """Those in front of the tail."""
        return self._frozen_tokens

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in all at the next append; a tail that is there never
        shrinks.
        """
        self._reserved = max(self._reserved, tokens) if self._buffers else tokens
        if self._frozen and not self.can_share:
            self._thaw()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens, to the tail."""
        self._append((keys, values))

    def append_stored(self, both: mx.array) -> None:
        """The same of keys and values in one array."""
        self._append((both,))

    def _append(self, new: Sequence[mx.array]) -> None:
        capacity = max(self._reserved, self.tokens + new[0].shape[2])
        if not self._buffers or self._buffers[0].shape[2] < capacity - self._frozen_tokens:
            if (
                self.can_share
                and self._end > _SHORT_PART
                and self._unused * _UNUSED_SHARE <= self._end
            ):
                self._freeze_tail()  # instead of copying it to a longer buffer
                if len(self._frozen) > _MANY_PARTS:
                    self._merge()
            capacity -= self._frozen_tokens
            self._buffers = buffers.moved(
                self._buffers, new, capacity=capacity, start=0, end=self._end
            )
        self._write(new)

    def freeze(self) -> None:
        """Without sharing among running sequences there is one part, until `reserve` makes a tail
        of it again.
        """
        if not self.can_share:
            if self._unused * _UNUSED_SHARE_WHOLE > self._end:
                self._buffers = buffers.moved(
                    self._buffers, self._buffers, capacity=self._end, start=0, end=self._end
                )
            self._freeze_tail()
            return
        self._freeze_tail()
        self._merge()
        own = {part: part.unused for part, _ in self._frozen if len(part.holders) == 1}
        own_tokens = sum(tokens for part, tokens in self._frozen if part in own)
        for part in sorted(own, key=lambda each: own[each] / each.capacity, reverse=True):
            if sum(own.values()) * _UNUSED_SHARE <= own_tokens:
                break
            part.give_back()
            own[part] = 0
        for part, _ in self._frozen:
            if part not in own and part.unused * _UNUSED_SHARE_OF_MANY > part.capacity:
                part.give_back()

    def fork(self, tokens: int) -> Self:
        """Another one that holds the first `tokens` frozen tokens in the same buffers."""
        assert tokens <= self._frozen_tokens, (
            f"{tokens} of {self._frozen_tokens} frozen tokens cannot be shared"
        )
        fork = type(self)()
        fork._hold(_first(self._frozen, tokens))
        fork.tokens = tokens
        return fork

    def share_beginning(self, other: LayerState, tokens: int) -> None:
        """Share the first tokens with another layer, which has frozen the same ones, and free this
        copy of them. Lazy.
        """
        assert isinstance(other, FullKV)
        assert tokens <= min(self._frozen_tokens, other._frozen_tokens), (
            f"{tokens} tokens are not frozen in both"
        )
        rest = self._copied(tokens, self.tokens)
        self._freeze_tail()
        parts = _first(other._frozen, tokens)
        if self.tokens > tokens:
            parts.append((FrozenPart(rest), self.tokens - tokens))
        self._hold(parts)

    def held_of(self, part: FrozenPart) -> int:
        """How many tokens of this part."""
        return max((tokens for each, tokens in self._frozen if each is part), default=0)

    def take_merged(self, parts: Sequence[FrozenPart], merged: FrozenPart) -> None:
        """One part stands for these from now on."""
        tokens = sum(map(self.held_of, parts))
        kept = [
            (merged, tokens) if part is parts[0] else (part, held) for part, held in self._frozen
        ]
        self._hold([(part, held) for part, held in kept if part not in parts[1:]])

    def held(self) -> int:
        """All that were read."""
        return self.tokens

    def parts(self, count: int) -> tuple[tuple[mx.array, mx.array], ...]:
        """The frozen ones and the tail, as far as they have some of these tokens."""
        return tuple(self._pair(*run) for run in self._runs(self.tokens - count, self.tokens))

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """One pair, copied together where there are several parts."""
        runs = self.parts(count)
        return (
            runs[0]
            if len(runs) == 1
            else buffers.pair_of(self._copied(self.tokens - count, self.tokens))
        )

    def can_rewind(self, tokens: int) -> bool:
        """Any number of the tokens that were read."""
        return tokens <= self.tokens

    def rewind(self, tokens: int) -> None:
        """Tokens of the tail are written over, of frozen parts fewer are held."""
        frozen = max(0, tokens - self._end)
        super().rewind(tokens)
        self._end = max(0, self._end)
        if frozen:
            self._hold(_first(self._frozen, self._frozen_tokens - frozen))

    def form(self) -> tuple[HeadsForm, ...]:
        """Keys and values."""
        return tuple(map(buffers.heads_form, buffers.pair_of(self._any_stored())))

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Keys and values of tokens start to end."""
        return buffers.pair_of(self._copied(start, end))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Append the span that ends at token `end`."""
        keys, values = next(arrays), next(arrays)
        if {keys.shape[2], values.shape[2]} != {end - self.tokens}:
            sizes = f"keys of {keys.shape[2]} and values of {values.shape[2]}"
            raise SnapshotMismatch(f"a run of {end - self.tokens} tokens has {sizes}")
        self.append(keys, values)

    def frozen_arrays(self) -> Iterator[mx.array]:
        """Of the frozen parts."""
        for part, _ in self._frozen:
            yield from part.arrays

    def arrays(self) -> Iterator[mx.array]:
        """Of the frozen parts, and the tail."""
        yield from self.frozen_arrays()
        yield from self._buffers

    def bytes_per_token(self) -> int:
        """Of keys and values."""
        return sum(array.nbytes // array.shape[2] for array in self._any_stored())

    def _any_stored(self) -> tuple[mx.array, ...]:
        return self._buffers or next((part.arrays for part, _ in self._frozen), ())

    def _runs(self, start: int, end: int) -> Iterator[tuple[FrozenPart | None, int, int]]:
        """Where tokens start to end are: in which part (None: the tail) and from which of its
        tokens to which.
        """
        first = 0
        for part, tokens in self._frozen:
            low, high = max(start - first, 0), min(end - first, tokens)
            if low < high:
                yield part, low, high
            first += tokens
        low, high = max(start - first, 0), end - first
        if low < high:
            yield None, low, high

    def _pair(self, part: FrozenPart | None, low: int, high: int) -> tuple[mx.array, mx.array]:
        if part is not None and low == 0:
            return part.first(high)
        return buffers.pair_of(self._stored_in(part), start=low, end=high)

    def _stored_in(self, part: FrozenPart | None) -> tuple[mx.array, ...]:
        return self._buffers if part is None else part.arrays

    def _copied(self, start: int, end: int, *, capacity: int = 0) -> tuple[mx.array, ...]:
        """Tokens start to end in buffers of their own; capacity: tokens that these have room for."""
        runs = [
            tuple(array[:, :, low:high] for array in self._stored_in(part))
            for part, low, high in self._runs(start, end)
        ]
        if len(runs) > 1 or capacity > end - start:
            return buffers.joined(runs, capacity=capacity)
        return tuple(
            map(
                buffers.copied,
                runs[0] if runs else (array[:, :, :0] for array in self._any_stored()),
            )
        )

    @property
    def _unused(self) -> int:
        """Room in the tail."""
        return self._buffers[0].shape[2] - self._end if self._buffers else 0

    def _freeze_tail(self) -> None:
        if self._end:
            self._hold([*self._frozen, (FrozenPart(self._buffers), self._end)])
        self._buffers, self._end = (), 0

    def _thaw(self) -> None:
        """Have all tokens in one buffer again: a fused kernel takes one, and would have the parts
        copied in every step.
        """
        part, held = self._frozen[0]
        if held == self.tokens and len(part.holders) == 1:
            arrays = part.arrays
        else:
            arrays = self._copied(0, self.tokens, capacity=max(self._reserved, self.tokens))
        self._hold([])
        self._buffers, self._end = arrays, self.tokens

    def _hold(self, parts: list[tuple[FrozenPart, int]]) -> None:
        for part, _ in self._frozen:
            part.holders.discard(self)
        for part, _ in parts:
            part.holders.add(self)
        self._frozen, self._frozen_tokens = parts, sum(tokens for _, tokens in parts)

    def _merge(self) -> None:
        """Neighbours become one, for all who hold them, where the earlier is short, or the later at
        least half as long.
        """
        groups: list[list[tuple[FrozenPart, int]]] = []
        for each in self._frozen:
            groups.append([each])
            while len(groups) > 1 and _are_merged(*groups[-2:]):
                groups[-2:] = [groups[-2] + groups[-1]]
        for group in groups:
            if len(group) > 1:
                merged, parts = _joined(group), [part for part, _ in group]
                for holder in _holders(group):
                    holder.take_merged(parts, merged)


def _first(parts: list[tuple[FrozenPart, int]], tokens: int) -> list[tuple[FrozenPart, int]]:
    taken = []
    for part, held in parts:
        if tokens > 0:
            taken.append((part, min(held, tokens)))
        tokens -= held
    return taken


def _are_merged(earlier: list[tuple[FrozenPart, int]], later: list[tuple[FrozenPart, int]]) -> bool:
    fits = _length(earlier) <= max(_SHORT_PART, _length(later) * 2)
    run = (*earlier, *later)
    return fits and all(_holds_beginning(holder, run) for holder in _holders(run))


def _holders(parts: Sequence[tuple[FrozenPart, int]]) -> set[PartHolder]:
    return {holder for part, _ in parts for holder in part.holders}


def _holds_beginning(holder: PartHolder, parts: Sequence[tuple[FrozenPart, int]]) -> bool:
    """Whether what it holds of these adjoining parts is the beginning of their tokens, or all of
    them.
    """
    is_whole = True
    for part, tokens in parts:
        held = holder.held_of(part)
        if held > tokens or (held and not is_whole):
            return False
        is_whole = is_whole and held == tokens
    return True


def _length(parts: list[tuple[FrozenPart, int]]) -> int:
    return sum(tokens for _, tokens in parts)


def _joined(parts: list[tuple[FrozenPart, int]]) -> FrozenPart:
    return FrozenPart(
        buffers.joined([[array[:, :, :tokens] for array in part.arrays] for part, tokens in parts])
    )
