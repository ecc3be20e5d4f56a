"""Prompts that start after cached tokens, and spans that end where state is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import SchedulerSettings
from holdfast.worker.engine.plan import Span
from holdfast.worker.scheduler.scheduler import Scheduler, StepOutcome
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.step_worker import submit


def a_scheduler(*, step_tokens: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerSettings(step_tokens=step_tokens, max_running=8, min_chunk_tokens=4),
        SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0),
        budget_bytes=1 << 30,
        context_tokens=10_000,
        mixes_chunks=True,
    )


def spans_until_the_end(scheduler: Scheduler) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = {}
    while plan := scheduler.next_step().plan:
        if not plan.spans:
            break
        for span in plan.spans:
            spans.setdefault(span.request_id, []).append(span)
        generated_tokens = {span.request_id: 1 for span in plan.spans if span.samples}
        scheduler.record_step(
            StepOutcome(plan=plan, generated_tokens=generated_tokens, ended=(), seconds=0.001)
        )
        scheduler.check_invariants()
    return spans


@given(
    prompts=st.lists(
        st.integers(2, 300).flatmap(
            lambda tokens: st.tuples(
                st.just(tokens),
                st.lists(st.integers(1, tokens), unique=True, max_size=5).map(sorted),
                st.integers(0, tokens - 1),
            )
        ),
        min_size=1,
        max_size=6,
    ),
    step_tokens=st.integers(8, 128),
)
def test_every_boundary_after_the_cached_tokens_ends_a_span(
    prompts: list[tuple[int, list[int], int]], step_tokens: int
) -> None:
    scheduler = a_scheduler(step_tokens=step_tokens)
    for index, (tokens, boundaries, cached) in enumerate(prompts):
        sequence = submit(
            scheduler, str(index), prompt_tokens=tokens, max_tokens=3, boundaries=tuple(boundaries)
        )
        sequence.start_after(cached)
    played = spans_until_the_end(scheduler)
    for index, (tokens, boundaries, cached) in enumerate(prompts):
        ends = {span.start + span.tokens for span in played[str(index)]}
        assert {boundary for boundary in boundaries if boundary > cached} <= ends
        covered = [
            position
            for span in played[str(index)]
            for position in range(span.start, span.start + span.tokens)
        ]
        assert covered == list(range(cached, tokens + 2))


def test_a_request_cached_to_its_last_token_prefills_only_that() -> None:
    scheduler = a_scheduler()
    sequence = submit(scheduler, "a", prompt_tokens=500, max_tokens=1)
    sequence.start_after(499)
    assert spans_until_the_end(scheduler)["a"] == [
        Span(request_id="a", start=499, tokens=1, samples=True)
    ]
