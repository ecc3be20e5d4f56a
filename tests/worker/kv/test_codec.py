"""Snapshots as bytes, and quantized."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.kv.codec import PayloadFormat, check_sizes, pack, to_bytes, unpack
from holdfast.worker.kv.layer import ArrayForm, CheckpointLayout, HeadsForm, SnapshotMismatch
from holdfast.worker.kv.live import Codec, KVBlock, ModelForm, StateCheckpoint

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


def format_of(run: KVBlock, codec: Codec = "native") -> PayloadFormat:
    heads = tuple(HeadsForm.of_array(array) for array in run.arrays)
    return PayloadFormat(model=ModelForm(block=heads), codec=codec)


def back_from(run: KVBlock, payloads: PayloadFormat) -> KVBlock:
    return payloads.block_from_bytes(to_bytes(run), start=run.start, tokens=run.tokens)


def bits(array: mx.array) -> bytes:
    return bytes(np.array(array.reshape(-1).view(mx.uint8)))


@given(tokens=st.integers(1, 40), layers=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_a_native_run_comes_back_from_its_bytes_bit_for_bit(
    tokens: int, layers: int, dtype: mx.Dtype
) -> None:
    run = a_run(tokens=tokens, layers=layers, dtype=dtype)
    back = unpack(back_from(pack(run, "native"), format_of(run)))
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
    whole = unpack(back_from(packed, format_of(run, codec)))
    part = unpack(packed.cut(10, offset=5))
    for kept, original, first in zip(whole.arrays, run.arrays, part.arrays, strict=True):
        assert float(mx.abs(kept.astype(mx.float32) - original.astype(mx.float32)).mean()) < error
        assert bits(first) == bits(kept[:, :, 5:15] * mx.ones((), kept.dtype))


def test_heads_that_do_not_fit_the_groups_cannot_be_quantized() -> None:
    model = ModelForm(block=(HeadsForm(2, 48, "float32"),) * 4)
    assert [PayloadFormat(model=model, codec=codec).is_possible for codec in CODECS] == [
        True,
        False,
        False,
    ]


@given(dtype=st.sampled_from(DTYPES), filled=st.lists(st.booleans(), min_size=1, max_size=3))
def test_a_state_comes_back_from_its_bytes(dtype: mx.Dtype, filled: list[bool]) -> None:
    slots = tuple(index for index, is_filled in enumerate(filled) if is_filled)
    window = (mx.ones((1, 2, 7, 4), dtype), mx.zeros((1, 2, 7, 4), dtype))
    layers = (CheckpointLayout("window"), CheckpointLayout("recurrent", len(filled), slots))
    arrays = (*window, *(mx.full((1, 3, 5), index + 0.5, dtype) for index in slots))
    state = StateCheckpoint(position=12, layers=layers, arrays=arrays)
    mx.eval(arrays)
    forms = tuple(ArrayForm.of_array(array) for array in arrays)
    payloads = PayloadFormat(model=ModelForm(block=(), layers=layers, checkpoint=forms))
    back = payloads.checkpoint_from_bytes(to_bytes(state), position=12)
    assert back.position == 12
    assert back.layers == layers
    assert [bits(array) for array in back.arrays] == [bits(array) for array in arrays]


def test_bytes_that_do_not_fit_the_model_are_refused() -> None:
    run = a_run()
    parts = to_bytes(run)
    payloads = format_of(run)
    for wrong, message in (
        ((parts[0][:-4], *parts[1:]), "bytes instead of"),
        (parts[:-1], "there are 3 arrays, but this model has 4"),
        ((), "there are 0 arrays"),
    ):
        with pytest.raises(SnapshotMismatch, match=message):
            payloads.block_from_bytes(wrong, start=3, tokens=9)
    with pytest.raises(SnapshotMismatch, match="bytes instead of"):
        payloads.block_from_bytes(parts, start=3, tokens=8)


@pytest.mark.parametrize("codec", ["native", "q8", "q4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_fits_its_models_form_and_nothing_elses(
    codec: Codec, dtype: mx.Dtype
) -> None:
    run = a_run(dtype=dtype)
    payloads = format_of(run, codec)
    packed = pack(run, codec)
    mx.eval(packed.arrays)
    parts = to_bytes(packed)
    forms = payloads.block_forms(9)
    assert forms == [ArrayForm.of_array(array) for array in packed.arrays]
    check_sizes(forms, parts)
    heads = payloads.model.block[0]
    wider = HeadsForm(2, 128, heads.dtype)
    for other in (ModelForm(block=(heads,) * 2), ModelForm(block=(heads, wider) * 2)):
        with pytest.raises(SnapshotMismatch):
            check_sizes(PayloadFormat(model=other, codec=codec).block_forms(9), parts)
    other_codec: Codec = "q4" if codec != "q4" else "native"
    with pytest.raises(SnapshotMismatch):
        check_sizes(format_of(run, other_codec).block_forms(9), parts)
    with pytest.raises(SnapshotMismatch):
        check_sizes(forms, (*parts[:-1], parts[-1][:-1]))
