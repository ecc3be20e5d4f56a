"""Sampling of mixed batches: the sampled tokens, and the independence of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.sampling import (
    RowState,
    SampledRows,
    row_state,
    sample,
)
from tests.fakes.reference_sampler import edited_logits, log_probabilities, probabilities

VOCAB = 300
LARGE_VOCAB = 9001  # many blocks, not a multiple of one


def a_row(
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    generated: Sequence[int] = (),
    top_logprobs: int | None = None,
    vocab: int = VOCAB,
) -> RowState:
    request = SequenceRequest(
        request_id="r",
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=8,
        sampling=params or SamplingParams(temperature=0.0, seed=0),
        want_logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )
    return row_state(request, generated=generated, vocab_size=vocab)


def some_logits(
    rows: int, *, vocab: int = VOCAB, seed: int = 0, dtype: mx.Dtype = mx.float32
) -> mx.array:
    return (mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 3).astype(dtype)


def ints(values: mx.array) -> list[int]:
    return [int(value) for value in np.array(values)]


def as_lists(sampled: SampledRows) -> tuple[list[int], list[bool]]:
    return ints(sampled.tokens), [bool(flag) for flag in np.array(sampled.ok)]


def params_strategy(vocab: int) -> st.SearchStrategy[SamplingParams]:
    ids = st.integers(0, vocab - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6, 0.0]),
        top_k=st.sampled_from([0, 1, 2, 20, 64, 65, 150, 10**6]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -3.0, 5.0, 100.0]), max_size=3),
        seed=st.sampled_from([0, 1, -1, 7, 2**63 - 1, -(2**63), 2**70]),
    )


def rows_strategy(vocab: int) -> st.SearchStrategy[RowState]:
    ids = st.lists(st.integers(0, vocab - 1), max_size=6)
    return st.builds(
        lambda params, prompt, generated, top: a_row(
            params, prompt=prompt, generated=generated, top_logprobs=top, vocab=vocab
        ),
        params_strategy(vocab),
        ids,
        ids,
        st.sampled_from([None, None, 0, 3]),
    )


@settings(max_examples=50)
@given(
    data=st.data(),
    # around the size of a block, and many blocks, not a multiple of one
    vocab=st.sampled_from([1, 2, 127, 128, 129, VOCAB, VOCAB, VOCAB, LARGE_VOCAB]),
    seed=st.integers(0, 5),
    half=st.booleans(),
)
def test_a_row_draws_the_same_alone_and_in_any_batch(
    data: st.DataObject, vocab: int, seed: int, half: bool
) -> None:
    rows = data.draw(st.lists(rows_strategy(vocab), min_size=1, max_size=9))
    dtype = mx.bfloat16 if half else mx.float32
    logits = some_logits(len(rows), vocab=vocab, seed=seed, dtype=dtype)
    together = sample(logits, rows)
    tokens, ok = as_lists(together)
    assert max(tokens) < vocab
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row])
        assert as_lists(alone) == ([tokens[index]], [ok[index]])
        if row.want_logprobs:
            assert together.scores is not None
            assert alone.scores is not None
            # both are NaN if no token is allowed
            np.testing.assert_array_equal(together.scores.chosen[index], alone.scores.chosen[0])


@settings(max_examples=60)
@given(
    params=st.lists(params_strategy(40), min_size=1, max_size=6),
    prompt=st.lists(st.integers(0, 39), max_size=8),
    generated=st.lists(st.integers(0, 39), max_size=8),
)
def test_tokens_and_logprobs_agree_with_the_plain_reference(
    params: list[SamplingParams], prompt: list[int], generated: list[int]
) -> None:
    logits = some_logits(len(params), vocab=40)
    rows = [
        a_row(each, prompt=prompt, generated=generated, top_logprobs=5, vocab=40) for each in params
    ]
    sampled = sample(logits, rows)
    assert sampled.scores is not None
    assert sampled.scores.top is not None
    for index, each in enumerate(params):
        expected = edited_logits(
            np.array(logits[index], dtype=np.float64),
            params=each,
            prompt=prompt,
            generated=generated,
        )
        token = ints(sampled.tokens)[index]
        assert sampled.ok[index].item()
        assert probabilities(expected, params=each)[token] > 0
        logprobs = log_probabilities(expected)
        assert sampled.scores.chosen[index].item() == pytest.approx(logprobs[token], abs=1e-4)
        assert np.array(sampled.scores.top[1][index]) == pytest.approx(
            np.sort(logprobs)[::-1][:5], abs=1e-4
        )
        assert np.array(sampled.scores.top[1][index]) == pytest.approx(
            logprobs[np.array(sampled.scores.top[0][index])], abs=1e-4
        )


def test_greedy_rows_take_the_likeliest_token_and_the_first_of_ties() -> None:
    logits = mx.array([[0.0, 2.0, 2.0, 1.0], [5.0, 2.0, 2.0, 1.0]], dtype=mx.bfloat16)
    for params in (
        SamplingParams(temperature=0.0, seed=3),
        SamplingParams(temperature=1e-9, seed=3),
        SamplingParams(top_k=1, seed=3),
        SamplingParams(top_p=0.0, seed=3),
    ):
        assert as_lists(sample(logits, [a_row(params, vocab=4)] * 2)) == ([1, 0], [True, True])


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(VOCAB, mx.float32), (VOCAB, mx.bfloat16), (VOCAB, mx.float16), (LARGE_VOCAB, mx.float32)],
    ids=str,
)
def test_a_row_with_bad_logits_fails_and_disturbs_no_other(vocab: int, dtype: mx.Dtype) -> None:
    logits = some_logits(6, vocab=vocab, dtype=dtype)
    bad = mx.array(logits)
    bad[1, 7] = math.nan
    bad[2, : vocab // 2] = math.nan
    bad[3, 9] = math.inf
    bad[4] = mx.full((vocab,), -math.inf)
    for params in (
        SamplingParams(temperature=0.0, seed=1),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=5000, top_p=0.9),
        SamplingParams(seed=1, top_k=20),
        SamplingParams(seed=1, top_p=0.9, min_p=0.1, frequency_penalty=1.0),
    ):
        rows = [a_row(params, generated=(4, 4), top_logprobs=3, vocab=vocab) for _ in range(6)]
        tokens, ok = as_lists(sample(bad, rows))
        assert ok == [True, False, False, False, False, True]
        assert max(tokens) < vocab
        expected, _ = as_lists(sample(logits, rows))
        assert (tokens[0], tokens[5]) == (expected[0], expected[5])


def test_a_row_with_all_tokens_banned_fails() -> None:
    banned = SamplingParams(seed=1, logit_bias=dict.fromkeys(range(8), -100.0))
    sampled = sample(some_logits(2, vocab=8), [a_row(banned, vocab=8), a_row(vocab=8)])
    assert sampled.ok.tolist() == [False, True]


@pytest.mark.parametrize(
    ("logits", "params", "sampled"),
    [
        ([200.0, 0.0, 0.0, 0.0], SamplingParams(logit_bias={0: -100}), {1, 2, 3}),
        ([1.0, 3.0, 2.999, 3.0], SamplingParams(min_p=1.0), {1, 3}),
        ([1.0, -math.inf, 0.5, -math.inf], SamplingParams(temperature=1e39), {0, 2}),
    ],
    ids=["banned", "min-p of one", "minus infinity"],
)
def test_only_possible_tokens_are_drawn(
    logits: list[float], params: SamplingParams, sampled: set[int]
) -> None:
    rows = [a_row(replace_struct(params, seed=seed), vocab=4) for seed in range(200)]
    tokens, ok = as_lists(sample(mx.broadcast_to(mx.array(logits), (200, 4)), rows))
    assert ok == [True] * 200
    assert set(tokens) == sampled


def test_other_seeds_and_positions_draw_other_tokens() -> None:
    logits = mx.zeros((40, 5000))
    seeds = [a_row(SamplingParams(seed=seed), vocab=5000) for seed in range(-10, 10)]
    places = [
        a_row(SamplingParams(seed=5), generated=[0] * (9 + count), vocab=5000)
        for count in range(20)
    ]
    tokens = ints(sample(logits, seeds + places).tokens)
    assert len(set(tokens)) > 35


def test_advancing_a_row_does_not_change_its_copy() -> None:
    row = a_row(SamplingParams(seed=1, frequency_penalty=1.0), generated=(5,))
    fork = replace(row)
    row.advance(mx.array([6]))
    assert fork.edits is not None
    assert row.edits is not None
    assert fork.edits.generated_ids.tolist() == [5]
    assert row.edits.generated_ids.tolist() == [5, 6]
    assert (fork.position, row.position) == (4, 5)


def test_sampling_does_not_change_the_given_logits() -> None:
    logits = some_logits(2)
    before = logits.tolist()
    params = SamplingParams(
        seed=1, frequency_penalty=1.0, repetition_penalty=2.0, logit_bias={3: 5.0}
    )
    mx.eval(sample(logits, [a_row(params, generated=(4,))] * 2).arrays())
    assert logits.tolist() == before


def test_unrequested_logprobs_are_not_computed() -> None:
    sampled = sample(some_logits(2), [a_row(), a_row(SamplingParams(seed=1))])
    assert sampled.scores is None
