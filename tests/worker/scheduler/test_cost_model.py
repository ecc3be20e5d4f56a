from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.scheduler.cost_model import CostModel, StepLoad, Trend
from tests.fakes.step_worker import device_seconds


def chunk_seconds(model: CostModel, position: int, tokens: int) -> float:
    """The cost that a chunk from `position` on adds to a step."""
    return model.seconds_per_chunk() + model.more_chunk_seconds(position, tokens)


def chunk(rows: int, position: int, tokens: int) -> StepLoad:
    return StepLoad(rows, 1, tokens, tokens * (position + tokens / 2))


def learned(*, mixes_chunks: bool = True, steps: int = 40) -> CostModel:
    """Has observed the prefill of 16,000 tokens while 4 sequences decode on a machine like
    `device_seconds`.
    """
    model = CostModel(mixes_chunks=mixes_chunks, min_chunk_tokens=32)
    for index in range(steps):
        model.learn(StepLoad(4), device_seconds(StepLoad(4)))
        load = chunk(4, index * 400, 400)
        model.learn(load, device_seconds(load))
    return model


def test_the_initial_guesses_are_usable() -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    assert 0.001 < model.decode_seconds(1) < 0.1
    assert 32 <= model.tokens_within(0.25, 0) <= 2048


def test_the_first_observation_replaces_the_guess() -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    model.learn(chunk(0, 0, 512), 51.2)
    assert model.prompt_token_seconds_at(256) == pytest.approx(0.1)


def test_decode_steps_and_prompt_tokens_are_distinguished() -> None:
    model = learned()
    assert model.decode_seconds(4) == pytest.approx(0.014, rel=0.01)
    truth = device_seconds(chunk(4, 16_000, 256)) - device_seconds(StepLoad(4))
    assert chunk_seconds(model, 16_000, 256) == pytest.approx(truth, rel=0.1)


def test_the_cost_follows_the_position_in_the_prompt() -> None:
    model = learned()
    near, far = model.more_chunk_seconds(12_000, 100), model.more_chunk_seconds(24_000, 100)
    assert far - near == pytest.approx(100 * 1e-7 * 12_000, rel=0.2)


def test_a_new_prompt_after_a_long_one_is_cheaper() -> None:
    model = learned()
    assert model.tokens_within(0.1, 0) > 1.5 * model.tokens_within(0.1, 16_000)


def test_one_outlier_does_not_move_the_estimates_far() -> None:
    model = learned()
    before = model.decode_seconds(4), chunk_seconds(model, 16_000, 400)
    model.learn(StepLoad(4), 100.0)
    model.learn(chunk(4, 16_000, 400), 100.0)
    assert model.decode_seconds(4) < 2 * before[0]
    assert chunk_seconds(model, 16_000, 400) < 2 * before[1]


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_lasting_change_is_learned_within_twenty_steps(factor: float) -> None:
    model = learned()
    load = chunk(0, 8_000, 400)
    for _ in range(20):
        model.learn(StepLoad(4), factor * device_seconds(StepLoad(4)))
        model.learn(load, factor * device_seconds(load))
    assert model.decode_seconds(4) == pytest.approx(factor * 0.014, rel=0.2)
    assert chunk_seconds(model, 8_000, 400) == pytest.approx(
        factor * (device_seconds(load) - 0.011), rel=0.3
    )


def test_a_tiny_prompt_says_little_about_large_chunks() -> None:
    model = learned()
    before = chunk_seconds(model, 0, 512)
    for _ in range(3):
        model.learn(chunk(0, 0, 2), 0.05)
    assert chunk_seconds(model, 0, 512) < 1.5 * before


def test_a_high_decode_estimate_does_not_make_prompts_free() -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    model.learn(StepLoad(1), 5.0)
    model.learn(chunk(1, 0, 100), 1.0)
    assert chunk_seconds(model, 0, 100) >= 0.25


def test_separate_chunks_each_cost_a_pass_over_the_weights() -> None:
    mixing, apart = learned(), learned(mixes_chunks=False)
    assert mixing.seconds_per_chunk() == 0.0
    assert apart.seconds_per_chunk() == pytest.approx(apart.decode_seconds(1))


