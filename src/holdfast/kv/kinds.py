"""Live key/value memory of one sequence and layer, one class per kind. Device thread only.

Keys and values are [1, kv_heads, tokens, head_dim], rotary already applied. A live object belongs to one sequence and is never
shared. Updates write in place as long as nobody else holds the buffer: callers must not keep the arrays that `last` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import mlx.core as mx

from holdfast.kv.foreign import ForeignState
from holdfast.kv.form import ArrayForm, GrowingForm, HeadsForm, RecurrentForm, WindowForm

WINDOW_SLACK_TOKENS = 256  # room behind a window, so that its tokens move only once in so many steps


def _copied_into(old: mx.array | None, like: mx.array, *, capacity: int, start: int, end: int) -> mx.array:
    buffer = mx.zeros((1, like.shape[1], capacity, like.shape[3]), like.dtype)
    if old is not None and end > start:
        buffer[:, :, : end - start] = old[:, :, start:end]
    return buffer


def _copy(array: mx.array) -> mx.array:
    """A bit-exact copy with a buffer of its own; `mx.contiguous` shares the buffer where a slice happens to be contiguous."""
    return array * mx.ones((), array.dtype)


def _array_form(array: mx.array) -> ArrayForm:
    return ArrayForm(str(array.dtype).removeprefix("mlx.core."), tuple(array.shape))


def _heads_form(array: mx.array) -> HeadsForm:
    return HeadsForm(array.shape[1], array.shape[3], _array_form(array).dtype)


class FullKV:
    """Keys and values of every token. Capacity is reserved, so that growth within it copies nothing."""

    window: int | None = None

    def __init__(self) -> None:
        self.tokens = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in all at the next append; never shrinks."""
        self._reserved = max(self._reserved, tokens)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens."""
        end = self.tokens + keys.shape[2]
        if self._keys is None or self._values is None or self._keys.shape[2] < max(end, self._reserved):
            capacity = max(self._reserved, end)
            self._keys = _copied_into(self._keys, keys, capacity=capacity, start=0, end=self.tokens)
            self._values = _copied_into(self._values, values, capacity=capacity, start=0, end=self.tokens)
        self._keys[:, :, self.tokens : end] = keys
        self._values[:, :, self.tokens : end] = values
        self.tokens = end

    def held(self) -> int:
        """How many of the last tokens can be attended to."""
        return self.tokens

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens, oldest first. count ≤ held()."""
        assert self._keys is not None
        assert self._values is not None
        start = self.tokens - count
        return self._keys[:, :, start : self.tokens], self._values[:, :, start : self.tokens]

    def settle(self) -> None:
        """Nothing to do: all of the buffer is wanted."""

    def copied(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Copies of the keys and values of tokens start to end, independent of the live buffers."""
        assert self._keys is not None
        assert self._values is not None
        return _copy(self._keys[:, :, start:end]), _copy(self._values[:, :, start:end])

    def form(self) -> GrowingForm:
        """What is kept of such a layer looks like. After the first append."""
        return GrowingForm(*map(_heads_form, self.arrays()))

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""
        if self._keys is not None and self._values is not None:
            yield self._keys
            yield self._values

    def bytes_per_token(self) -> int:
        """Bytes that one more token takes (0 before the first append)."""
        return sum(array.nbytes // array.shape[2] for array in self.arrays())

    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the sequence."""
        return 0


class WindowKV:
    """Keys and values of the last `window` tokens, kept in order, in a buffer a little longer than the window."""

    def __init__(self, window: int) -> None:
        self.window: int | None = window
        self.tokens = 0
        self._size = window
        self._end = 0  # used part of the buffer
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def reserve(self, tokens: int) -> None:
        """Nothing to do: the buffer does not grow with the sequence."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens; older ones than any of them can see are dropped when room is needed."""
        added = keys.shape[2]
        if self._keys is None or self._values is None or self._end + added > self._keys.shape[2]:
            capacity = max(self._resting_tokens, self.visible(self._end) + added)
            self._keys, self._values = self._moved(keys, values, capacity=capacity)
        self._keys[:, :, self._end : self._end + added] = keys
        self._values[:, :, self._end : self._end + added] = values
        self._end += added
        self.tokens += added

    def settle(self) -> None:
        """Bring a buffer that a long chunk has stretched back to its resting size; only what can still be seen is kept."""
        if self._keys is not None and self._values is not None and self._keys.shape[2] > self._resting_tokens:
            self._keys, self._values = self._moved(self._keys, self._values, capacity=self._resting_tokens)

    @property
    def _resting_tokens(self) -> int:
        return self._size + WINDOW_SLACK_TOKENS

    def _moved(self, keys: mx.array, values: mx.array, *, capacity: int) -> tuple[mx.array, mx.array]:
        """New buffers of that capacity, shaped like these keys and values, with the visible tokens at their beginning."""
        kept = self.visible(self._end)
        start, end, self._end = self._end - kept, self._end, kept
        return (
            _copied_into(self._keys, keys, capacity=capacity, start=start, end=end),
            _copied_into(self._values, values, capacity=capacity, start=start, end=end),
        )

    def held(self) -> int:
        """How many of the last tokens can be attended to: window - 1 and, until `settle`, those of the last append."""
        return self._end

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens, oldest first. count ≤ held()."""
        assert self._keys is not None
        assert self._values is not None
        start = self._end - count
        return self._keys[:, :, start : self._end], self._values[:, :, start : self._end]

    def visible(self, tokens: int) -> int:
        """How many of the last of `tokens` tokens the next one can still see."""
        return min(tokens, self._size - 1)

    def copied_visible(self) -> tuple[mx.array, mx.array]:
        """Copies of the keys and values that later tokens can see, independent of the live buffers."""
        keys, values = self.last(self.visible(self.tokens))
        return _copy(keys), _copy(values)

    def form(self) -> WindowForm:
        """What is kept of such a layer looks like. After the first append."""
        return WindowForm(self._size - 1, *map(_heads_form, self.arrays()))

    def restore(self, keys: mx.array, values: mx.array, *, tokens: int) -> None:
        """Begin from the visible part of a sequence of `tokens` tokens. Only on a fresh object."""
        self.append(keys, values)
        self.tokens = tokens

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""
        if self._keys is not None and self._values is not None:
            yield self._keys
            yield self._values

    def bytes_per_token(self) -> int:
        """0: a window does not grow."""
        return 0

    def fixed_bytes(self) -> int:
        """Bytes of the buffer at its resting size."""
        per_token = sum(array.nbytes // array.shape[2] for array in self.arrays())
        return per_token * self._resting_tokens


class RecurrentState:
    """State arrays of a layer that has no keys: convolution tails, state-space matrices. Speaks mlx-lm's `ArraysCache`.

    After a step over several sequences a slot may be a row of a stacked array; the next step over the same sequences takes the
    stack as it is, and only a change of company cuts the row out.
    """

    lengths = None
    left_padding = None

    def __init__(self, slots: int) -> None:
        self._slots: list[mx.array | None] = [None] * slots
        self._rows: list[int | None] = [None] * slots  # row within a stack, None when the slot is the array itself

    def __getitem__(self, index: int) -> mx.array | None:
        array, row = self._slots[index], self._rows[index]
        return array if array is None or row is None else array[row : row + 1]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._slots[index], self._rows[index] = value, None

    def __iter__(self) -> Iterator[mx.array | None]:
        return (self[index] for index in range(len(self._slots)))

    @property
    def slots(self) -> int:
        """How many arrays the layer keeps."""
        return len(self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether no token has been read yet."""
        return all(slot is None for slot in self._slots)

    def stacked(self, index: int) -> tuple[mx.array | None, int | None]:
        """The slot as it is kept: an array and the row in it (None: the whole array is this sequence's)."""
        return self._slots[index], self._rows[index]

    def copied(self) -> Iterator[tuple[int, mx.array]]:
        """(index, array [1, …]) of every filled slot, with buffers of their own.

        A slot may be a row of a stack that other sequences are in, or the end of a whole chunk's convolution input: measured, a
        snapshot of 1 KB that held on to 1 MB.
        """
        for index in range(len(self._slots)):
            array = self[index]
            if array is not None:
                yield index, _copy(array)

    def form(self) -> RecurrentForm:
        """What is kept of such a layer looks like. After the first token."""
        return RecurrentForm(self.slots, tuple((index, _array_form(array)) for index, array in self.copied()))

    def settle(self) -> None:
        """Let go of the chunk that was read last: a slot may be a view of it."""
        for index, array in self.copied():
            self[index] = array

    def set_row(self, index: int, stack: mx.array, row: int) -> None:
        """Keep the slot as a row of a stack that the step has computed."""
        self._slots[index], self._rows[index] = stack, row

    def make_mask(self, tokens: int) -> None:
        """No padding, no mask."""

    def advance(self, tokens: int) -> None:
        """Nothing to count: there is no padding."""

    def reserve(self, tokens: int) -> None:
        """Nothing to do: the state does not grow."""

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""
        for slot in self._slots:
            if slot is not None:
                yield slot

    def bytes_per_token(self) -> int:
        """0: the state does not grow."""
        return 0

    def fixed_bytes(self) -> int:
        """Bytes of this sequence's state."""
        return sum(array.nbytes // (1 if row is None else array.shape[0]) for array, row in self._kept())

    def _kept(self) -> Iterator[tuple[mx.array, int | None]]:
        return ((array, row) for array, row in zip(self._slots, self._rows, strict=True) if array is not None)


class Composite:
    """Several kinds in one layer: pairs of KV, KV beside a recurrent state, MLA latents with their index."""

    def __init__(self, parts: tuple[LayerState, ...]) -> None:
        self.parts = parts

    def reserve(self, tokens: int) -> None:
        """Reserve in every part."""
        for part in self.parts:
            part.reserve(tokens)

    def settle(self) -> None:
        """Settle every part."""
        for part in self.parts:
            part.settle()

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of all parts."""
        for part in self.parts:
            yield from part.arrays()

    def bytes_per_token(self) -> int:
        """Sum over the parts."""
        return sum(part.bytes_per_token() for part in self.parts)

    def fixed_bytes(self) -> int:
        """Sum over the parts."""
        return sum(part.fixed_bytes() for part in self.parts)


LayerKV: TypeAlias = FullKV | WindowKV
LayerState: TypeAlias = FullKV | WindowKV | RecurrentState | Composite | ForeignState


def fresh_layer(cache: Any) -> LayerState:
    """The kind that stands for one of mlx-lm's cache objects (as `make_prompt_cache` gives them), empty.

    Kinds are told by class name, so that nothing of mlx-lm is imported here.
    """
    kind = type(cache).__name__
    if kind == "CacheList":
        return Composite(tuple(fresh_layer(part) for part in cache.caches))
    if kind == "KVCache":
        return FullKV()
    if kind == "RotatingKVCache" and cache.keep == 0:
        return WindowKV(cache.max_size)
    if kind == "ArraysCache" or kind == "MambaCache":
        return RecurrentState(len(cache.cache))
    return ForeignState(cache)


def has_foreign(layer: LayerState) -> bool:
    """Whether a layer keeps its state in an object that Holdfast cannot lay out itself."""
    if isinstance(layer, Composite):
        return any(has_foreign(part) for part in layer.parts)
    return isinstance(layer, ForeignState)
