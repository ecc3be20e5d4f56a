"""Keys and values of every token."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from holdfast.kv import buffers
from holdfast.kv.form import CheckpointLayout, HeadsForm
from holdfast.kv.layer import LayerKV, SnapshotMismatch


class FullKV(LayerKV):
    """Capacity is reserved, so that growth within it copies nothing."""

    kind = "full"
    grows = True

    def __init__(self) -> None:
        super().__init__()
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens in all at the next append; never shrinks."""
        self._reserved = max(self._reserved, tokens)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens."""
        capacity = max(self._reserved, self.tokens + keys.shape[2])
        if not self._buffers or self._buffers[0].shape[2] < capacity:
            self._buffers = buffers.moved(self._buffers, (keys, values), capacity=capacity, start=0, end=self.tokens)
        self._write(keys, values)

    def can_rewind(self, tokens: int) -> bool:
        """Any number of the tokens that were read."""
        return tokens <= self.tokens

    def form(self) -> tuple[HeadsForm, ...]:
        """Keys and values."""
        return tuple(map(buffers.heads_form, self._buffers))

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Keys and values of tokens start to end."""
        return tuple(buffers.copied(buffer[:, :, start:end]) for buffer in self._buffers)

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Append the span that ends at token `end`."""
        keys, values = next(arrays), next(arrays)
        if {keys.shape[2], values.shape[2]} != {end - self.tokens}:
            sizes = f"keys of {keys.shape[2]} and values of {values.shape[2]}"
            raise SnapshotMismatch(f"a run of {end - self.tokens} tokens has {sizes}")
        self.append(keys, values)

    def bytes_per_token(self) -> int:
        """Of keys and values."""
        return sum(array.nbytes // array.shape[2] for array in self._buffers)
