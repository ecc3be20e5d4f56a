"""Keys and values of the last tokens only: sliding windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from holdfast.worker.kv import buffers
from holdfast.worker.kv.form import CheckpointLayout, HeadsForm
from holdfast.worker.kv.layer import LayerKV, SnapshotMismatch

# room behind a window, so that its tokens move only once in so many steps
WINDOW_SLACK_TOKENS = 256


class WindowKV(LayerKV):
    """Keys and values of the last `window` tokens, kept in order, in a buffer a little longer than
    the window.

    Attended to can be window - 1 tokens and, until `trim`, those of the last append.
    """

    kind = "window"

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self._size = window, window

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens; older ones than any of them can see are
        dropped when room is needed.
        """
        self._append((keys, values))

    def append_stored(self, both: mx.array) -> None:
        """The same of keys and values in one array."""
        self._append((both,))

    def _append(self, new: Sequence[mx.array]) -> None:
        added = new[0].shape[2]
        if not self._buffers or self._end + added > self._buffers[0].shape[2]:
            self._move(new, capacity=max(self._resting_tokens, self.visible(self._end) + added))
        self._write(new)

    def trim(self) -> None:
        """Bring buffers that a long chunk has stretched back to their resting size; only what can
        still be seen is kept.
        """
        if self._buffers and self._buffers[0].shape[2] > self._resting_tokens:
            self._move(self._buffers, capacity=self._resting_tokens)

    @property
    def _resting_tokens(self) -> int:
        return self._size + WINDOW_SLACK_TOKENS

    def _move(self, like: Sequence[mx.array], *, capacity: int) -> None:
        kept = self.visible(self._end)
        self._buffers = buffers.moved(
            self._buffers, like, capacity=capacity, start=self._end - kept, end=self._end
        )
        self._end = kept

    def visible(self, tokens: int) -> int:
        """How many of the last of `tokens` tokens the next one can still see."""
        return min(tokens, self._size - 1)

    def can_rewind(self, tokens: int) -> bool:
        """As long as the buffer still has what the token after the remaining ones sees: the last
        append's tokens at least.
        """
        return tokens <= self._end and self._end - tokens >= self.visible(self.tokens - tokens)

    def form(self) -> tuple[HeadsForm, ...]:
        """Keys and values of what the next token can see."""
        return tuple(
            buffers.heads_form(array, most_tokens=self._size - 1) for array in self.last(0)
        )

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """The keys and values that later tokens can see."""
        return tuple(map(buffers.copied, self.last(self.visible(self.tokens))))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Begin from what can be seen after `end` tokens. Only on a fresh object."""
        keys, values = next(arrays), next(arrays)
        if keys.shape[2] != self.visible(end):
            raise SnapshotMismatch(
                f"a window of {self._size} tokens was kept with {keys.shape[2]} at token {end}"
            )
        self.append(keys, values)
        self.tokens = end

    def fixed_bytes(self) -> int:
        """Bytes of the buffers at their resting size."""
        return self._resting_tokens * sum(array.nbytes // array.shape[2] for array in self._buffers)
