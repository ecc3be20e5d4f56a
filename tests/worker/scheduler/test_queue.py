"""The many requests of one flow do not starve the few of another: in steps, on a simulated machine."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.config import SchedulerSettings
from holdfast.errors import QueueFull
from holdfast.wire.requests import Priority, ServiceClass
from holdfast.worker.scheduler.queue import FairShare
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts
from tests.fakes.slow import slow
from tests.fakes.step_worker import StepWorker

COSTS = SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0, reserve_step_tokens=16)
STEP_TOKENS = 512


def worker(
    *, max_running: int = 32, budget_tokens: int = 10**6, depth: int = 0, **settings: float
) -> StepWorker:
    chosen = SchedulerSettings(
        max_running=max_running,
        step_tokens=STEP_TOKENS,
        expected_output_tokens=64,
        **settings,  # type: ignore[arg-type]
    )
    return StepWorker(settings=chosen, costs=COSTS, budget_bytes=budget_tokens, depth=depth)


def of(flow: str, priority: Priority = "interactive") -> ServiceClass:
    return ServiceClass(flow=flow, priority=priority)


@dataclass
class Crowd:
    """Concurrent agents, each of which sends its next request when it gets its answer."""

    run: StepWorker
    agents: int
    prompt_tokens: int
    max_tokens: int
    service: ServiceClass

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def ask(self) -> None:
        mine = sum(1 for served in self.run.live.values() if served.service == self.service)
        for _ in range(self.agents - mine):
            name = f"{self.service.flow}-{next(self._numbers)}"
            self.run.submit(
                name,
                prompt_tokens=self.prompt_tokens,
                max_tokens=self.max_tokens,
                service=self.service,
            )


def first_token_seconds(
    run: StepWorker, crowd: Crowd | None, *, prompt_tokens: int, turns: int
) -> list[float]:
    """Of one agent's turns, one after the other, with pauses between them."""
    found = []
    for turn in range(turns):
        for _ in range(7):  # while it thinks, the others continue
            if crowd is not None:
                crowd.ask()
            run.step()
        asked_at = sum(run.step_seconds)
        served = run.submit(
            f"single-{turn}", prompt_tokens=prompt_tokens, max_tokens=20, service=of("single")
        )
        while not served.generated_tokens:
            if crowd is not None:
                crowd.ask()
            run.step()
        found.append(sum(run.step_seconds) - asked_at)
        while not served.ends:
            if crowd is not None:
                crowd.ask()
            run.step()
    return found


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


@pytest.mark.parametrize(
    ("depth", "prompt_tokens", "crowd_prompt", "crowd_answer"),
    [
        (0, 30, 2000, 400),
        (1, 30, 200, 2000),
        (1, 3000, 8000, 5),
        *slow((1, 400, 2000, 400), (0, 3000, 2000, 400), (0, 400, 8000, 5)),
    ],
)
def test_a_crowd_of_32_at_most_doubles_the_first_token_time(
    depth: int, prompt_tokens: int, crowd_prompt: int, crowd_answer: int
) -> None:
    alone = first_token_seconds(worker(depth=depth), None, prompt_tokens=prompt_tokens, turns=3)
    run = worker(depth=depth)
    crowd = Crowd(run, 32, crowd_prompt, crowd_answer, of("crowd"))
    for _ in range(100):
        crowd.ask()
        run.step()
    together = first_token_seconds(run, crowd, prompt_tokens=prompt_tokens, turns=10)
    chunk = max(run.step_seconds)
    assert p95(together) <= 2 * max(alone) + (1 + depth) * chunk, (max(alone), together, chunk)


@pytest.mark.parametrize("budget_tokens", [10**6, 4000])
def test_a_flows_excess_places_and_memory_are_given_up_first(
    budget_tokens: int,
) -> None:
    run = worker(max_running=4, budget_tokens=budget_tokens)
    for n in range(8):
        run.submit(f"many-{n}", prompt_tokens=800, max_tokens=500, service=of("many"))
    for _ in range(20):
        run.step()
    run.submit("one", prompt_tokens=900, max_tokens=100, service=of("one"))
    run.step()
    running = Counter(served.service.flow for served in run.live.values() if served.runs)
    assert running["one"] == 1
    assert running["many"] >= 2
    preempted = len(run.preempted)
    while "one" in run.live:
        run.step()
    assert len(run.preempted) == preempted, "who has given way comes back without pushing"
    run.run_to_end()
    assert all(
        served.generated_tokens == 500 for served in run.ended if served.service.flow == "many"
    )


@pytest.mark.parametrize("flows", [2, 3, 4])
def test_a_flows_younger_prompt_advances_with_room_for_one_chunk(
    flows: int,
) -> None:
    run = worker(stall_seconds=0.0001, min_chunk_tokens=1)
    run.submit("answer", prompt_tokens=4, max_tokens=400, service=of("writing"))
    run.read_all_prompts()
    for number in range(flows):
        run.submit(f"old-{number}", prompt_tokens=60, max_tokens=2, service=of(str(number)))
    for _ in range(10):
        run.step()
    young = [
        run.submit(f"young-{number}", prompt_tokens=70, max_tokens=2, service=of(str(number)))
        for number in range(flows)
    ]
    for _ in range(20 * flows):
        run.step()
    assert all(served.position > 0 for served in young)
    run.run_to_end()


