from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.scheduler.chunking import (
    GRAIN_TOKENS,
    LEAST_ALONE_TOKENS,
    PATIENCE_STEPS,
    ChunkSharing,
)
from holdfast.worker.scheduler.cost_model import ChunkBounds, CostModel, StepLoad
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts

QUANTUM = 32
STALL = 0.5  # seconds


def prompt(order: int, tokens: int, *, position: int = 0, last_step: int = 0) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=str(order),
        order=order,
        prompt_tokens=tokens,
        max_tokens=10,
        costs=SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0),
        known_tokens=tokens,
        position=position,
        last_step=last_step,
    )


def model(*, seconds_per_token: float = 0.001, mixes_chunks: bool = True) -> CostModel:
    costs = CostModel(mixes_chunks=mixes_chunks, min_chunk_tokens=QUANTUM)
    costs.learn(StepLoad(1), 0.02)
    costs.learn(StepLoad(1, 1, 500, 500 * 250.0), 0.02 + 500 * seconds_per_token)
    return costs


def share(
    prompts: list[ScheduledSequence],
    *,
    tokens: int = 2048,
    seconds: float = math.inf,
    costs: CostModel | None = None,
) -> dict[str, int]:
    sharing = ChunkSharing(costs or model(), min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    return {
        sequence.request_id: taken
        for sequence, taken in sharing.share(prompts, tokens=tokens, seconds=seconds, step=1)
    }


def test_a_prompt_alone_takes_the_whole_step() -> None:
    assert share([prompt(1, 9000)], tokens=1000) == {"1": 1000}


def bounded(**bounds: float) -> CostModel:
    costs = CostModel(mixes_chunks=True, min_chunk_tokens=QUANTUM, bounds=ChunkBounds(**bounds))  # type: ignore[arg-type]
    costs.learn(StepLoad(1), 0.02)
    costs.learn(StepLoad(1, 1, 500, 500 * 250.0), 0.02 + 500 * 0.001)
    return costs


def test_a_lone_prompt_respects_the_devices_step_time() -> None:
    # in units of 256 tokens, at 1 ms each
    assert share([prompt(1, 9000)], costs=bounded(seconds=0.6)) == {"1": 512}
    assert share([prompt(1, 9000)], costs=bounded(seconds=9.0)) == {"1": 2048}


def test_a_lone_prompt_prefills_256_tokens_on_any_device() -> None:
    assert share([prompt(1, 9000)], costs=bounded(seconds=0.01)) == {"1": LEAST_ALONE_TOKENS}
    assert share([prompt(1, 100)], costs=bounded(seconds=0.01)) == {"1": 100}


def test_several_prompts_together_respect_the_step_time() -> None:
    taken = share([prompt(1, 9000), prompt(2, 9000)], costs=bounded(seconds=0.6))
    assert QUANTUM <= sum(taken.values()) <= 600


@given(position=st.integers(0, 200_000), score_bytes=st.integers(1, 1 << 32))
def test_a_chunks_attention_scores_fit_their_memory_everywhere(
    position: int, score_bytes: int
) -> None:
    costs = bounded(score_bytes_per_pair=96, score_bytes=score_bytes)
    (tokens,) = share([prompt(1, 300_000, position=position)], costs=costs).values()
    assert tokens == QUANTUM or 96 * tokens * (position + tokens) <= score_bytes
    longer = tokens + QUANTUM
    assert longer > 2048 or 96 * longer * (position + longer) > score_bytes, (
        "no smaller than it has to be"
    )


def test_a_size_that_failed_on_the_device_is_never_retried() -> None:
    costs = bounded()
    costs.limit_chunks(500)
    assert share([prompt(1, 9000)], costs=costs) == {"1": 500}
    assert max(share([prompt(1, 9000), prompt(2, 9000)], costs=costs).values()) <= 500
    assert max(share([prompt(1, 9000), prompt(2, 9000)], costs=costs, seconds=60.0).values()) <= 500


def test_with_decoding_rows_a_chunk_fits_the_stall_in_whole_grains() -> None:
    assert share([prompt(1, 9000)], seconds=0.25) == {"1": 248}  # 250 tokens fit
    assert share([prompt(1, 9000), prompt(2, 8000)], seconds=0.03) == {"1": QUANTUM}


def test_a_prompts_last_chunk_may_be_smaller_than_a_quantum() -> None:
    assert share([prompt(1, 9000, position=8900)], seconds=0.25) == {"1": 100}


def test_a_prompt_always_gets_a_quantum() -> None:
    assert share([prompt(1, 9000)], seconds=0.0001) == {"1": QUANTUM}
    assert share([prompt(1, 9000), prompt(2, 50)], seconds=0.0001) == {"1": QUANTUM}


def test_a_short_prompt_is_prefilled_whole_next_to_a_long_one() -> None:
    assert share([prompt(1, 90_000), prompt(2, 50)]) == {"1": 1024 + 968, "2": 50}


def test_of_equal_prompts_the_older_is_first() -> None:
    assert share([prompt(1, 3000), prompt(2, 3000)]) == {"1": 2048}


def test_tokens_left_by_the_oldest_go_to_the_shortest() -> None:
    assert share([prompt(1, 10), prompt(2, 900), prompt(3, 300)], tokens=512) == {
        "1": 10,
        "3": 300,
        "2": 200,
    }


def test_a_prompt_passed_over_for_long_precedes_shorter_ones() -> None:
    sharing = ChunkSharing(model(), min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    step = PATIENCE_STEPS + 2
    prompts = [
        prompt(1, 9000, last_step=step - 1),
        prompt(2, 8000, last_step=1),
        prompt(3, 2000, last_step=step - 1),
    ]
    chunks = sharing.share(prompts, tokens=2048, seconds=math.inf, step=step)
    assert {each.request_id: taken for each, taken in chunks} == {"1": 1024, "2": 1024}


def test_with_room_for_one_chunk_old_and_short_alternate() -> None:
    sharing = ChunkSharing(model(), min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    prompts = [prompt(1, 9000), prompt(2, 5000)]
    served = [
        sharing.share(prompts, tokens=QUANTUM, seconds=1.0, step=step)[0][0].order
        for step in range(6)
    ]
    assert served == [1, 2, 1, 2, 1, 2]


def test_an_unmeasured_decode_step_runs_once_without_chunks() -> None:
    sharing = ChunkSharing(
        CostModel(mixes_chunks=True, min_chunk_tokens=QUANTUM),
        min_chunk_tokens=QUANTUM,
        stall_seconds=STALL,
    )
    prompts = [prompt(1, 9000)]
    assert not sharing.share(prompts, tokens=64, seconds=1.0, step=1)
    assert sharing.share(prompts, tokens=64, seconds=1.0, step=2)


def test_occasional_steps_without_chunks_measure_decoding() -> None:
    sharing = ChunkSharing(model(), min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    prompts = [prompt(1, 9000)]
    without = [
        step
        for step in range(1, 100)
        if not sharing.share(prompts, tokens=64, seconds=1.0, step=step)
    ]
    assert without == [33, 66, 99]


def test_separate_passes_of_chunks_count_into_the_stall() -> None:
    # 0.02 s for each chunk's pass, slightly less than 0.001 s per token
    costs = model(mixes_chunks=False)
    assert share([prompt(1, 9000)], seconds=0.25, costs=costs) == {"1": 232}
    assert share([prompt(1, 9000)], seconds=0.07, costs=costs) == {"1": 48}


prompts_strategy = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 20_000), st.integers(0, 30)),
    min_size=1,
    max_size=8,
)


@given(
    shapes=prompts_strategy,
    tokens=st.integers(1, 3000),
    seconds=st.one_of(st.just(math.inf), st.floats(1e-4, 2.0)),
    mixes_chunks=st.booleans(),
    oldest_is_first=st.booleans(),
)
def test_chunks_respect_tokens_time_and_grains(
    shapes: list[tuple[int, int, int]],
    tokens: int,
    seconds: float,
    mixes_chunks: bool,
    oldest_is_first: bool,
) -> None:
    costs = model(mixes_chunks=mixes_chunks)
    costs.learn(StepLoad(1, 1, 500, 500 * 9000.0), 3.0)
    prompts = [
        prompt(order, left + position, position=position, last_step=last_step)
        for order, (left, position, last_step) in enumerate(shapes)
    ]
    sharing = ChunkSharing(costs, min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    sharing._oldest_is_first = oldest_is_first
    chunks = sharing.share(prompts, tokens=tokens, seconds=seconds, step=31)
    assert chunks
    assert len({sequence.order for sequence, _ in chunks}) == len(chunks)
    assert sum(taken for _, taken in chunks) <= tokens
    for sequence, taken in chunks:
        alone = len(prompts) == 1 and math.isinf(seconds)
        whole = taken % GRAIN_TOKENS == 0 or taken == sequence.unplanned_tokens
        assert 0 < taken <= sequence.unplanned_tokens
        assert whole or alone or taken == tokens < QUANTUM
    if sum(taken for _, taken in chunks) > QUANTUM:
        added = sum(
            costs.seconds_per_chunk() + costs.more_chunk_seconds(sequence.position, taken)
            for sequence, taken in chunks
        )
        assert added <= seconds * (1 + 1e-9)


@given(shapes=st.lists(st.integers(1, 3000), min_size=2, max_size=6), seconds=st.floats(1e-4, 0.5))
def test_no_prompt_is_passed_over_forever(shapes: list[int], seconds: float) -> None:
    """An endless stream of short prompts arrives; each of the first prompts still advances within
    the limit.
    """
    sharing = ChunkSharing(model(), min_chunk_tokens=QUANTUM, stall_seconds=STALL)
    prompts = [prompt(order, tokens) for order, tokens in enumerate(shapes)]
    bound = PATIENCE_STEPS + 2 * (len(shapes) + 1)
    for step in range(2, 80):
        chunks = sharing.share(prompts, tokens=64, seconds=seconds, step=step)
        for sequence, taken in chunks:
            sequence.position += taken
            sequence.last_step = step
        prompts = [sequence for sequence in prompts if sequence.unplanned_tokens]
        assert all(step - sequence.last_step <= bound for sequence in prompts)
        if len(prompts) <= len(shapes):
            prompts.append(prompt(100 + step, 40, last_step=step))
