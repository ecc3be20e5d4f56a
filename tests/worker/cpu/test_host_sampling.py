"""Drawing by numpy: the tokens that filters keep, their frequencies, and equality with MLX's
operations; the largest entries of a row, and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.wire.requests import SamplingParams
from holdfast.worker.cpu import host_sampling
from holdfast.worker.cpu.host_sampling import (
    FewTokens,
    GroupedRow,
    WeighedRow,
    filtered_tokens,
    sample_on_host,
    sampling_pays,
    score_on_host,
)
from holdfast.worker.engine.backend import SamplingKind
from holdfast.worker.engine.token_sampling import random_key, sample_tokens, sampling_kind
from tests.fakes.reference_sampler import (
    log_probabilities,
    probabilities,
)

TIE = 4e-5  # nats, as in the reference sampler
ROUNDING = 3e-6  # of a sum of float32 weights

Row = npt.NDArray[np.float32]


def a_row(*, columns: int, shape: str, seed: int, masked: float = 0.0) -> Row:
    random = np.random.default_rng(seed)
    row = random.normal(size=columns) * 2
    if shape == "peaked":
        row[random.integers(0, columns, 4)] += [30, 27, 25, 24]
    elif shape == "zipf":
        row = random.permutation(20 - 1.6 * np.log(np.arange(1, columns + 1)))
    elif shape == "tied":
        row = np.round(row)
    elif shape == "equal":
        row[:] = 3.25
    elif shape == "halves":  # weights are powers of two, so sums meet top_p exactly
        row = -np.log(2) * random.permutation(np.arange(columns) % 40)
    row[random.random(columns) < masked] = -np.inf
    row[random.integers(0, columns)] = (
        row[np.isfinite(row)].max() if np.isfinite(row).any() else 0.0
    )
    return row.astype(np.float32)


rows = st.builds(
    a_row,
    columns=st.sampled_from([1, 2, 31, 127, 129, 1000, 4097, 9001, 20_011]),
    shape=st.sampled_from(["normal", "peaked", "zipf", "tied", "equal", "halves"]),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.0, 0.3, 0.999]),
)
# with a nucleus of 1, only min-p filters
nuclei = st.sampled_from([1.0, 1e-9, 1e-3, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999, 1 - 1e-6, 1 - 1e-9])
temperatures = st.sampled_from([1e-5, 1e-3, 0.3, 0.7, 1.0, 1.5, 10.0, 1e6, 1e30, 1e38])


def ids_of(row: Row, params: SamplingParams) -> set[int]:
    with np.errstate(all="ignore"):
        kept = filtered_tokens(WeighedRow(row, params), params)
    return set((kept.ids if isinstance(kept, FewTokens) else np.flatnonzero(kept.weights)).tolist())


def scaled(row: Row, temperature: float) -> npt.NDArray[np.float64]:
    """The row at temperature 1, rounded like the division that comes first."""
    with np.errstate(all="ignore"):
        return (
            WeighedRow(row, SamplingParams(temperature=temperature))
            .log_weights(row)
            .astype(np.float64)
        )


def reference_ids(row: Row, params: SamplingParams, *, top_p: float, tie: float) -> set[int]:
    plain = SamplingParams(top_p=top_p, min_p=params.min_p)
    with np.errstate(invalid="ignore"):  # empty if the edge itself is above it
        return set(
            np.flatnonzero(
                probabilities(scaled(row, params.temperature), params=plain, tie=tie) > 0
            ).tolist()
        )


@settings(max_examples=60)
@given(
    row=rows,
    top_p=nuclei,
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0, 2.0]),
    temperature=temperatures,
)
def test_filters_keep_the_same_tokens_as_the_reference(
    row: Row, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p)
    kept = ids_of(row, params)
    assert kept
    assert kept <= reference_ids(row, params, top_p=min(top_p * (1 + ROUNDING), 1.0), tie=TIE)
    surely = reference_ids(row, params, top_p=top_p * (1 - ROUNDING), tie=-TIE)
    # float32 underflows further down
    assert kept >= {token for token in surely if scaled(row, temperature)[token] > -80}


@pytest.mark.parametrize("shape", ["normal", "peaked", "zipf", "tied", "equal", "halves"])
@pytest.mark.parametrize(
    "find_edge", [host_sampling._nucleus_edge, host_sampling._edge_by_histogram]
)
def test_the_edge_among_many_weights_equals_that_of_a_sort(
    shape: str, find_edge: Callable[..., float]
) -> None:
    row = a_row(columns=20_011, shape=shape, seed=1)
    weights = np.exp(row - row.max())
    total = weights.sum(dtype=np.float64)
    for top_p in (1e-9, 1e-4, 0.3, 0.95, 1 - 1e-9, 1 - 1e-16):
        edge = find_edge(weights, top_p=top_p)
        assert edge in weights
        assert weights[weights > edge].sum(dtype=np.float64) <= top_p * total * (1 + 1e-12)
        assert weights[weights >= edge].sum(dtype=np.float64) >= top_p * total * (1 - 1e-12)


@settings(max_examples=30)
@given(
    row=rows,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.5, 100.0]),
        top_p=st.sampled_from([0.3, 0.9, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
    ),
)
def test_the_same_seed_draws_the_same_as_mlx(row: Row, params: SamplingParams) -> None:
    samples = 32
    logits = mx.broadcast_to(mx.array(row), (samples, row.size))
    keys = [random_key(seed=seed, position=7) for seed in range(samples)]
    kind = sampling_kind(params, vocab_size=row.size)
    by_mlx = sample_tokens(
        logits, kind=kind, params=[params] * samples, keys=keys, peaks=mx.max(logits, axis=-1)
    )
    by_numpy = sample_on_host(logits, params=[params] * samples, keys=keys)
    differing = np.flatnonzero(np.array(by_mlx) != np.array(by_numpy))
    # a token at the edge of top-p that only one of the two keeps, or a draw decided by rounding
    assert len(differing) <= 1


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = np.stack(
        [
            a_row(columns=4097, shape=shape, seed=5)
            for shape in ("normal", "peaked", "zipf", "tied", "equal")
        ]
    )
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(),
        SamplingParams(top_p=0.99),
        SamplingParams(min_p=0.1),
        SamplingParams(),
    ]
    keys = [random_key(seed=index, position=1) for index in range(5)]
    together = sample_on_host(mx.array(logits), params=params, keys=keys).tolist()
    alone = [
        sample_on_host(
            mx.array(logits[at : at + 1]), params=params[at : at + 1], keys=keys[at : at + 1]
        ).item()
        for at in range(5)
    ]
    assert together == alone


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_peaked_rows_are_drawn_without_weighing_the_whole_vocabulary(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = a_row(columns=152_064, shape="peaked", seed=2)
    params = SamplingParams(top_p=top_p)
    expected = ids_of(row, params)
    asked: list[int] = []
    plain = WeighedRow.weights

    def counting(weighed: WeighedRow, logits: Row) -> Row:
        asked.append(logits.size)
        return plain(weighed, logits)

    monkeypatch.setattr(WeighedRow, "weights", counting)
    assert ids_of(row, params) == expected
    assert sum(asked) < row.size / 4


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)], ids=str
)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_rows_without_valid_logits_harm_no_others(params: SamplingParams, poison: float) -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[0, :] = poison
    keys = [random_key(seed=1, position=1)] * 2
    first, second = sample_on_host(mx.array(logits), params=[params] * 2, keys=keys).tolist()
    assert first == 0
    assert second == sample_on_host(mx.array(logits[1:]), params=[params], keys=keys[:1]).item()


def test_numpy_draws_from_large_vocabularies_on_a_cpu() -> None:
    assert sampling_pays(SamplingKind(nucleus=True), vocab_size=152_064)
    assert sampling_pays(SamplingKind(), vocab_size=152_064)
    assert not sampling_pays(SamplingKind(), vocab_size=1500)
    assert not sampling_pays(SamplingKind(candidates=32, nucleus=True), vocab_size=152_064)
    assert not sampling_pays(SamplingKind(greedy=True), vocab_size=152_064)


@settings(max_examples=80)
@given(
    columns=st.sampled_from([1, 5, 31, 32, 33, 1000, 2600, 9001]),
    share=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 10**6]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 9),
)
def test_the_largest_entries_are_those_of_a_stable_sort(
    columns: int, share: float, levels: int, masked: float, seed: int
) -> None:
    count = max(1, min(columns, int(share * share * share * columns)))
    random = np.random.default_rng(seed)
    row = random.integers(0, levels, size=columns).astype(np.float32)
    row[random.random(columns) < masked] = -np.inf
    assert (
        GroupedRow(row).largest(count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()
    )


@given(columns=st.integers(1, 300))
def test_every_token_is_in_one_group_or_in_none(columns: int) -> None:
    row = np.arange(columns, dtype=np.float32)
    groups = GroupedRow(row)
    assert sorted(groups.tokens(np.arange(len(groups.maxima)))) == list(range(columns))
    for group, largest in enumerate(groups.maxima):
        assert row[groups.tokens(np.array([group]))[: groups.group_size]].max() == largest


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


def test_scores_of_a_row_with_nan_harm_no_other() -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, 5] = np.nan
    logits[2] = -np.inf
    got = score_on_host(mx.array(logits), mx.array([5, 5, 5]), top_logprobs=2)
    assert mx.isnan(got.chosen).tolist() == [True, False, True]
    assert got.chosen[1].item() == pytest.approx(-np.log(100), abs=1e-6)
    assert got.top is not None
    assert got.top[0][1].tolist() == [0, 1]
