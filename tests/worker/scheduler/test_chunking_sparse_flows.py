"""Short prompts of new flows are prefilled first, and no flow starves: in steps, with known costs."""

from __future__ import annotations

import pytest

from holdfast.config import SchedulerSettings
from holdfast.wire.requests import Priority, ServiceClass
from holdfast.worker.scheduler.chunking import MOST_STEPS
from tests.fakes.step_worker import Served, StepWorker

STEP_TOKENS = 512


def worker(*, depth: int = 0, mixes_chunks: bool = True) -> StepWorker:
    settings = SchedulerSettings(max_running=64, step_tokens=STEP_TOKENS, expected_output_tokens=64)
    return StepWorker(settings=settings, depth=depth, mixes_chunks=mixes_chunks)


def ask(
    run: StepWorker,
    name: str,
    *,
    prompt_tokens: int,
    max_tokens: int = 1,
    priority: Priority = "interactive",
) -> Served:
    """The flow is the part before the hyphen."""
    service = ServiceClass(flow=name.partition("-")[0], priority=priority)
    return run.submit(name, prompt_tokens=prompt_tokens, max_tokens=max_tokens, service=service)


def read_tokens(run: StepWorker, flow: str, *, since: int, until: int | None = None) -> int:
    """Prompt tokens of one flow in these plans."""
    spans = (span for plan in run.plans[since:until] for span in plan.spans)
    return sum(
        span.tokens
        for span in spans
        if span.tokens > 1 and span.request_id.partition("-")[0] == flow
    )


def keep_asking(
    run: StepWorker, flow: str, *, agents: int, prompt_tokens: int, max_tokens: int
) -> None:
    """A step in which each answered agent has sent its next request."""
    live = sum(1 for name in run.live if name.partition("-")[0] == flow)
    for number in range(agents - live):
        ask(
            run,
            f"{flow}-{len(run.plans)}-{number}",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )


def steps_beside_a_crowd(run: StepWorker, count: int) -> None:
    for _ in range(count):
        keep_asking(run, "crowd", agents=32, prompt_tokens=2000, max_tokens=5)
        run.step()


@pytest.mark.parametrize("mixes_chunks", [True, False])
@pytest.mark.parametrize(("prompt_tokens", "is_read_first"), [(400, True), (3000, False)])
def test_a_new_flows_short_prompt_precedes_all_others(
    prompt_tokens: int, is_read_first: bool, mixes_chunks: bool
) -> None:
    run = worker(mixes_chunks=mixes_chunks)
    steps_beside_a_crowd(run, 100)
    for number in range(3):  # and the next time
        before = len(run.plans)
        served = ask(run, f"single-{number}", prompt_tokens=prompt_tokens)
        while not served.ends:
            steps_beside_a_crowd(run, 1)
        assert (read_tokens(run, "crowd", since=before) == 0) == is_read_first
        steps_beside_a_crowd(run, 30)


def test_several_short_prompts_are_prefilled_in_one_step() -> None:
    run = worker()
    ask(run, "long-0", prompt_tokens=20_000)
    run.step()
    for number in range(4):
        ask(run, f"v{number}-0", prompt_tokens=100)
    before = len(run.plans)
    run.step()
    assert [read_tokens(run, f"v{number}", since=before) for number in range(4)] == [100] * 4
    assert read_tokens(run, "long", since=before) == 0


def test_new_flows_share_the_step() -> None:
    run = worker()
    for number in range(4):
        ask(run, f"v{number}-0", prompt_tokens=300)
    run.step()
    assert all(read_tokens(run, f"v{number}", since=0) for number in range(4))


@pytest.mark.parametrize("depth", [0, 1])
def test_new_flows_do_not_starve_a_long_prompt(depth: int) -> None:
    run = worker(depth=depth)
    ask(run, "long-0", prompt_tokens=20_000)
    for _ in range(1 + depth):
        run.step()
    for number in range(200):
        before = len(run.plans)
        ask(run, f"visitor{number}-0", prompt_tokens=100)
        run.step()
        window = range(max(0, before - MOST_STEPS), len(run.plans))
        assert "long-0" not in run.live or read_tokens(run, "long", since=window.start) > 0


@pytest.mark.parametrize("flows", [2, 20])
def test_alternating_flows_do_not_starve_a_long_prompt(flows: int) -> None:
    run = worker()
    ask(run, "long-0", prompt_tokens=30_000)
    run.step()
    since = len(run.plans)
    for number in range(300):
        ask(run, f"v{number % flows}-{number}", prompt_tokens=100)
        run.step()
    assert "long-0" not in run.live or read_tokens(run, "long", since=since) >= 300 * 100 / (
        2 * flows
    )


def test_returning_flows_prefill_no_more_than_others() -> None:
    run = worker()
    steps_beside_a_crowd(run, 100)
    since = len(run.plans)
    answered_at = {"keen": 0, "eager": 0}
    for step in range(600):
        for flow, at in answered_at.items():
            is_there = any(name.startswith(flow) for name in run.live)
            if is_there:
                answered_at[flow] = step
            elif step - at > 1:  # a step without it, so that it is new again
                ask(run, f"{flow}-{step}", prompt_tokens=450)
        steps_beside_a_crowd(run, 1)
    tokens = {flow: read_tokens(run, flow, since=since) for flow in ("crowd", "keen", "eager")}
    # tokens after others cost more
    assert tokens["crowd"] >= 0.7 * max(tokens["keen"], tokens["eager"]) > 0, tokens


def test_batch_requests_never_precede_interactive_ones() -> None:
    run = worker()
    steps_beside_a_crowd(run, 50)
    for number in range(10):
        ask(run, f"batch-{number}", prompt_tokens=50, priority="batch")
    for _ in range(200):
        before = len(run.plans)
        steps_beside_a_crowd(run, 1)
        if read_tokens(run, "batch", since=before):
            assert read_tokens(run, "crowd", since=before)
