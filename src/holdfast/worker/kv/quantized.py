"""A layer that keeps every token quantized to 8, 5 or 4 bits, except those of the current block.

Blocks begin at fixed positions. A query sees the tokens of the same block unquantized, and those of
all earlier blocks quantized, no matter whether they came from the cache or were just computed. So
what a query sees depends only on its position: however a prompt is cut into chunks, and wherever a
sequence is interrupted and restored, the result is the same.

Each token is quantized independently, in groups of 64 (or 32) dimensions with a scale and a bias.
So the quantized numbers (codes) can be cut and joined like keys and values, and a `FullKV` holds
them and can share them between sequences. "Native" keys and values are unquantized.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Self, TypeAlias

import mlx.core as mx

from holdfast.worker.kv.bits import Bits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import (
    DTYPES,
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

ARRAYS_OF_CODES = 3  # codes, scales and biases

# Dequantizes what MLX would otherwise: gets adjoining codes, the forms of keys and of values, and
# their bits. Returns adjoining keys and values; None leaves them to MLX.
Dequantize: TypeAlias = Callable[
    [Sequence[StoredRun], tuple[HeadsForm, HeadsForm], tuple[Bits, Bits]],
    list[tuple[mx.array, mx.array]] | None,
]


def group_size_of(dimension: int) -> int | None:
    """How many dimensions share a scale and a bias; None: heads of this size cannot be quantized."""
    return next((size for size in (64, 32) if dimension % size == 0), None)


def quantized(array: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (uint32), scales and biases of keys or values, [1, heads, tokens, …]. Lazy."""
    codes, scales, biases = mx.quantize(array, group_size=group_size_of(array.shape[-1]), bits=bits)
    # Scales and biases of float32 keys and values are stored in float16: the rounding error is
    # small compared with that of the codes, which is half a step. In float32, they would take a
    # fifth of the memory of 4-bit keys.
    scale_type = mx.float16 if array.dtype == mx.float32 else array.dtype
    return codes, scales.astype(scale_type), biases.astype(scale_type)


def dequantized(arrays: Sequence[mx.array], *, bits: int, dtype: mx.Dtype) -> mx.array:
    """The inverse of `quantized`. Lazy."""
    codes, scales, biases = copied_if_needed("mx.dequantize", arrays)
    if not codes.shape[-1]:  # an index has keys only
        return mx.zeros(codes.shape, dtype)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    group_size = codes.shape[-1] * 32 // bits // scales.shape[-1]
    return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)


