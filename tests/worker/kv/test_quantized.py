"""Quantized keys and values, compared with plain arrays: the result of a query depends only on its
position.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.worker.cpu import kv_codes
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.layer import HeadsForm
from holdfast.worker.kv.live import LiveBase, LiveState, Snapshot, start_from
from holdfast.worker.kv.quantized import Dequantize, QuantizedKV, dequantized, quantized

BLOCK = 8
MOST = 120
KEY_DIM = 64
RNG = np.random.default_rng(0)
KEYS = mx.array(RNG.standard_normal((1, 2, MOST, KEY_DIM), np.float32))
VALUES = {
    size: mx.array(RNG.standard_normal((1, 2, MOST, size), np.float32)) for size in (KEY_DIM, 128)
}


class Sequences(RuleBasedStateMachine):
    """Sequences that read, freeze, fork, rewind, and are stored and restored, in any order."""

    @initialize(
        kv_bits=st.sampled_from([*BITS]),
        value_dim=st.sampled_from([KEY_DIM, 128]),
        dequantize=st.sampled_from([None, kv_codes.dequantize]),
    )
    def begin(self, kv_bits: KVBits, value_dim: int, dequantize: Dequantize | None) -> None:
        self.kv_bits = kv_bits
        self.dequantize = dequantize
        self.pair = (KEYS, VALUES[value_dim])
        self.seen_old = tuple(
            dequantized(quantized(array, bits), bits=bits, dtype=mx.float32)
            for array, bits in zip(self.pair, BITS[kv_bits], strict=True)
        )
        self.states = [self.empty()]

    def empty(self) -> LiveState:
        form = (HeadsForm.of_array(self.pair[0]), HeadsForm.of_array(self.pair[1]))
        layer = QuantizedKV(
            BITS[self.kv_bits], form=form, block_tokens=BLOCK, dequantize=self.dequantize
        )
        state = LiveState([layer])
        state.reserve(MOST)
        return state

    def one(self, data: st.DataObject) -> LiveState:
        return self.states[data.draw(st.integers(0, len(self.states) - 1))]

    def keep(self, state: LiveState) -> None:
        self.states = [*self.states[-3:], state]

    def check(self, parts: tuple[tuple[mx.array, mx.array], ...], *, at: int, end: int) -> None:
        """Whether parts equal those for a query at position `at` and the rest of its block."""
        own = at // BLOCK * BLOCK
        for index, (old, native) in enumerate(zip(self.seen_old, self.pair, strict=True)):
            found = mx.concatenate([part[index] for part in parts], axis=2)
            wanted = mx.concatenate([old[:, :, :own], native[:, :, own:end]], axis=2)
            assert mx.array_equal(found, wanted)

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 1, 2, 7, 8, 9, 25]))
    def read(self, data: st.DataObject, tokens: int) -> None:
        state = self.one(data)
        start = state.tokens
        if start + tokens > MOST:
            return
        (layer,) = state.leaves
        assert isinstance(layer, QuantizedKV)
        layer.append(*(array[:, :, start : start + tokens] for array in self.pair))
        state.tokens += tokens
        ends = []
        for rows, parts in layer.attention_ranges(tokens, None):
            self.check(parts, at=start + rows.start, end=start + rows.stop)
            ends.append(rows.stop)
        assert ends[-1] == tokens
        if tokens > 1:
            state.trim()
        mx.eval(list(state.arrays()))

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.one(data).freeze()

    @rule(data=st.data(), tokens=st.integers(0, MOST))
    def go_back(self, data: st.DataObject, tokens: int) -> None:
        state = self.one(data)
        if tokens <= state.tokens and state.can_rewind(tokens):
            state.rewind(state.tokens - tokens)

    @rule(data=st.data(), tokens=st.integers(1, MOST), is_shared=st.booleans())
    def fork(self, data: st.DataObject, tokens: int, is_shared: bool) -> None:
        state = self.one(data)
        tokens = state.resumable_prefix(min(tokens, state.tokens))
        if tokens:
            base = LiveBase(state=state, tokens=tokens, use="shared" if is_shared else "copied")
            fork = start_from(base, self.empty().layers, is_restored=False)
            fork.reserve(MOST)
            assert fork.tokens == tokens
            self.keep(fork)

    @rule(data=st.data())
    def store_and_restore(self, data: st.DataObject) -> None:
        state = self.one(data)
        ends = [*range(BLOCK, state.tokens + 1, BLOCK)]
        if state.tokens % BLOCK:
            ends.append(state.tokens)
        blocks = [
            state.copy_block(start=start, tokens=end - start)
            for start, end in itertools.pairwise([0, *ends])
        ]
        assert all(block.is_quantized for block in blocks if block.tokens == BLOCK)
        restored = self.empty()
        restored.restore(blocks)
        self.keep(restored)

    @precondition(lambda self: hasattr(self, "states"))
    @invariant()
    def the_next_query_sees_quantized_blocks_and_its_own_as_computed(self) -> None:
        for state in self.states:
            (layer,) = state.leaves
            assert isinstance(layer, QuantizedKV)
            assert layer.tokens == state.tokens
            if state.tokens % BLOCK:
                self.check(layer.parts(state.tokens), at=state.tokens - 1, end=state.tokens)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=30, stateful_step_count=30)


@pytest.mark.parametrize(("kv_bits", "share"), [("8", 0.28), ("4", 0.16), ("8/4", 0.22)])
def test_a_token_takes_a_fraction_of_its_float32_size(kv_bits: KVBits, share: float) -> None:
    form = (HeadsForm(2, 64, "float32"), HeadsForm(2, 64, "float32"))
    layer = QuantizedKV(BITS[kv_bits], form=form, block_tokens=256)
    assert layer.bytes_per_token() <= share * 2 * 2 * 64 * 4
    state = LiveState([layer])
    state.reserve(4096)
    keys, values = mx.random.normal((2, 1, 2, 4096, 64))
    for start in range(0, 4096, 512):
        layer.append(keys[:, :, start : start + 512], values[:, :, start : start + 512])
        state.tokens += 512
        state.trim()
    state.park()
    held = sum(array.nbytes for array in state.arrays())
    assert held <= layer.bytes_per_token() * 4096 + layer.fixed_bytes()


def test_a_block_cut_within_codes_is_continued_by_codes() -> None:
    """Two chains that diverge within a block: the second has the common tokens as codes."""
    form = (HeadsForm(2, 64, "float32"), HeadsForm(2, 64, "float32"))
    layer = QuantizedKV((8, 8), form=form, block_tokens=BLOCK)
    state = LiveState([layer])
    layer.append(KEYS[:, :, :20], VALUES[64][:, :, :20])
    state.tokens = 20
    whole = state.copy_block(start=0, tokens=16)
    assert isinstance(whole, Snapshot)
    restored = LiveState([QuantizedKV((8, 8), form=form, block_tokens=BLOCK)])
    restored.restore([whole.cut(11), whole.cut(5, offset=11)])
    state.rewind(3)
    first, second = (
        mx.concatenate([part[0] for part in each.leaves[0].parts(17)], axis=2)  # type: ignore[attr-defined]
        for each in (state, _continued(restored))
    )
    assert mx.array_equal(first[:, :, :16], second[:, :, :16])


def _continued(state: LiveState) -> LiveState:
    (layer,) = state.leaves
    assert isinstance(layer, QuantizedKV)
    layer.append(KEYS[:, :, 16:17], VALUES[64][:, :, 16:17])
    state.tokens += 1
    return state
