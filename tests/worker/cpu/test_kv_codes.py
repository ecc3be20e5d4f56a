"""Dequantizing on a CPU, against MLX. That states dequantize with it is tested with them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from holdfast.worker.cpu import kv_codes
from holdfast.worker.cpu.kv_codes import dequantized_five
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.layer import HeadsForm
from holdfast.worker.kv.quantized import dequantized, group_size_of, quantized


@pytest.mark.parametrize("dimension", [64, 96])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_five_bits_are_dequantized_like_in_mlx(dimension: int, dtype: mx.Dtype) -> None:
    array = mx.random.normal((1, 4, 40, dimension), key=mx.random.key(5)).astype(dtype)
    group = group_size_of(dimension)
    codes, scales, biases = (each[:, 1:3, 7:33] for each in quantized(array, 5))
    expected = mx.dequantize(
        codes, scales.astype(dtype), biases.astype(dtype), group_size=group, bits=5
    )
    found = dequantized_five((codes, scales, biases), dtype=dtype)
    bound = 0 if dtype == mx.float32 else 0.02
    assert found.dtype == dtype
    assert mx.abs(found - expected).max().item() <= bound


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("kv_bits", [*BITS])
def test_runs_of_codes_become_contiguous_keys_and_values(
    kv_bits: KVBits, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(kv_codes, "can_dequantize", lambda dimension: False)
    keys, values = mx.random.normal((2, 1, 2, 40, 64), key=mx.random.key(3))
    bits = BITS[kv_bits]
    arrays = (*quantized(keys, bits[0]), *quantized(values, bits[1]))
    forms = (HeadsForm.of_array(keys), HeadsForm.of_array(values))
    found = kv_codes.dequantize([(arrays, 3, 20), (arrays, 7, 33)], forms, bits)
    if found is None:
        assert not kernel or not kv_codes.can_dequantize(64)
        assert 5 not in bits
        return
    for side, at in enumerate((0, 3)):
        whole = dequantized(arrays[at : at + 3], bits=bits[side], dtype=mx.float32)
        wanted = mx.concatenate([whole[:, :, 3:20], whole[:, :, 7:33]], axis=2)
        assert mx.allclose(
            mx.concatenate([pair[side] for pair in found], axis=2), wanted, rtol=1e-6, atol=1e-6
        )
