"""Masks and forced tokens in a single draw: they affect only their own row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.sampling import (
    NO_LIMITS,
    RowLimits,
    RowState,
    SampledRows,
    limits_of,
    row_state,
    sample,
    with_masks,
)
from tests.fakes.reference_sampler import log_probabilities

SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1.5, top_k=5, seed=4),
    SamplingParams(temperature=1.0, min_p=0.1, seed=5),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, logit_bias={3: 5.0, 4: -100.0}, seed=6),
)
VOCABULARIES = (40, 300, 1537, 8195)  # below and above where numpy draws; no multiples of 32


def a_row(params: SamplingParams, *, vocab: int) -> RowState:
    request = SequenceRequest(
        request_id="r",
        prompt_token_ids=TokenIds.of((1, 2, 3)),
        max_tokens=8,
        sampling=params,
        want_logprobs=True,
        top_logprobs=3,
    )
    return row_state(request, generated=(3, 5), vocab_size=vocab)


def some_logits(rows: int, vocab: int, seed: int) -> mx.array:
    return mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 3


def words_of(
    allowed: list[set[int] | None], *, vocab: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """A row of bits per entry; None: everything."""
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, list(range(vocab)) if ids is None else sorted(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def of_row(sampled: SampledRows, row: int) -> tuple[int, bool, list[list[float]]]:
    assert sampled.scores is not None
    return (
        int(sampled.tokens[row]),
        bool(sampled.ok[row]),
        [np.array(each[row]).tolist() for each in sampled.scores.arrays()],
    )


@st.composite
def batches(
    draw: st.DrawFn,
) -> tuple[int, list[SamplingParams], list[set[int] | None], dict[int, int], int]:
    vocab = draw(st.sampled_from(VOCABULARIES))
    params = draw(st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=5))
    ids = st.integers(0, vocab - 1)
    few = st.sets(ids, min_size=1, max_size=9)
    most = few.map(lambda banned: set(range(vocab)) - banned)
    allowed = [draw(st.none() | few | most) for _ in params]
    forced = draw(st.dictionaries(st.integers(0, len(params) - 1), ids, max_size=2))
    return vocab, params, allowed, forced, draw(st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_masked_rows_draw_the_same_as_alone(
    batch: tuple[int, list[SamplingParams], list[set[int] | None], dict[int, int], int],
) -> None:
    vocab, params, allowed, forced, seed = batch
    rows = [a_row(each, vocab=vocab) for each in params]
    logits = some_logits(len(rows), vocab, seed)
    words = None if all(ids is None for ids in allowed) else words_of(allowed, vocab=vocab)
    sampled = sample(logits, rows, RowLimits(words=words, forced=forced))
    for at, row in enumerate(rows):
        own = None if allowed[at] is None else words_of([allowed[at]], vocab=vocab)
        limits = RowLimits(words=own, forced={0: forced[at]} if at in forced else {})
        alone = of_row(sample(logits[at : at + 1], [row], limits), 0)
        together = of_row(sampled, at)
        assert together[:2] == alone[:2]
        np.testing.assert_allclose(together[2][0], alone[2][0], rtol=1e-5)
        if at in forced:
            assert together[0] == forced[at]
        elif allowed[at] is not None and together[1]:
            assert together[0] in allowed[at]
        if allowed[at] is None and at not in forced:
            plain = of_row(sample(logits[at : at + 1], [row]), 0)
            assert together[:2] == plain[:2], "a plain row notices its neighbours' masks"


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_scores_are_those_before_masks_and_forced_tokens(vocab: int) -> None:
    logits, row = some_logits(1, vocab, 0), a_row(SAMPLINGS[0], vocab=vocab)
    expected = log_probabilities(np.array(logits)[0])
    for limits in (
        RowLimits(words=words_of([{7}], vocab=vocab), forced={}),
        RowLimits(words=None, forced={0: 7}),
    ):
        token, ok, scores = of_row(sample(logits, [row], limits), 0)
        assert (token, ok) == (7, True)
        assert scores[0] == pytest.approx(expected[7], abs=1e-4)


@pytest.mark.parametrize("vocab", [300, 8195])
def test_a_mask_does_not_hide_nan(vocab: int) -> None:
    logits = np.array(some_logits(3, vocab, 0))
    logits[0, 9], logits[1, 9] = np.nan, np.inf
    sampled = sample(
        mx.array(logits),
        [a_row(SAMPLINGS[1], vocab=vocab)] * 3,
        RowLimits(words=words_of([{1, 2}] * 3, vocab=vocab), forced={}),
    )
    assert np.array(sampled.ok).tolist() == [False, False, True]
    assert sampled.empty is not None
    assert np.array(sampled.empty).tolist() == [False, False, False]


@pytest.mark.parametrize("params", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("vocab", [300, 8195])
def test_a_row_without_allowed_tokens_says_so_and_others_draw(
    vocab: int, params: SamplingParams
) -> None:
    banned = replace(params, logit_bias={4: -100.0})
    rows = [a_row(banned, vocab=vocab), a_row(params, vocab=vocab)]
    sampled = sample(
        some_logits(2, vocab, 1),
        rows,
        RowLimits(words=words_of([{4}, {5, 6}], vocab=vocab), forced={}),
    )
    assert sampled.empty is not None
    assert np.array(sampled.empty).tolist() == [True, False]
    assert np.array(sampled.ok).tolist() == [False, True]
    assert int(sampled.tokens[1]) in {5, 6}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_mask_keeps_the_type_of_the_logits(dtype: mx.Dtype) -> None:
    logits = some_logits(2, 70, 0).astype(dtype)
    masked = with_masks(logits, RowLimits(words=words_of([{69}, None], vocab=70), forced={}))
    assert masked.dtype == dtype
    shown = np.array(masked.astype(mx.float32))
    assert np.flatnonzero(np.isfinite(shown[0])).tolist() == [69]
    np.testing.assert_array_equal(shown[1], np.array(logits.astype(mx.float32))[1])


def test_without_constraints_rows_are_unlimited() -> None:
    assert limits_of([None, None], rows=2, words_per_row=3) == NO_LIMITS
