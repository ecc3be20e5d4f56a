"""Snapshots as bytes, and quantized."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.kv.codec import (
    block_from_bytes,
    can_keep,
    check_block,
    checkpoint_from_bytes,
    pack,
    to_bytes,
    unpack,
)
from holdfast.worker.kv.form import CheckpointLayout, Codec, HeadsForm, ModelForm
from holdfast.worker.kv.snapshot import KVBlock, SnapshotMismatch, StateCheckpoint

CODECS: tuple[Codec, ...] = ("native", "q8", "q4")
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def a_run(
    *,
    tokens: int = 9,
    dtype: mx.Dtype = mx.float32,
    layers: int = 2,
    dimension: int = 64,
    start: int = 3,
) -> KVBlock:
    key = mx.random.key(tokens * 31 + layers)
    arrays = tuple(
        mx.random.normal((1, 2, tokens, dimension), key=key).astype(dtype)
        for _ in range(2 * layers)
    )
    return KVBlock(start=start, tokens=tokens, arrays=arrays, dtype=dtype)


def bits(array: mx.array) -> bytes:
    return bytes(np.array(array.reshape(-1).view(mx.uint8)))


@given(tokens=st.integers(1, 40), layers=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_a_native_run_comes_back_from_its_bytes_bit_for_bit(
    tokens: int, layers: int, dtype: mx.Dtype
) -> None:
    run = a_run(tokens=tokens, layers=layers, dtype=dtype)
    back = unpack(block_from_bytes(*to_bytes(pack(run, "native"))))
    assert (back.start, back.tokens) == (run.start, run.tokens)
    assert [array.dtype for array in back.arrays] == [array.dtype for array in run.arrays]
    assert [bits(array) for array in back.arrays] == [bits(array) for array in run.arrays]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("codec", "error", "share"), [("q8", 0.01, 0.54), ("q4", 0.15, 0.29)])
def test_a_quantized_run_is_small_and_close_and_can_be_cut(
    codec: Codec, error: float, share: float, dtype: mx.Dtype
) -> None:
    run = a_run(tokens=64, dtype=dtype)
    packed = pack(run, codec)
    mx.eval(packed.arrays)
    assert packed.nbytes <= share * 2 * sum(array.size for array in run.arrays)  # of bf16
    whole, part = unpack(block_from_bytes(*to_bytes(packed))), unpack(packed.cut(10, offset=5))
    for kept, original, first in zip(whole.arrays, run.arrays, part.arrays, strict=True):
        assert float(mx.abs(kept.astype(mx.float32) - original.astype(mx.float32)).mean()) < error
        assert bits(first) == bits(kept[:, :, 5:15] * mx.ones((), kept.dtype))


def test_heads_that_do_not_fit_the_groups_are_refused() -> None:
    run = a_run(dimension=48)
    model = ModelForm(block=(HeadsForm(2, 48, "float32"),) * 4)
    assert [can_keep(model, codec) for codec in CODECS] == [True, False, False]
    with pytest.raises(SnapshotMismatch, match="multiple of 64"):
        pack(run, "q4")


@given(dtype=st.sampled_from(DTYPES), filled=st.lists(st.booleans(), min_size=1, max_size=3))
def test_a_state_comes_back_from_its_bytes(dtype: mx.Dtype, filled: list[bool]) -> None:
    slots = tuple(index for index, is_filled in enumerate(filled) if is_filled)
    window = (mx.ones((1, 2, 7, 4), dtype), mx.zeros((1, 2, 7, 4), dtype))
    layers = (CheckpointLayout("window", 0, ()), CheckpointLayout("recurrent", len(filled), slots))
    arrays = (*window, *(mx.full((1, 3, 5), index + 0.5, dtype) for index in slots))
    state = StateCheckpoint(position=12, layers=layers, arrays=arrays)
    mx.eval(arrays)
    back = checkpoint_from_bytes(*to_bytes(state))
    assert back.position == 12
    assert back.layers == layers
    assert [bits(array) for array in back.arrays] == [bits(array) for array in arrays]


def test_bytes_that_do_not_fit_their_description_are_refused() -> None:
    meta, parts = to_bytes(pack(a_run(), "native"))
    with pytest.raises(SnapshotMismatch, match="bytes"):
        block_from_bytes(meta, (parts[0][:-4], *parts[1:]))
    with pytest.raises(SnapshotMismatch, match="arrays are described"):
        block_from_bytes(meta, parts[:-1])
    with pytest.raises(SnapshotMismatch, match="cannot be read"):
        block_from_bytes(b"\x00" + meta, parts)
    with pytest.raises(SnapshotMismatch, match="cannot be read"):
        checkpoint_from_bytes(meta, parts)


@pytest.mark.parametrize("codec", ["native", "q8", "q4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_fits_its_models_form_and_nothing_elses(
    codec: Codec, dtype: mx.Dtype
) -> None:
    heads = HeadsForm(2, 64, str(dtype).removeprefix("mlx.core."))
    model = ModelForm(block=(heads,) * 4)
    packed = pack(a_run(dtype=dtype), codec)
    mx.eval(packed.arrays)
    meta, parts = to_bytes(packed)
    sizes = [part.nbytes for part in parts]
    assert check_block(meta, sizes, model=model, codec=codec).length == 9
    wider = HeadsForm(1, 128, heads.dtype)
    for other in (
        ModelForm(block=(heads,) * 2),
        ModelForm(block=(heads, wider) * 2),
        ModelForm(block=(HeadsForm(2, 64, "int32"),) * 4),
    ):
        with pytest.raises(SnapshotMismatch):
            check_block(meta, sizes, model=other, codec=codec)
    with pytest.raises(SnapshotMismatch, match="is kept as"):
        check_block(meta, sizes, model=model, codec="q4" if codec != "q4" else "native")
    with pytest.raises(SnapshotMismatch):
        check_block(meta, [*sizes[:-1], sizes[-1] - 1], model=model, codec=codec)
