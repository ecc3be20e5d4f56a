"""Layers that keep only the last tokens: sliding windows, and chunked attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from holdfast.worker.kv.layer import (
    CheckpointLayout,
    HeadsForm,
    KVParts,
    LayerKV,
    SnapshotMismatch,
    copied,
    new_buffers,
)

# spare room after the window, so that its tokens are moved only once in this many steps
WINDOW_SLACK_TOKENS = 256


class WindowKV(LayerKV):
    """Keys and values of the last `window` tokens, in order, in a slightly longer buffer.

    The next query can attend to the last window - 1 tokens. Until `trim`, the buffer also keeps all
    tokens of the last append, whose queries see earlier tokens.
    """

    kind = "window"

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._most_earlier_tokens = window - 1  # how many earlier tokens a query sees at most

    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Add the next tokens. Until `trim`, the buffers also keep what the first of them sees."""
        new_tokens = arrays[0].shape[2]
        if not self._buffers or self._end + new_tokens > self._buffers[0].shape[2]:
            self._reallocate(
                arrays, capacity=max(self._usual_capacity, self._visible_tokens + new_tokens)
            )
        self._write(arrays)

    def trim(self) -> None:
        """Shrink buffers that a long chunk has enlarged, but keep the visible tokens."""
        if self._buffers and self._buffers[0].shape[2] > self._usual_capacity:
            self._reallocate(self._buffers, capacity=self._usual_capacity)

    @property
    def _usual_capacity(self) -> int:
        """The length of the buffers, in tokens, unless a longer chunk was appended."""
        return self._most_earlier_tokens + 1 + WINDOW_SLACK_TOKENS

    def _reallocate(self, like: Sequence[mx.array], *, capacity: int) -> None:
        """Move the visible tokens to new buffers. like: as for `new_buffers`."""
        visible_tokens = self._visible_tokens
        self._buffers = new_buffers(
            self._buffers, like, capacity=capacity, start=self._end - visible_tokens, end=self._end
        )
        self._end = visible_tokens

    def visible(self, tokens: int) -> int:
        """How many tokens are kept after `tokens` tokens: those that the next token sees."""
        return min(tokens, self._most_earlier_tokens)

    def visible_before_next(self) -> int:
        return self._visible_tokens

    @property
    def _visible_tokens(self) -> int:
        """How many of the present tokens are kept."""
        return self.visible(self.tokens)

    def can_rewind(self, tokens: int) -> bool:
        """Whether the buffer still has all tokens that the next token would see after rewinding.

        Always true for the tokens of the last append.
        """
        return tokens <= self._end and self._end - tokens >= self.visible(self.tokens - tokens)

    def form(self) -> tuple[HeadsForm, ...]:
        most_tokens = self._most_earlier_tokens
        return tuple(HeadsForm.of_array(array, most_tokens=most_tokens) for array in self.last(0))

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        return tuple(map(copied, self.last(self.visible(self.tokens))))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Restore keys and values that were copied after `end` tokens. Lazy. Raises
        SnapshotMismatch.
        """
        keys = next(arrays)
        values = next(arrays)
        if keys.shape[2] != self.visible(end):
            raise SnapshotMismatch(
                f"a {self.kind} of {self._most_earlier_tokens + 1} tokens was saved with {keys.shape[2]} "
                f"tokens at position {end}"
            )
        self.append(keys, values)
        self.tokens = end

    def fixed_bytes(self) -> int:
        return self._usual_capacity * sum(array.nbytes // array.shape[2] for array in self._buffers)


class ChunkKV(WindowKV):
    """A layer with chunked attention: positions are divided into chunks of equal length, and a
    token sees only the earlier tokens of the same chunk. Keeps the current chunk.

    A complete chunk is kept until the next token comes, although that token will not see it, so
    that snapshots are never empty.
    """

    kind = "chunk"

    def __init__(self, chunk: int) -> None:
        super().__init__(chunk)
        self.window = None
        self.chunk = self._chunk_tokens = chunk

    def visible(self, tokens: int) -> int:
        return 1 + (tokens - 1) % self._chunk_tokens if tokens else 0

    def visible_before_next(self) -> int:
        return self.tokens % self._chunk_tokens

    def attention_ranges(self, tokens: int, window: int | None) -> Iterator[tuple[slice, KVParts]]:
        """Yield the last `tokens` tokens, divided at the borders of chunks, each range with the
        keys and values of its chunk. window: ignored.
        """
        first_position = self.tokens - tokens
        for start in range(
            first_position - first_position % self._chunk_tokens, self.tokens, self._chunk_tokens
        ):
            end = min(start + self._chunk_tokens, self.tokens)
            keys, values = self.last(self.tokens - start)
            chunk_tokens = end - start
            rows = slice(max(start - first_position, 0), end - first_position)
            yield rows, ((keys[:, :, :chunk_tokens], values[:, :, :chunk_tokens]),)

    def seen_by_last(self, window: int | None) -> int:
        return self.visible(self.tokens)

    def form(self) -> tuple[HeadsForm, ...]:
        chunk_tokens = self._chunk_tokens
        return tuple(HeadsForm.of_array(array, chunk_tokens=chunk_tokens) for array in self.last(0))