def copied_if_needed(function: str, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """Codes, scales and biases for a call of this function of MLX: slices are copied if the
    function gives wrong results for slices on this device.
    """
    return [mx.contiguous(array) for array in arrays] if function in wrong_over_slices() else arrays


@cache
def wrong_over_slices() -> frozenset[str]:
    """The MLX functions that refuse slices of quantized arrays on this device, or return wrong
    results for them.

    Examples are `mx.dequantize` on Metal in some versions (mlx#4370), and `mx.quantized_matmul` on
    CUDA, which lacks a kernel for slices. The test takes some milliseconds, once per process.
    """
    array = mx.random.normal((1, 4, 320, 128), key=mx.random.key(0))
    queries = mx.random.normal((1, 2, 3, 128), key=mx.random.key(1))
    weights = mx.random.normal((1, 2, 3, 256), key=mx.random.key(2))
    wrong_functions = set()
    for bits in (8, 4):
        slices = [each[:, 1:3, 37:293] for each in mx.quantize(array, bits=bits)]
        copies = [mx.contiguous(each) for each in slices]
        multiply = partial(mx.quantized_matmul, bits=bits)
        checks: list[tuple[str, Callable[..., mx.array]]] = [
            ("mx.dequantize", partial(mx.dequantize, bits=bits)),
            ("mx.quantized_matmul", partial(multiply, queries)),
            ("mx.quantized_matmul", partial(multiply, weights, transpose=False)),
        ]
        for name, compute in checks:
            if not _gives_same_result(compute, slices, copies):
                wrong_functions.add(name)
    return frozenset(wrong_functions)


def _gives_same_result(
    compute: Callable[..., mx.array], slices: Sequence[mx.array], copies: Sequence[mx.array]
) -> bool:
    """Whether a function gives the same result for slices as for copies of them."""
    try:
        return bool(mx.allclose(compute(*slices), compute(*copies), rtol=1e-3, atol=1e-3).item())
    except (RuntimeError, ValueError, TypeError):  # an unsupported operation
        return False


class QuantizedKV(LayerKV):
    """Quantized keys and values of earlier blocks, and unquantized ones of the current block.

    The codes of the earlier blocks are in `_codes_state`, a `FullKV` that holds codes, scales and biases
    in place of keys and values. The buffers have the unquantized tokens from position `_native_start` on:
    those of the current block, and during a forward pass all tokens of that pass.
    """

    kind = "full"
    grows = True

    def __init__(
        self,
        bits: tuple[Bits, Bits],
        *,
        form: tuple[HeadsForm, HeadsForm],
        block_tokens: int,
        dequantize: Dequantize | None = None,
    ) -> None:
        """form: the shapes and types of keys and of values, before they are quantized. dequantize:
        dequantizes in place of MLX; None: MLX does it.
        """
        super().__init__()
        self.bits = self._bits = bits
        self._form = form
        # whether the codes of keys and values are in one buffer, the heads of the keys first
        self._has_common_buffer = form[0] == form[1] and self._bits[0] == self._bits[1]
        self._block_tokens = block_tokens
        self._dequantize = dequantize
        self._native_start = 0
        self._codes_state = FullKV()

    @property
    def can_share(self) -> bool:
        """Whether several running sequences can hold the same codes."""
        return self._codes_state.can_share

    @can_share.setter
    def can_share(self, value: bool) -> None:
        self._codes_state.can_share = value

    # -- append

    def reserve(self, tokens: int) -> None:
        self._codes_state.reserve(tokens)

    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        self._make_room(arrays, arrays[0].shape[2])
        self._write(arrays)

    def make_room(self, like: mx.array, tokens: int) -> bool:
        self._make_room((like,), tokens)
        self._quantize_before(self._block_start(self.tokens))
        return True

    def add_written(self, tokens: int) -> None:
        super().add_written(tokens)
        self._quantize_before(self._block_start(self.tokens - 1))

    def see_one_form(self, tokens: int) -> bool:
        return self._block_start(self.tokens) == self._block_start(self.tokens + tokens - 1)

    def _make_room(self, like: Sequence[mx.array], tokens: int) -> None:
        """Make the buffers long enough for the next tokens. like: as for `new_buffers`."""
        if not self._buffers or self._end + tokens > self._buffers[0].shape[2]:
            # the new tokens see these blocks quantized
            self._quantize_before(self._block_start(self.tokens))
            native_tokens = self.tokens - self._codes_state.tokens
            self._reallocate(like, capacity=max(self._block_tokens, native_tokens + tokens))

    def _block_start(self, position: int) -> int:
        """The first position of the block that contains a position."""
        return position // self._block_tokens * self._block_tokens

    def _quantize_before(self, end: int) -> None:
        """Quantize the tokens up to position `end` that are not quantized yet. Lazy."""
        start = self._codes_state.tokens
        if start < end:
            self._codes_state.append_arrays(self._codes_of_native(start, end))

    def _codes_of_native(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Quantize tokens `start` to `end`, which must be in the buffers. Lazy."""
        return self._codes_of(self._native_arrays(start, end))

    def _codes_of(self, native: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """Quantize stored keys and values: their codes, scales and biases, as `_codes_state` holds them."""
        if not self._has_common_buffer:
            native = keys_and_values(native)
        return tuple(
            array
            for buffer, bits in zip(native, self._bits, strict=False)
            for array in quantized(buffer, bits)
        )

    def _native_arrays(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Unquantized keys and values of tokens `start` to `end`, which must be in the buffers."""
        assert self._native_start <= start <= end <= self.tokens, (
            "these tokens are there only in quantized form"
        )
        return tuple(
            buffer[:, :, start - self._native_start : end - self._native_start]
            for buffer in self._buffers
        )

    def _reallocate(self, like: Sequence[mx.array], *, capacity: int) -> None:
        """Move the tokens that are not quantized to new buffers. like: as for `new_buffers`."""
        new_start = self._codes_state.tokens
        self._buffers = new_buffers(
            self._buffers,
            like,
            capacity=capacity,
            start=new_start - self._native_start,
            end=self._end,
        )
        self._end -= new_start - self._native_start
        self._native_start = new_start

    def trim(self) -> None:
        if self._buffers and self._buffers[0].shape[2] > self._block_tokens:
            self._reallocate(self._buffers, capacity=self._block_tokens)

    def take_over(self, native: FullKV) -> None:
        """Take over all tokens of an unquantized state, which is empty afterwards, and quantize
        those before the current block. Waits for the device, so that the memory is free on return.
        """
        assert self.tokens == 0, "the state has tokens of its own"
        end = self._block_start(native.tokens - 1) if native.tokens else 0
        self._codes_state = native.converted(end, self._bits, self._codes_of)
        self.tokens = self._native_start = end
        if end < native.tokens:
            self.append_arrays(native.copy_arrays(end, native.tokens))
        mx.eval(list(self.arrays()))
        native.release()

    # -- attend

    def kept_tokens(self) -> int:
        return self.tokens

    def parts(self, count: int) -> KVParts:
        ((_, parts),) = self.attention_ranges(1, count)
        return parts

    def attention_ranges(self, tokens: int, window: int | None) -> Iterator[tuple[slice, KVParts]]:
        """Yield the last `tokens` tokens block by block (LayerKV.attention_ranges): those of one
        block see the same tokens quantized, here dequantized, and their own block in native form.
        """
        first_position = self.tokens - tokens
        dequantized_runs = self._dequantized_runs(self._block_start(self.tokens - 1))
        position = first_position
        while position < self.tokens:
            block_start = self._block_start(position)
            end = min(block_start + self._block_tokens, self.tokens)
            first_visible = 0 if window is None else max(0, position + 1 - window)
            parts = [
                (keys[:, :, low:high], values[:, :, low:high])
                for start, keys, values in dequantized_runs
                if (low := max(first_visible - start, 0))
                < (high := min(block_start - start, keys.shape[2]))
            ]
            parts.append(keys_and_values(self._native_arrays(max(block_start, first_visible), end)))
            yield slice(position - first_position, end - first_position), tuple(parts)
            position = end

    def _dequantized_runs(self, end: int) -> list[tuple[int, mx.array, mx.array]]:
        """Dequantized tokens before `end`, as runs of (first position, keys, values)."""
        runs = list(self._codes_state.stored_from_start(end))
        pairs = (
            self._dequantize(runs, self._form, self._bits) if self._dequantize and runs else None
        )
        if pairs is None:
            pairs = [self._dequantized(*run) for run in runs]
        ends = itertools.accumulate((keys.shape[2] for keys, _ in pairs), initial=0)
        return [(start, keys, values) for start, (keys, values) in zip(ends, pairs, strict=False)]

    def _dequantized(
        self, arrays: Sequence[mx.array], low: int, high: int
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of tokens `low` to `high` of stored arrays. Lazy."""
        dtype = DTYPES[self._form[0].dtype]
        arrays_of_codes = [array[:, :, low:high] for array in arrays]
        stored = [
            dequantized(arrays_of_codes[index : index + ARRAYS_OF_CODES], bits=bits, dtype=dtype)
            for index, bits in zip(
                range(0, len(arrays_of_codes), ARRAYS_OF_CODES), self._bits, strict=False
            )
        ]
        return keys_and_values(stored)

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens, those of earlier blocks dequantized. Lazy."""
        if count == 0:
            return keys_and_values(self._buffers, end=0)
        keys, values = joined(self.parts(count))
        return keys, values

    def stored(self, count: int) -> Iterator[StoredRun]:
        """Yield where the last `count` tokens are stored, oldest first: codes of earlier blocks,
        then the native buffers, each with the start and the end within them.
        """
        start = self.tokens - count
        block_start = self._block_start(self.tokens - 1)
        position = 0
        for arrays, low, high in self._codes_state.stored_from_start(block_start):
            skipped = max(0, start - position)
            if low + skipped < high:
                yield arrays, low + skipped, high
            position += high - low
        yield self._buffers, max(block_start, start) - self._native_start, self._end

    # -- go back, share

    def can_rewind(self, tokens: int) -> bool:
        """Whether the last tokens can be dropped: the block that then is the current one must be
        empty or still be in the buffers in native form.
        """
        remaining_tokens = self.tokens - tokens
        return remaining_tokens >= 0 and (
            remaining_tokens == self._block_start(remaining_tokens)
            or self._block_start(remaining_tokens) >= self._native_start
        )

    def quantized_before(self, tokens: int) -> int:
        return self._block_start(tokens)

    def lasting_prefix(self, tokens: int) -> int:
        return self._block_start(tokens)

    def resumable_prefix(self, tokens: int) -> int:
        """All `tokens` tokens if their last block is still there in native form; otherwise, whole
        blocks only.
        """
        block_start = self._block_start(tokens)
        return tokens if block_start >= self._codes_state.tokens else block_start

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens, and the codes of the block that is then the current one."""
        assert self.can_rewind(tokens), f"{tokens} tokens cannot be dropped"
        self.tokens -= tokens
        excess = self._codes_state.tokens - self._block_start(self.tokens)
        if excess > 0:
            self._codes_state.rewind(excess)
        self._end = max(0, self.tokens - self._native_start)
        self._native_start = min(self._native_start, self.tokens)

    @property
    def frozen_tokens(self) -> int:
        return self._codes_state.frozen_tokens

    def freeze(self) -> None:
        """Freeze the codes, and shrink the buffers to the native tokens. Lazy."""
        self._codes_state.freeze()
        if self._buffers:
            native_tokens = self.tokens - self._codes_state.tokens
            if (
                self._buffers[0].shape[2] > native_tokens
                or self._native_start < self._codes_state.tokens
            ):
                self._reallocate(self._buffers, capacity=native_tokens)

    def frozen_arrays(self) -> Iterator[mx.array]:
        return self._codes_state.frozen_arrays()

    @property
    def frozen_version(self) -> int:
        return self._codes_state.frozen_version

    def fork(self, tokens: int) -> Self:
        """A state for another sequence that shares the codes of the first `tokens` tokens, and has
        copies of the native ones. Lazy.
        """
        quantized_tokens = min(self._block_start(tokens), self._codes_state.tokens)
        fork = type(self)(
            self._bits,
            form=self._form,
            block_tokens=self._block_tokens,
            dequantize=self._dequantize,
        )
        fork._codes_state = self._codes_state.fork(quantized_tokens)
        fork.tokens = fork._native_start = quantized_tokens
        if quantized_tokens < tokens:
            fork.append_arrays(tuple(map(copied, self._native_arrays(quantized_tokens, tokens))))
        return fork

    def share_prefix(self, other: LayerState, tokens: int) -> None:
        """Share the codes of the first tokens with another state, as far as both have frozen them."""
        assert isinstance(other, QuantizedKV)
        shared_tokens = min(
            tokens, self._codes_state.frozen_tokens, other._codes_state.frozen_tokens
        )
        self._codes_state.share_prefix(other._codes_state, shared_tokens)

    # -- snapshots

    def form(self) -> tuple[HeadsForm, ...]:
        return self._form

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Codes if a block ends at `end`; otherwise unquantized keys and values, so that a restored
        sequence can continue within the block. Those must still be in the buffers.
        """
        if end % self._block_tokens:
            return tuple(map(copied, keys_and_values(self._native_arrays(start, end))))
        codes_end = min(max(start, self._codes_state.tokens), end)
        runs = []
        if start < codes_end:
            runs.append(self._codes_state.copy_arrays(start, codes_end))
        if codes_end < end:
            runs.append(self._codes_of_native(codes_end, end))
        return self._as_pair(runs[0] if len(runs) == 1 else joined(runs))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Append a block of codes or of native keys and values, after which the state has `end`
        tokens. Lazy. Raises SnapshotMismatch if an array has another length.
        """
        own_arrays = [next(arrays)]
        is_native = own_arrays[0].dtype != mx.uint32
        own_arrays += [next(arrays) for _ in range(1 if is_native else 2 * ARRAYS_OF_CODES - 1)]
        token_counts = {array.shape[2] for array in own_arrays}
        if token_counts != {end - self.tokens}:
            raise SnapshotMismatch(
                f"a block of {end - self.tokens} tokens has arrays of {sorted(token_counts)} tokens"
            )
        if is_native:
            self.append_arrays(own_arrays)
            return
        self._quantize_before(self.tokens)
        self._codes_state.append_arrays(self._as_stored(own_arrays))
        self.tokens = self._native_start = end
        self._buffers = ()
        self._end = 0

    def _as_pair(self, arrays: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """The arrays of the keys, and then those of the values."""
        if len(arrays) > ARRAYS_OF_CODES:
            return tuple(arrays)
        heads = self._form[0].heads
        return tuple(
            copied(array[:, heads_of_pair])
            for heads_of_pair in (slice(None, heads), slice(heads, None))
            for array in arrays
        )

    def _as_stored(self, pair: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """The inverse of `_as_pair`: arrays as `_codes_state` holds them, in one buffer if keys and values
        have the same form.
        """
        if not self._has_common_buffer:
            return tuple(pair)
        return tuple(
            mx.concatenate([of_keys, of_values], axis=1)
            for of_keys, of_values in zip(
                pair[:ARRAYS_OF_CODES], pair[ARRAYS_OF_CODES:], strict=True
            )
        )

    def arrays(self) -> Iterator[mx.array]:
        yield from self._codes_state.arrays()
        yield from self._buffers

    def bytes_per_token(self) -> int:
        """Bytes of codes, scales and biases (2 bytes each) per token."""
        return sum(
            form.heads * (form.dimension * bits // 8 + form.dimension // _group_size(form) * 4)
            for form, bits in zip(self._form, self._bits, strict=True)
        )

    def fixed_bytes(self) -> int:
        return sum(form.of(self._block_tokens).nbytes for form in self._form)


def _group_size(form: HeadsForm) -> int:
    """How many dimensions of these heads share a scale and a bias."""
    group_size = group_size_of(form.dimension)
    assert group_size is not None, f"heads of {form.dimension} dimensions cannot be quantized"
    return group_size