def test_flows_take_turns_for_a_single_place() -> None:
    run = worker(max_running=1)
    for n in range(6):
        run.submit(f"many-{n}", prompt_tokens=10, max_tokens=5, service=of("many"))
    run.step()
    for name in ("x-0", "y-0", "x-1"):
        run.submit(name, prompt_tokens=10, max_tokens=5, service=of(name[0]))
    run.run_to_end()
    ended = [served.request_id for served in run.ended]
    assert ended == [
        "many-0",
        "x-0",
        "y-0",
        "many-1",
        "x-1",
        "many-2",
        "many-3",
        "many-4",
        "many-5",
    ]


def test_a_returning_flow_does_not_starve_waiting_ones() -> None:
    run = worker(max_running=1)
    for n in range(5):
        run.submit(f"many-{n}", prompt_tokens=10, max_tokens=5, service=of("many"))
    crowd = Crowd(run, 1, 10, 5, of("keen"))
    for _ in range(200):
        crowd.ask()
        run.step()
    assert sum(1 for served in run.ended if served.service.flow == "many") == 5


def test_interactive_requests_precede_and_displace_batch_ones() -> None:
    run = worker(max_running=2)
    for n in range(4):
        run.submit(f"batch-{n}", prompt_tokens=50, max_tokens=300, service=of("a", "batch"))
    run.step()
    run.submit("now", prompt_tokens=50, max_tokens=20, service=of("a"))
    run.step()
    assert run.live["now"].runs
    assert run.preempted == ["batch-1"]
    run.run_to_end()
    assert [served.request_id for served in run.ended][:2] == ["now", "batch-0"]


def test_a_batch_request_that_waited_long_is_not_passed_over() -> None:
    ended_at = {}
    for aging_seconds in (1.0, 10**6):
        run = worker(max_running=1, aging_seconds=aging_seconds)
        crowd = Crowd(run, 3, 50, 10, of("a"))
        crowd.ask()
        batch = run.submit("batch", prompt_tokens=50, max_tokens=200, service=of("a", "batch"))
        while sum(run.step_seconds) < 30.0 and not batch.ends:
            crowd.ask()
            run.step()
        ended_at[aging_seconds] = sum(run.step_seconds)
        assert bool(batch.ends) == (aging_seconds == 1.0)
    assert 1.0 < ended_at[1.0] < 10.0


def test_a_queue_filled_by_one_flow_still_accepts_another() -> None:
    run = worker(max_running=1, max_queued=8)
    run.submit("first", prompt_tokens=5, max_tokens=5, service=of("many"))
    run.step()
    for n in range(8):
        run.submit(f"many-{n}", prompt_tokens=5, max_tokens=5, service=of("many"))
    with pytest.raises(QueueFull):
        run.submit("more", prompt_tokens=5, max_tokens=5, service=of("many"))
    for n in range(4):
        run.submit(f"one-{n}", prompt_tokens=5, max_tokens=5, service=of("one"))
    with pytest.raises(QueueFull):
        run.submit("one-4", prompt_tokens=5, max_tokens=5, service=of("one"))
    run.run_to_end()


asked = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(["interactive", "interactive", "batch"]),
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(0, 5),
)


@given(
    requests=st.lists(asked, min_size=2, max_size=25),
    max_running=st.integers(1, 5),
    depth=st.integers(0, 2),
)
@hypothesis_settings(max_examples=25)
def test_no_flow_starves_and_preemptions_end(
    requests: list[tuple[str, Priority, int, int, int]], max_running: int, depth: int
) -> None:
    run = worker(max_running=max_running, depth=depth, budget_tokens=1500)
    levels = 0
    for n, (flow, priority, prompt_tokens, max_tokens, steps) in enumerate(requests):
        run.submit(
            str(n), prompt_tokens=prompt_tokens, max_tokens=max_tokens, service=of(flow, priority)
        )
        levels += max_running
        for _ in range(steps):
            run.step()
    run.run_to_end(most_steps=4000)
    assert all(served.ends == ["length"] for served in run.ended)
    assert len(run.preempted) <= 2 * levels + len(requests), (
        "they push each other out again and again"
    )


@given(
    flows=st.lists(st.sampled_from("abc"), min_size=2, max_size=25), max_running=st.integers(2, 6)
)
@hypothesis_settings(max_examples=25)
def test_with_enough_memory_flows_differ_by_one_running_request(
    flows: list[str], max_running: int
) -> None:
    run = worker(max_running=max_running)
    for n, flow in enumerate(flows):
        run.submit(str(n), prompt_tokens=5, max_tokens=500, service=of(flow))
        run.step()  # one gives way per step
        running = Counter(served.service.flow for served in run.live.values() if served.runs)
        for waiting in {served.service.flow for served in run.live.values() if not served.runs}:
            assert max(running.values()) <= running[waiting] + 1


def test_the_memory_of_past_flows_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.worker.scheduler.queue._MOST_TURNS", 10)
    share = FairShare(aging_seconds=1.0)

    def sequence(flow: str) -> ScheduledSequence:
        return ScheduledSequence(
            request_id=flow,
            order=1,
            prompt_tokens=1,
            max_tokens=1,
            costs=COSTS,
            service=of(flow),
        )

    for flow in "ab":
        share.add_sequence(sequence(flow))
    for number in range(100):
        passing = sequence(str(number))
        share.add_sequence(passing)
        share.forget(passing)
        assert len(share._turn_of_flow) <= 11
    assert {"a", "b"} <= share._turn_of_flow.keys()