@given(
    observations=st.lists(
        st.tuples(st.integers(0, 50_000), st.integers(1, 2048), st.floats(1e-4, 50.0)), max_size=12
    ),
    seconds=st.floats(0.0, 5.0),
    position=st.integers(0, 200_000),
)
def test_the_tokens_that_fit_a_time_take_no_longer(
    observations: list[tuple[int, int, float]], seconds: float, position: int
) -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    for where, tokens, took in observations:
        model.learn(chunk(0, where, tokens), took)
    fitting = model.tokens_within(seconds, position)
    assert fitting >= 0
    assert model.more_chunk_seconds(position, fitting) <= seconds * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(1e-9, 1e3), st.floats(0.01, 1.0)), max_size=30),
    st.floats(0, 1e6),
)
def test_a_trend_is_always_positive_and_never_falls(
    observations: list[tuple[float, float, float]], x: float
) -> None:
    trend = Trend(first_guess=1.0, spread=10.0)
    for where, cost, weight in observations:
        trend.learn(where, cost, weight=weight)
    assert 0.0 < trend.at(x) <= trend.at(x + 1000.0)


def test_the_estimate_of_an_unmeasured_kind_of_step_is_none() -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    assert model.at_most(StepLoad(1)) is None
    model.learn(chunk(0, 0, 100), 1.0)
    # its distribution over kinds of steps is still unknown
    assert model.at_most(chunk(0, 0, 100)) == pytest.approx(2.0)
    assert model.at_most(StepLoad(1)) is None
    assert model.at_most(chunk(1, 0, 100)) is None


@st.composite
def loads(draw: st.DrawFn) -> StepLoad:
    rows = draw(st.integers(0, 32))
    if rows and draw(st.booleans()):
        return StepLoad(rows)
    return chunk(rows, draw(st.integers(0, 200_000)), draw(st.integers(1, 2048)))


@given(
    seen=st.lists(loads(), min_size=1, max_size=12),
    next_one=loads(),
    slowness=st.sampled_from([0.01, 1.0, 1000.0]),
)
def test_no_step_takes_twenty_times_its_estimate(
    seen: list[StepLoad], next_one: StepLoad, slowness: float
) -> None:
    """At twenty times the estimate, the front kills a worker."""
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    for load in seen:
        model.learn(load, device_seconds(load) * slowness)
    expected = model.at_most(next_one)
    assert expected is None or device_seconds(next_one) * slowness < 20 * expected


# eight times the cost of a token's prefill: a small model with a large vocabulary
SECONDS_PER_SCORE = 0.004


def scored_chunk(rows: int, position: int, tokens: int) -> StepLoad:
    return replace(chunk(rows, position, tokens), scored_tokens=tokens)


def seconds_with_scores(load: StepLoad) -> float:
    return device_seconds(load) + SECONDS_PER_SCORE * load.scored_tokens


def test_the_cost_of_scores_is_learned_separately() -> None:
    model = learned()
    read = model.more_chunk_seconds(0, 100)
    for index in range(12):
        load = scored_chunk(4, index * 64, 64)
        model.learn(load, seconds_with_scores(load))
    assert model.score_seconds == pytest.approx(SECONDS_PER_SCORE, rel=0.15)
    assert model.more_chunk_seconds(0, 100) == read
    fitting = model.tokens_within(0.25, 16_000, score_seconds=model.score_seconds)
    assert seconds_with_scores(scored_chunk(0, 16_000, fitting)) - 0.010 == pytest.approx(
        0.25, rel=0.2
    )


def test_early_scores_do_not_distort_prefill_costs_for_long() -> None:
    model = CostModel(mixes_chunks=True, min_chunk_tokens=32)
    for index in range(8):
        load = scored_chunk(4, index * 64, 64)
        model.learn(load, seconds_with_scores(load))
    for index in range(30):
        for load in (chunk(4, index * 64, 64), scored_chunk(4, index * 64, 64)):
            model.learn(StepLoad(4), seconds_with_scores(StepLoad(4)))
            model.learn(load, seconds_with_scores(load))
    assert model.more_chunk_seconds(0, 100) == pytest.approx(100 * 0.0005, rel=0.5)
    assert model.score_seconds == pytest.approx(SECONDS_PER_SCORE, rel=0.25)
