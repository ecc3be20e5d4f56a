"""A layer that keeps every token quantized to 8, 5 or 4 bits, except those of the current block.

Blocks begin at fixed positions. A query sees the tokens of its own block unquantized, and those of
all earlier blocks quantized, no matter whether they came from the cache or were just computed. So
what a query sees depends only on its position: however a prompt is cut into chunks, and wherever a
sequence is interrupted and restored, the result is the same.

Each token is quantized independently, in groups of 64 (or 32) dimensions with a scale and a bias.
So the quantized numbers (codes) can be cut and joined like keys and values, and a `FullKV` holds
them and can share them between sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Self

import mlx.core as mx
import numpy as np

from holdfast.worker.cpu.kernels.decode_attention import Bits, Quantized, can_dequantize, dequantize
from holdfast.worker.cpu.kernels.five_bits import FIELDS_OF_FIVE_BITS
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import (
    DTYPES,
    CheckpointLayout,
    HeadsForm,
    LayerKV,
    LayerState,
    SnapshotMismatch,
    copied,
    joined,
    moved,
    pair_of,
)

_ARRAYS = 3  # codes, scales and biases


def group_of(dimension: int) -> int | None:
    """How many dimensions of a head share a scale and a bias; None if heads of this size cannot be
    quantized.
    """
    return next((size for size in (64, 32) if dimension % size == 0), None)


def stored_bits(kv_bits: KVBits, *, end: int, block_tokens: int) -> KVBits:
    """The form in which a block that ends at this position is stored: quantized if the block is
    complete, otherwise native, so that a sequence can continue there.
    """
    return "native" if end % block_tokens else kv_bits


def quantized(array: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (uint32), scales and biases of keys or values, [1, heads, tokens, …]. Lazy."""
    codes, scales, biases = mx.quantize(array, group_size=group_of(array.shape[-1]), bits=bits)
    # Scales and biases of float32 keys and values are stored in float16: the rounding error is
    # small compared with that of the codes, which is half a step. In float32, they would take a
    # fifth of the memory of 4-bit keys.
    scale_type = mx.float16 if array.dtype == mx.float32 else array.dtype
    return codes, scales.astype(scale_type), biases.astype(scale_type)


def dequantized(arrays: Sequence[mx.array], *, bits: int, dtype: mx.Dtype) -> mx.array:
    """The inverse of `quantized`. Lazy."""
    codes, scales, biases = fit_for("mx.dequantize", arrays)
    if not codes.shape[-1]:  # an index has keys only
        return mx.zeros(codes.shape, dtype)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    if bits == 5 and mx.default_device() == mx.Device(mx.cpu):
        groups = _codes_of_five_bits(codes).reshape(*scales.shape, -1).astype(dtype)
        return (groups * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], -1)
    group = codes.shape[-1] * 32 // bits // scales.shape[-1]
    return mx.dequantize(codes, scales, biases, group_size=group, bits=bits)


