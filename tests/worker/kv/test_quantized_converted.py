"""Sequences quantized while running hold the same as if quantized from the first token on, and
share the same parts as before.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.worker.cpu import kv_codes
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import HeadsForm, LayerState
from holdfast.worker.kv.live import (
    Conversion,
    LiveBase,
    LiveState,
    all_bytes,
    shared_beginning,
    start_from,
)
from holdfast.worker.kv.quantized import QuantizedKV, dequantized, quantized

BLOCK = 8
MOST = 160
RNG = np.random.default_rng(0)
KEYS = mx.array(RNG.standard_normal((1, 2, MOST, 64), np.float32))
VALUES = {size: mx.array(RNG.standard_normal((1, 2, MOST, size), np.float32)) for size in (64, 128)}


def form_of(pair: tuple[mx.array, mx.array]) -> tuple[HeadsForm, HeadsForm]:
    return HeadsForm.of_array(pair[0]), HeadsForm.of_array(pair[1])


class Conversions(RuleBasedStateMachine):
    """Native sequences that read, freeze, fork and are quantized, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[LiveState] = []

    @initialize(
        kv_bits=st.sampled_from(sorted(BITS)),
        value_dim=st.sampled_from(sorted(VALUES)),
        can_share=st.booleans(),
    )
    def begin(self, kv_bits: KVBits, value_dim: int, can_share: bool) -> None:
        self.kv_bits = kv_bits
        self.can_share = can_share
        self.pair = (KEYS, VALUES[value_dim])
        self.as_codes = tuple(
            dequantized(quantized(array, bits), bits=bits, dtype=mx.float32)
            for array, bits in zip(self.pair, BITS[kv_bits], strict=True)
        )
        self.states = [self.empty(FullKV())]

    def empty(self, leaf: FullKV | QuantizedKV) -> LiveState:
        leaf.can_share = self.can_share
        state = LiveState([leaf])
        state.reserve(MOST)
        return state

    def quantized_layer(self) -> QuantizedKV:
        layer = QuantizedKV(
            BITS[self.kv_bits],
            form=form_of(self.pair),
            block_tokens=BLOCK,
            dequantize=kv_codes.dequantize,
        )
        layer.can_share = self.can_share
        return layer

    def one(self, data: st.DataObject) -> LiveState:
        return self.states[data.draw(st.integers(0, len(self.states) - 1))]

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 7, 8, 9, 40]))
    def read(self, data: st.DataObject, tokens: int) -> None:
        state = self.one(data)
        start = state.tokens
        if start + tokens > MOST:
            return
        (layer,) = state.leaves
        assert isinstance(layer, FullKV | QuantizedKV)
        layer.append(*(array[:, :, start : start + tokens] for array in self.pair))
        state.tokens += tokens
        state.trim()
        mx.eval(list(state.arrays()))

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        state = self.one(data)
        state.freeze()
        if not self.can_share:
            state.reserve(MOST)

    @rule(data=st.data(), tokens=st.integers(1, MOST))
    def fork(self, data: st.DataObject, tokens: int) -> None:
        state = self.one(data)
        tokens = state.resumable_prefix(min(tokens, state.tokens))
        if tokens and self.can_share:
            is_native = isinstance(state.leaves[0], FullKV)
            fresh = FullKV() if is_native else self.quantized_layer()
            base = LiveBase(state=state, tokens=tokens, use="shared")
            fork = start_from(base, [fresh], is_restored=False)
            fork.reserve(MOST)
            self.states = [*self.states[-4:], fork]

    @rule(data=st.data())
    def convert(self, data: st.DataObject) -> None:
        state = self.one(data)
        if state.can_quantize():
            (before,) = state.leaves
            state.quantize([self.quantized_layer()])
            assert not list(before.arrays()), "the memory of the old state is free"

    @invariant()
    def each_sequence_sees_its_tokens(self) -> None:
        for state in self.states:
            (layer,) = state.leaves
            assert isinstance(layer, FullKV | QuantizedKV)
            assert layer.tokens == state.tokens
            if isinstance(layer, FullKV) and state.tokens:
                self.check(layer, 0)
            elif state.tokens % BLOCK:
                self.check(layer, state.tokens // BLOCK * BLOCK)

    def check(self, layer: FullKV | QuantizedKV, own: int) -> None:
        parts = layer.parts(layer.tokens)
        for index, (old, native) in enumerate(zip(self.as_codes, self.pair, strict=True)):
            found = mx.concatenate([part[index] for part in parts], axis=2)
            wanted = [old[:, :, :own], native[:, :, own : layer.tokens]]
            # the C kernel and MLX round differently when they dequantize
            assert mx.allclose(found, mx.concatenate(wanted, axis=2), rtol=1e-6, atol=1e-6)


TestConversions = Conversions.TestCase
TestConversions.settings = settings(max_examples=30, stateful_step_count=30)


def read(state: LiveState, tokens: int) -> None:
    (layer,) = state.leaves
    assert isinstance(layer, FullKV | QuantizedKV)
    at = state.tokens
    layer.append(KEYS[:, :, at : at + tokens], VALUES[64][:, :, at : at + tokens])
    state.tokens += tokens


def test_sequences_that_share_a_prefix_share_its_codes() -> None:
    first = LiveState([FullKV()])
    read(first, 120)
    second = start_from(
        LiveBase(state=first, tokens=110, use="shared"), [FullKV()], is_restored=False
    )
    read(second, 20)
    native_bytes = sum(all_bytes((first, second)).values())
    form = form_of((KEYS, VALUES[64]))
    leaves: list[LayerState] = []
    for state in (first, second):
        state.quantize([QuantizedKV((8, 8), form=form, block_tokens=BLOCK)])
        leaves += state.leaves
    codes = [next(leaf.frozen_arrays()) for leaf in leaves]
    assert codes[0] is codes[1]
    assert sum(all_bytes((first, second)).values()) < native_bytes / 2


def test_a_conversion_counts_shared_and_retained_tokens_once() -> None:
    first = LiveState([FullKV()])
    read(first, 120)
    second, third = (
        start_from(
            LiveBase(state=first, tokens=tokens, use="shared"), [FullKV()], is_restored=False
        )
        for tokens in (110, 50)
    )
    read(second, 20)
    alone = Conversion.of([first], (8, 8))
    assert alone == Conversion(sequences=1, tokens=120, shared_tokens=120, converted_tokens=0)
    two = Conversion.of([first, second], (8, 8))
    assert two == Conversion(sequences=2, tokens=140, shared_tokens=120, converted_tokens=0)
    assert Conversion.of([first, second, third], (8, 8)).shared_tokens == 0
    assert shared_beginning(first) is shared_beginning(second) is shared_beginning(third)
    first.quantize([QuantizedKV((8, 8), form=form_of((KEYS, VALUES[64])), block_tokens=BLOCK)])
    rest = Conversion.of([second, third], (8, 8))
    assert rest == Conversion(sequences=2, tokens=130, shared_tokens=0, converted_tokens=110)


def test_a_shrunk_converted_part_is_reconverted_for_a_longer_holder() -> None:
    first = LiveState([FullKV()])
    read(first, 10)
    second = start_from(
        LiveBase(state=first, tokens=10, use="shared"), [FullKV()], is_restored=False
    )
    form = form_of((KEYS, VALUES[64]))
    first.quantize([QuantizedKV((8, 8), form=form, block_tokens=BLOCK)])  # the first block only
    first.freeze()
    read(second, 7)
    second.quantize([QuantizedKV((8, 8), form=form, block_tokens=BLOCK)])
    (layer,) = second.leaves
    assert isinstance(layer, QuantizedKV)
    found = mx.concatenate([keys for keys, _ in layer.parts(17)], axis=2)
    codes = dequantized(quantized(KEYS[:, :, :16], 8), bits=8, dtype=mx.float32)
    wanted = mx.concatenate([codes, KEYS[:, :, 16:17]], axis=2)
    assert found.shape == wanted.shape
    assert mx.allclose(found, wanted, rtol=1e-6, atol=1e-6)
