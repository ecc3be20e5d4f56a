"""Log-probabilities by numpy, compared with the plain reference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.cpu.host_sampling import score_on_host
from tests.fakes.reference_sampler import log_probabilities


@settings(max_examples=30)
@given(
    vocab=st.sampled_from([1, 33, 500, 9001]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    top=st.integers(0, 20),
    masked=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 9),
)
def test_scores_are_those_of_the_reference(
    vocab: int, spread: float, top: int, masked: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(3, vocab)) * spread).astype(np.float32)
    logits[:, 1:][random.random((3, vocab - 1)) < masked] = -np.inf
    tokens = random.integers(0, vocab, size=3)
    top = min(top, vocab)
    got = score_on_host(mx.array(logits), mx.array(tokens), top_logprobs=top)
    for row in range(3):
        expected = log_probabilities(logits[row].astype(np.float64))
        order = np.argsort(-logits[row], kind="stable")[:top]
        assert got.chosen[row].item() == pytest.approx(expected[tokens[row]], abs=1e-5)
        if top:
            assert got.top is not None
            assert got.top[0][row].tolist() == order.tolist()
            assert np.array(got.top[1][row]) == pytest.approx(expected[order], abs=1e-5)
    assert top or got.arrays() == [got.chosen]


def test_a_row_with_nan_harms_no_other() -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, 5] = np.nan
    logits[2] = -np.inf
    got = score_on_host(mx.array(logits), mx.array([5, 5, 5]), top_logprobs=2)
    assert mx.isnan(got.chosen).tolist() == [True, False, True]
    assert got.chosen[1].item() == pytest.approx(-np.log(100), abs=1e-6)
    assert got.top is not None
    assert got.top[0][1].tolist() == [0, 1]