def _codes_of_five_bits(packed: mx.array) -> mx.array:
    """Unpack codes of 5 bits to one code per byte, [1, heads, tokens, dimension]. Lazy.

    Even with the scaling that follows, this takes a quarter of the time of `mx.dequantize`, which
    has no fast loop for 5 bits on CPUs. Five bytes hold eight codes, the first one in the lowest
    bits; they are spread over the eight bytes of an integer (`FIELDS_OF_FIVE_BITS`).
    """
    bytes_of_codes = packed.view(mx.uint8)
    *rows, count = bytes_of_codes.shape
    fives = bytes_of_codes.reshape(*rows, count // 5, 5)
    codes = mx.pad(fives, [(0, 0)] * len(rows) + [(0, 0), (0, 3)]).view(mx.uint64)
    for low, high, shift in FIELDS_OF_FIVE_BITS:
        stay, move, by = (mx.array(number, mx.uint64) for number in (low, high, shift))
        codes = (codes & stay) | ((codes & move) << by)
    return codes.view(mx.uint8).reshape(*rows, count * 8 // 5)


def fit_for(function: str, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """Codes, scales and biases for a call of this function of MLX: slices are copied if the
    function gives wrong results for slices on this device.
    """
    return [mx.contiguous(array) for array in arrays] if function in wrong_over_slices() else arrays


@cache
def wrong_over_slices() -> frozenset[str]:
    """The MLX functions that refuse slices of quantized arrays on this device, or return wrong
    results for them.

    Examples are `mx.dequantize` on Metal in some versions (mlx#4370), and `mx.quantized_matmul` on
    CUDA, which has no kernel for slices. The test takes some milliseconds, once per process.
    """
    stored = mx.random.normal((1, 4, 320, 128), key=mx.random.key(0))
    queries = mx.random.normal((1, 2, 3, 128), key=mx.random.key(1))
    weights = mx.random.normal((1, 2, 3, 256), key=mx.random.key(2))
    wrong = set()
    for bits in (8, 4):
        slices = [each[:, 1:3, 37:293] for each in mx.quantize(stored, bits=bits)]
        copies = [mx.contiguous(each) for each in slices]
        multiply = partial(mx.quantized_matmul, bits=bits)
        checks: list[tuple[str, Callable[..., mx.array]]] = [
            ("mx.dequantize", partial(mx.dequantize, bits=bits)),
            ("mx.quantized_matmul", partial(multiply, queries)),
            ("mx.quantized_matmul", partial(multiply, weights, transpose=False)),
        ]
        for name, compute in checks:
            if not _agree(compute, slices, copies):
                wrong.add(name)
    return frozenset(wrong)


def _agree(
    compute: Callable[..., mx.array], slices: Sequence[mx.array], copies: Sequence[mx.array]
) -> bool:
    try:
        return bool(mx.allclose(compute(*slices), compute(*copies), rtol=1e-3, atol=1e-3).item())
    except (RuntimeError, ValueError, TypeError):  # an unsupported operation
        return False


class QuantizedKV(LayerKV):
    """Quantized keys and values of earlier blocks, and unquantized ones of the current block.

    The codes of the earlier blocks are in `_old`. The buffers have the unquantized tokens from
    position `_begin` on: those of the current block, and during a forward pass all of its tokens.
    """

    kind = "full"
    grows = True

    def __init__(
        self,
        kv_bits: KVBits,
        *,
        form: tuple[HeadsForm, HeadsForm],
        block_tokens: int,
    ) -> None:
        """form: the shapes and types of keys and of values, before they are quantized."""
        super().__init__()
        self.kv_bits = kv_bits
        self._bits = BITS[kv_bits]
        self._form = form
        # whether the codes of keys and values are in one buffer, the heads of the keys first
        self._is_joint = form[0] == form[1] and self._bits[0] == self._bits[1]
        self._block = block_tokens
        self._begin = 0
        self._old = FullKV()

    @property
    def can_share(self) -> bool:
        """Whether several running sequences can hold the same codes."""
        return self._old.can_share

    @can_share.setter
    def can_share(self, value: bool) -> None:
        self._old.can_share = value

    # -- append

    def reserve(self, tokens: int) -> None:
        self._old.reserve(tokens)

    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        self._make_room(arrays, arrays[0].shape[2])
        self._write(arrays)

    def make_room(self, like: mx.array, tokens: int) -> bool:
        self._make_room((like,), tokens)
        self._quantize(self._own(self.tokens))
        return True

    def add_written(self, tokens: int) -> None:
        super().add_written(tokens)
        self._quantize(self._own(self.tokens - 1))

    def sees_alike(self, tokens: int) -> bool:
        return self._own(self.tokens) == self._own(self.tokens + tokens - 1)

    def _make_room(self, like: Sequence[mx.array], tokens: int) -> None:
        if not self._buffers or self._end + tokens > self._buffers[0].shape[2]:
            self._quantize(self._own(self.tokens))  # the new tokens see these blocks quantized
            kept = self.tokens - self._old.tokens
            self._move(like, capacity=max(self._block, kept + tokens))

    def _own(self, position: int) -> int:
        """The first position of the block that contains a position."""
        return position // self._block * self._block

    def _quantize(self, end: int) -> None:
        """Quantize the tokens up to position `end` that are not quantized yet. Lazy."""
        start = self._old.tokens
        if start < end:
            self._old.append_arrays(self._codes_of_native(start, end))

    def _codes_of_native(self, start: int, end: int) -> tuple[mx.array, ...]:
        return self._codes(self._native(start, end))

    def _codes(self, native: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """Quantize stored keys and values: their codes, scales and biases, as `_old` holds them."""
        if not self._is_joint:
            native = pair_of(native)
        return tuple(
            array
            for buffer, bits in zip(native, self._bits, strict=False)
            for array in quantized(buffer, bits)
        )

    def _native(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Unquantized keys and values of tokens `start` to `end`, which must be in the buffers."""
        assert self._begin <= start <= end <= self.tokens, "these tokens are only held quantized"
        return tuple(
            buffer[:, :, start - self._begin : end - self._begin] for buffer in self._buffers
        )

    def _move(self, like: Sequence[mx.array], *, capacity: int) -> None:
        """Move the tokens that are not quantized to new buffers."""
        kept = self._old.tokens
        self._buffers = moved(
            self._buffers, like, capacity=capacity, start=kept - self._begin, end=self._end
        )
        self._end -= kept - self._begin
        self._begin = kept

    def trim(self) -> None:
        if self._buffers and self._buffers[0].shape[2] > self._block:
            self._move(self._buffers, capacity=self._block)

    def take_over(self, native: FullKV) -> None:
        """Take over all tokens of an unquantized state, which is empty afterwards, and quantize
        those before the current block. Waits for the device, so that the memory is free on return.
        """
        assert self.tokens == 0, "the state has tokens of its own"
        end = self._own(native.tokens - 1) if native.tokens else 0
        self._old = native.converted(end, self.kv_bits, self._codes)
        self.tokens = self._begin = end
        if end < native.tokens:
            self.append_arrays(native.copy_arrays(end, native.tokens))
        mx.eval(list(self.arrays()))
        native.release()

    # -- attend

    def held(self) -> int:
        return self.tokens

    def parts(self, count: int) -> tuple[tuple[mx.array, mx.array], ...]:
        ((_, parts),) = self.sights(1, count)
        return parts

    def sights(
        self, tokens: int, window: int | None
    ) -> Iterator[tuple[slice, tuple[tuple[mx.array, mx.array], ...]]]:
        first = self.tokens - tokens
        old = self._old_pairs(self._own(self.tokens - 1))
        at = first
        while at < self.tokens:
            own = self._own(at)
            end = min(own + self._block, self.tokens)
            seen_from = 0 if window is None else max(0, at + 1 - window)
            parts = [
                (keys[:, :, low:high], values[:, :, low:high])
                for start, keys, values in old
                if (low := max(seen_from - start, 0)) < (high := min(own - start, keys.shape[2]))
            ]
            parts.append(pair_of(self._native(max(own, seen_from), end)))
            yield slice(at - first, end - first), tuple(parts)
            at = end

    def _old_pairs(self, end: int) -> list[tuple[int, mx.array, mx.array]]:
        """Dequantized keys and values of the tokens before `end`, as runs of (first position, keys,
        values).
        """
        runs = list(self._old.stored_from_start(end))
        if runs and self._kernel_dequantizes():
            return [(0, *self._dequantized_by_kernel(runs))]
        dtype = DTYPES[self._form[0].dtype]
        pairs = []
        position = 0
        for arrays, low, high in runs:
            cut = [array[:, :, low:high] for array in arrays]
            stored = [
                dequantized(cut[at : at + _ARRAYS], bits=bits, dtype=dtype)
                for at, bits in zip(range(0, len(cut), _ARRAYS), self._bits, strict=False)
            ]
            pairs.append((position, *pair_of(stored)))
            position += high - low
        return pairs

    def _kernel_dequantizes(self) -> bool:
        """Whether the C kernel can dequantize this layer, which is several times as fast as MLX."""
        return mx.default_device() == mx.Device(mx.cpu) and all(
            form.dtype == "float32" and form.dimension and can_dequantize(form.dimension)
            for form in self._form
        )

    def _dequantized_by_kernel(
        self, runs: Sequence[tuple[tuple[mx.array, ...], int, int]]
    ) -> tuple[mx.array, mx.array]:
        """Dequantized keys and values of all runs (arrays, start, end). Evaluates the arrays."""
        mx.eval([arrays for arrays, _, _ in runs])
        tokens = sum(end - start for _, start, end in runs)
        firsts = range(0, len(runs[0][0]), _ARRAYS)  # where codes, scales and biases begin
        stored = []
        for form, first, bits in zip(self._form, firsts, self._bits, strict=False):
            codes = [
                (_as_numpy(arrays[first : first + _ARRAYS], bits), start, end)
                for arrays, start, end in runs
            ]
            heads = len(codes[0][0].codes)
            array = mx.zeros((1, heads, tokens, form.dimension))
            mx.eval(array)
            dequantize(codes, np.array(array, copy=False)[0])  # writes to the array's memory
            stored.append(array)
        return pair_of(stored)

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        if count == 0:
            return pair_of(self._buffers, end=0)
        keys, values = joined(self.parts(count))
        return keys, values

    def stored(self, count: int) -> Iterator[tuple[tuple[mx.array, ...], int, int]]:
        start = self.tokens - count
        own = self._own(self.tokens - 1)
        position = 0
        for arrays, low, high in self._old.stored_from_start(own):
            skipped = max(0, start - position)
            if low + skipped < high:
                yield arrays, low + skipped, high
            position += high - low
        yield self._buffers, max(own, start) - self._begin, self._end

    # -- go back, share

    def can_rewind(self, tokens: int) -> bool:
        left = self.tokens - tokens
        return left >= 0 and (left == self._own(left) or self._own(left) >= self._begin)

    def quantized_before(self, tokens: int) -> int:
        return self._own(tokens)

    def lasting(self, tokens: int) -> int:
        return self._own(tokens)

    def resumable(self, tokens: int) -> int:
        own = self._own(tokens)
        return tokens if own >= self._old.tokens else own

    def rewind(self, tokens: int) -> None:
        assert self.can_rewind(tokens), f"{tokens} tokens cannot be dropped"
        self.tokens -= tokens
        excess = self._old.tokens - self._own(self.tokens)
        if excess > 0:
            self._old.rewind(excess)
        self._end = max(0, self.tokens - self._begin)
        self._begin = min(self._begin, self.tokens)

    @property
    def frozen_tokens(self) -> int:
        return self._old.frozen_tokens

    def freeze(self) -> None:
        self._old.freeze()
        if self._buffers:
            own = self.tokens - self._old.tokens
            if self._buffers[0].shape[2] > own or self._begin < self._old.tokens:
                self._move(self._buffers, capacity=own)

    def frozen_arrays(self) -> Iterator[mx.array]:
        return self._old.frozen_arrays()

    @property
    def frozen_version(self) -> int:
        return self._old.frozen_version

    def fork(self, tokens: int) -> Self:
        quantized_tokens = min(self._own(tokens), self._old.tokens)
        fork = type(self)(self.kv_bits, form=self._form, block_tokens=self._block)
        fork._old = self._old.fork(quantized_tokens)
        fork.tokens = fork._begin = quantized_tokens
        if quantized_tokens < tokens:
            fork.append_arrays(tuple(map(copied, self._native(quantized_tokens, tokens))))
        return fork

    def share_prefix(self, other: LayerState, tokens: int) -> None:
        assert isinstance(other, QuantizedKV)
        shared = min(tokens, self._old.frozen_tokens, other._old.frozen_tokens)
        self._old.share_prefix(other._old, shared)

    # -- snapshots

    def form(self) -> tuple[HeadsForm, ...]:
        return self._form

    def stored_bits(self, end: int) -> KVBits:
        return stored_bits(self.kv_bits, end=end, block_tokens=self._block)

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        if self.stored_bits(end) == "native":
            return tuple(map(copied, pair_of(self._native(start, end))))
        middle = min(max(start, self._old.tokens), end)
        runs = []
        if start < middle:
            runs.append(self._old.copy_arrays(start, middle))
        if middle < end:
            runs.append(self._codes_of_native(middle, end))
        return self._as_pair(runs[0] if len(runs) == 1 else joined(runs))

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        is_native = layout.kv_bits == "native"
        if not is_native and layout.kv_bits != self.kv_bits:
            raise SnapshotMismatch(f"the block is in {layout.kv_bits} bits, not in {self.kv_bits}")
        taken = [next(arrays) for _ in range(2 if is_native else 2 * _ARRAYS)]
        found = {array.shape[2] for array in taken}
        if found != {end - self.tokens}:
            raise SnapshotMismatch(
                f"a block of {end - self.tokens} tokens has arrays of {sorted(found)} tokens"
            )
        if is_native:
            self.append_arrays(taken)
            return
        self._quantize(self.tokens)
        self._old.append_arrays(self._as_stored(taken))
        self.tokens = self._begin = end
        self._buffers = ()
        self._end = 0

    def _as_pair(self, arrays: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """The arrays of the keys, and then those of the values."""
        if len(arrays) > _ARRAYS:
            return tuple(arrays)
        heads = self._form[0].heads
        return tuple(
            copied(array[:, part])
            for part in (slice(None, heads), slice(heads, None))
            for array in arrays
        )

    def _as_stored(self, pair: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """The inverse of `_as_pair`: arrays as `_old` holds them, in one buffer if keys and values
        have the same form.
        """
        if not self._is_joint:
            return tuple(pair)
        return tuple(
            mx.concatenate([of_keys, of_values], axis=1)
            for of_keys, of_values in zip(pair[:_ARRAYS], pair[_ARRAYS:], strict=True)
        )

    def arrays(self) -> Iterator[mx.array]:
        yield from self._old.arrays()
        yield from self._buffers

    def bytes_per_token(self) -> int:
        """Bytes of the codes, scales and biases of a token."""
        return sum(
            form.heads * (form.dimension * bits // 8 + form.dimension // _group(form) * 4)
            for form, bits in zip(self._form, self._bits, strict=True)
        )

    def fixed_bytes(self) -> int:
        """Bytes of the buffers, which hold one block at rest."""
        return sum(form.of(self._block).nbytes for form in self._form)


def _group(form: HeadsForm) -> int:
    group = group_of(form.dimension)
    assert group is not None, f"heads of {form.dimension} dimensions cannot be quantized"
    return group


def _as_numpy(arrays: Sequence[mx.array], bits: Bits) -> Quantized:
    """Views of evaluated codes, scales and biases. Release them before the next append."""
    codes, scales, biases = (np.array(array, copy=False)[0] for array in arrays)
    assert codes.flags.c_contiguous, "a buffer is not row-contiguous"
    return Quantized(codes, scales, biases, bits)
