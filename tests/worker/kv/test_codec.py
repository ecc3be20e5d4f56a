"""Snapshots as bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.codec import PayloadFormat, check_sizes, to_bytes
from holdfast.worker.kv.layer import ArrayForm, CheckpointLayout, HeadsForm, SnapshotMismatch
from holdfast.worker.kv.live import ModelForm, Snapshot
from holdfast.worker.kv.quantized import dequantized, quantized
from holdfast.worker.prefix.chain import Root

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
FORMS: list[KVBits] = ["native", *BITS]


def a_run(
    *,
    tokens: int = 9,
    dtype: mx.Dtype = mx.float32,
    layers: int = 2,
    dimension: int = 64,
    start: int = 3,
) -> Snapshot:
    key = mx.random.key(tokens * 31 + layers)
    arrays = tuple(
        mx.random.normal((1, 2, tokens, dimension), key=key).astype(dtype)
        for _ in range(2 * layers)
    )
    return Snapshot(start=start, tokens=tokens, arrays=arrays)


def format_of(run: Snapshot) -> PayloadFormat:
    heads = tuple(HeadsForm.of_array(array) for array in run.arrays)
    return PayloadFormat(model=ModelForm(block=heads))


def packed(run: Snapshot, kv_bits: KVBits) -> Snapshot:
    if kv_bits == "native":
        return run
    bits = itertools.cycle(BITS[kv_bits])
    arrays = tuple(part for array in run.arrays for part in quantized(array, next(bits)))
    return replace(run, arrays=arrays, form=kv_bits)


def back_from(run: Snapshot, payloads: PayloadFormat, form: KVBits = "native") -> Snapshot:
    return payloads.snapshot(to_bytes(run), start=run.start, tokens=run.tokens, form=form)


def bits(array: mx.array) -> bytes:
    return bytes(np.array(array.reshape(-1).view(mx.uint8)))


@given(tokens=st.integers(1, 40), layers=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_a_native_run_survives_serialization_bit_for_bit(
    tokens: int, layers: int, dtype: mx.Dtype
) -> None:
    run = a_run(tokens=tokens, layers=layers, dtype=dtype)
    back = back_from(run, format_of(run))
    assert (back.start, back.tokens) == (run.start, run.tokens)
    assert [array.dtype for array in back.arrays] == [array.dtype for array in run.arrays]
    assert [bits(array) for array in back.arrays] == [bits(array) for array in run.arrays]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("kv_bits", "error", "share"),
    [("8", 0.01, 0.54), ("4", 0.15, 0.32), ("8/4", 0.15, 0.42)],
)
def test_a_quantized_run_is_small_and_close_and_can_be_cut(
    kv_bits: KVBits, error: float, share: float, dtype: mx.Dtype
) -> None:
    run = a_run(tokens=64, dtype=dtype, start=192)
    stored = packed(run, kv_bits)
    mx.eval(stored.arrays)
    assert stored.nbytes <= share * 2 * sum(array.size for array in run.arrays)  # of bf16
    whole = back_from(stored, format_of(run), kv_bits)
    assert whole.is_quantized
    part = stored.cut(10, offset=5)
    for at, original in enumerate(run.arrays):
        kept, first = (
            dequantized(each.arrays[3 * at : 3 * at + 3], bits=BITS[kv_bits][at % 2], dtype=dtype)
            for each in (whole, part)
        )
        assert float(mx.abs(kept.astype(mx.float32) - original.astype(mx.float32)).mean()) < error
        assert bits(first) == bits(kept[:, :, 5:15] * mx.ones((), kept.dtype))


def test_only_runs_ending_with_a_block_are_stored_quantized() -> None:
    found = [Root(b"", form="8").form_at(end) for end in (1, 255, 256, 257, 512)]
    assert found == ["native", "native", "8", "native", "8"]


@given(dtype=st.sampled_from(DTYPES), filled=st.lists(st.booleans(), min_size=1, max_size=3))
def test_a_state_survives_serialization(dtype: mx.Dtype, filled: list[bool]) -> None:
    slots = tuple(index for index, is_filled in enumerate(filled) if is_filled)
    window = (mx.ones((1, 2, 7, 4), dtype), mx.zeros((1, 2, 7, 4), dtype))
    layers = (CheckpointLayout("window"), CheckpointLayout("recurrent", len(filled), slots))
    arrays = (*window, *(mx.full((1, 3, 5), index + 0.5, dtype) for index in slots))
    state = Snapshot(start=12, layers=layers, arrays=arrays)
    mx.eval(arrays)
    forms = tuple(ArrayForm.of_array(array) for array in arrays)
    payloads = PayloadFormat(model=ModelForm(block=(), layers=layers, checkpoint=forms))
    back = back_from(state, payloads)
    assert (back.start, back.tokens) == (12, 0)
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
            payloads.snapshot(wrong, start=3, tokens=9, form="native")
    with pytest.raises(SnapshotMismatch, match="bytes instead of"):
        payloads.snapshot(parts, start=3, tokens=8, form="native")


@pytest.mark.parametrize("kv_bits", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_bytes_fit_only_their_models_form(kv_bits: KVBits, dtype: mx.Dtype) -> None:
    run = a_run(dtype=dtype)
    payloads = format_of(run)
    stored = packed(run, kv_bits)
    mx.eval(stored.arrays)
    parts = to_bytes(stored)
    forms = payloads.forms(start=3, tokens=9, form=kv_bits)
    assert forms == [ArrayForm.of_array(array) for array in stored.arrays]
    check_sizes(forms, parts)
    heads = payloads.model.block[0]
    wider = HeadsForm(2, 128, heads.dtype)
    for other in (ModelForm(block=(heads,) * 2), ModelForm(block=(heads, wider) * 2)):
        with pytest.raises(SnapshotMismatch):
            back_from(stored, PayloadFormat(model=other), kv_bits)
    for other_bits in FORMS:
        if other_bits != kv_bits:
            with pytest.raises(SnapshotMismatch):
                back_from(stored, payloads, other_bits)
    with pytest.raises(SnapshotMismatch):
        check_sizes(forms, (*parts[:-1], parts[-1][:-1]))
