"""Sampling itself: distributions compared with the reference, thresholds, keys, the largest
entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.wire.requests import SamplingParams
from holdfast.worker.engine import backend, sampling, token_sampling
from holdfast.worker.engine.backend import Backend
from holdfast.worker.engine.token_sampling import (
    largest,
    nucleus_threshold,
    random_key,
    sample_tokens,
    sampling_kind,
)
from tests.fakes.reference_sampler import CHUNK, assert_counts_fit, probabilities

DRAWS = 6_000


def sampled(
    rows: mx.array, params: SamplingParams, keys: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    kind, peaks = sampling_kind(params, vocab_size=rows.shape[1]), mx.max(rows, axis=-1)
    tokens = sample_tokens(rows, kind=kind, params=[params] * len(keys), keys=keys, peaks=peaks)
    return np.array(tokens).astype(np.int64)


def counts_of(
    logits: npt.NDArray[np.float32], params: SamplingParams, *, samples: int = DRAWS
) -> npt.NDArray[np.int64]:
    counts = np.zeros(len(logits), dtype=np.int64)
    rows = mx.broadcast_to(mx.array(logits), (CHUNK, len(logits)))
    for start in range(0, samples, CHUNK):
        keys = [random_key(seed=start + index, position=5) for index in range(CHUNK)]
        counts += np.bincount(sampled(rows, params, keys), minlength=len(logits))
    return counts


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=7),
        SamplingParams(top_k=150),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.1, temperature=1.5),
        SamplingParams(top_p=0.95, min_p=0.02, temperature=0.7),
    ],
    ids=str,
)
def test_token_frequencies_match_the_reference(params: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(size=200).astype(np.float32) * 2
    assert_counts_fit(
        counts_of(logits, params), probabilities(logits.astype(np.float64), params=params)
    )


def test_a_large_vocabulary_is_sampled_evenly_over_its_blocks() -> None:
    counts = counts_of(np.zeros(1000, dtype=np.float32), SamplingParams())
    assert_counts_fit(counts, np.full(1000, 1e-3))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.99999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 5.0])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, spread: float) -> None:
    logits = np.random.default_rng(5).normal(size=1500).astype(np.float32) * spread
    weights = np.exp(logits - logits.max())
    edge = np.array(nucleus_threshold(mx.array(weights)[None], top_p=mx.array([[top_p]])))[0, 0]
    total = weights.sum(dtype=np.float64)
    assert weights[weights >= edge].sum(dtype=np.float64) >= (top_p - 1e-5) * total
    assert weights[weights > edge].sum(dtype=np.float64) <= (top_p + 1e-5) * total


@pytest.mark.slow  # the C++ compiler builds some twenty kernels
def test_compiled_and_single_operations_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for a GPU, on a CPU."""
    logits = 3 * mx.random.normal((3, 1000), key=mx.random.key(8))
    peaks, coldness = mx.max(logits, axis=-1, keepdims=True), mx.array([[0.3], [1.0], [1.7]])
    key_words = [random_key(seed=row, position=row) for row in range(3)]
    keys = mx.array(key_words, dtype=mx.uint32)

    def computed() -> list[mx.array]:
        weights = token_sampling._weights(logits, peaks, coldness)
        return [
            weights,
            nucleus_threshold(weights, top_p=mx.array([[0.1], [0.9], [0.999]])),
            token_sampling._gumbel(keys, numbers=mx.arange(1000, dtype=mx.uint32)[None]),
            sampling._penalised(logits, coldness),
            *(
                mx.array(sampled(logits, params, key_words))
                for params in (
                    SamplingParams(top_p=0.9, min_p=0.01),
                    SamplingParams(top_k=20, top_p=0.9, min_p=0.01, temperature=1.3),
                )
            ),
        ]

    single = computed()
    mx.eval(single)
    monkeypatch.setattr(backend, "_in_use", Backend())
    for plain, fused in zip(single, computed(), strict=True):
        assert mx.array_equal(plain, fused)


def test_equal_tokens_at_the_top_k_edge_keep_lower_ids() -> None:
    logits = np.array([0.0, 1.0, 1.0, 1.0, 2.0], dtype=np.float32)
    counts = counts_of(logits, SamplingParams(top_k=3), samples=CHUNK)
    assert (counts > 0).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=50, top_p=0.95), SamplingParams(top_p=0.95)],
    ids=str,
)
def test_rounding_noise_in_the_logits_rarely_changes_the_draw(params: SamplingParams) -> None:
    # full of ties
    logits = (
        mx.random.normal((CHUNK, 500), key=mx.random.key(1)).astype(mx.bfloat16).astype(mx.float32)
    )
    noisy = logits + 1e-5 * mx.random.normal(logits.shape, key=mx.random.key(2))
    keys = [random_key(seed=index, position=0) for index in range(CHUNK)]
    clean, stirred = (sampled(each, params, keys) for each in (logits, noisy))
    assert (clean != stirred).mean() < 0.01


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    by_position = [random_key(seed=1, position=index) for index in range(CHUNK)]
    by_seed = [random_key(seed=index, position=1) for index in range(CHUNK)]
    for keys in (by_position, by_seed):
        tokens = sampled(mx.zeros((CHUNK, 4)), SamplingParams(), keys)
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert_counts_fit(pairs, np.full(16, 1 / 16))


@given(
    first=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20)),
    second=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20)),
)
def test_keys_are_two_words_that_differ_by_seed_and_position(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    keys = [random_key(seed=seed, position=position) for seed, position in (first, second)]
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert (keys[0] == keys[1]) == (first == second)


@settings(max_examples=60)
@given(
    columns=st.sampled_from([1, 5, 127, 128, 1000, 2600, 5000]),
    share=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 10**6]),
    seed=st.integers(0, 9),
)
def test_largest_agrees_with_a_stable_sort(
    columns: int, share: float, levels: int, seed: int
) -> None:
    count = max(1, min(columns, int(share * share * share * columns)))
    values = np.random.default_rng(seed).integers(0, levels, size=(3, columns)).astype(np.float32)
    found, ids = largest(mx.array(values), count=count)
    assert np.array_equal(np.array(found), -np.sort(-values, axis=-1)[:, :count])
    assert np.array_equal(np.array(ids), np.argsort(-values, axis=-1, kind="stable")[:, :count])
