"""Paused requests, and requests that wait for memory: they block no other request, and continue
where they stopped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.config import SchedulerSettings
from tests.fakes.step_worker import StepWorker

SETTINGS = SchedulerSettings(
    max_running=2, max_queued=8, step_tokens=16, min_chunk_tokens=2, expected_output_tokens=4
)


def running(worker: StepWorker) -> set[str]:
    return {request_id for request_id, served in worker.live.items() if served.runs}


def planned(worker: StepWorker, *, steps: int) -> set[str]:
    return {span.request_id for _ in range(steps) for span in worker.step().plan.spans}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_paused_sequence_gets_no_span_until_resumed(depth: int) -> None:
    worker = StepWorker(settings=SETTINGS, depth=depth)
    worker.submit("a", prompt_tokens=4, max_tokens=50)
    worker.submit("b", prompt_tokens=4, max_tokens=50)
    worker.read_all_prompts()
    worker.pause("a")
    assert planned(worker, steps=10) == {"b"}
    assert running(worker) == {"a", "b"}
    worker.resume("a")
    assert planned(worker, steps=1) == {"a", "b"}
    worker.run_to_end()


def test_when_all_are_paused_the_plan_is_empty() -> None:
    worker = StepWorker(settings=SETTINGS)
    worker.submit("a", prompt_tokens=4, max_tokens=50)
    worker.step()
    worker.pause("a")
    assert planned(worker, steps=3) == set()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_paused_sequences_give_their_places_to_waiting_ones(depth: int) -> None:
    worker = StepWorker(settings=SETTINGS, depth=depth)
    for name in "ab":
        worker.submit(name, prompt_tokens=4, max_tokens=50)
    worker.read_all_prompts()
    worker.pause("a")
    worker.pause("b")
    worker.submit("c", prompt_tokens=4, max_tokens=5)
    assert "c" in planned(worker, steps=depth + 2)
    assert running(worker) == {"a", "c"}  # only one place was needed
    worker.run_to_end()


def test_a_paused_sequence_gives_up_its_memory_first() -> None:
    worker = StepWorker(settings=SETTINGS, budget_bytes=10 * 112)
    worker.submit("old", prompt_tokens=30, max_tokens=60)
    worker.submit("young", prompt_tokens=30, max_tokens=50)
    worker.read_all_prompts()
    worker.pause("old")
    assert planned(worker, steps=40) == {"young"}
    assert worker.preempted == ["old"]
    worker.run_to_end()


def test_a_request_paused_in_the_queue_lets_others_pass() -> None:
    worker = StepWorker(settings=SETTINGS)
    for name in "abcd":
        worker.submit(name, prompt_tokens=4, max_tokens=5)
    worker.step()
    worker.pause("c")
    worker.scheduler.check_invariants()
    seen = planned(worker, steps=20)
    assert seen == {"a", "b", "d"}
    worker.run_to_end()
    assert [served.request_id for served in worker.ended][-1] == "c"


def test_a_paused_sequence_can_be_cancelled_and_frees_everything() -> None:
    worker = StepWorker(settings=SETTINGS)
    worker.submit("a", prompt_tokens=4, max_tokens=50)
    worker.step()
    worker.pause("a")
    worker.cancel("a")
    assert worker.scheduler.statistics().reserved_bytes == 0
    assert worker.scheduler.statistics().running == 0


def test_pausing_twice_or_an_unknown_request_changes_nothing() -> None:
    worker = StepWorker(settings=SETTINGS)
    worker.submit("a", prompt_tokens=4, max_tokens=50)
    worker.step()
    for _ in range(2):
        worker.pause("a")
        worker.pause("nobody")
    assert planned(worker, steps=1) == set()
    for _ in range(2):
        worker.resume("a")
        worker.resume("nobody")
    assert planned(worker, steps=1) == {"a"}


def test_under_critical_pressure_a_paused_request_lets_another_run() -> None:
    worker = StepWorker(settings=SETTINGS)
    worker.set_critical(True)
    worker.submit("a", prompt_tokens=4, max_tokens=50)
    worker.submit("b", prompt_tokens=4, max_tokens=5)
    assert planned(worker, steps=10) == {"a"}
    worker.pause("a")
    assert planned(worker, steps=10) == {"b"}
    worker.run_to_end()


def test_memory_above_a_reduced_budget_admits_nothing() -> None:
    worker = StepWorker(settings=replace(SETTINGS, max_running=4), budget_bytes=10 * 192)
    for name, answer in (("a", 6), ("b", 20), ("c", 20)):
        worker.submit(name, prompt_tokens=40, max_tokens=answer)
    worker.read_all_prompts()
    worker.set_budget(10 * 48)
    worker.submit("d", prompt_tokens=8, max_tokens=8)
    while "a" in worker.live:
        worker.step()
    assert running(worker) == {"b", "c"}
    assert worker.held_bytes > worker.budget_bytes
    assert "d" not in planned(worker, steps=4)
    worker.set_budget(10 * 192)
    assert "d" in planned(worker, steps=2)
    worker.run_to_end()
