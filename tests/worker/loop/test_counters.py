from __future__ import annotations

from holdfast.wire.commands import TELL_STATISTICS
from holdfast.wire.events import WorkerStatistics
from holdfast.worker.loop.counters import MOST_RECENT_STEPS, Counters
from tests.fakes.caching_worker import greedy
from tests.fakes.session_worker import prompt, serve, worker


def test_recent_steps_are_reported_with_their_batches() -> None:
    inbox = serve(
        worker(), greedy("1", prompt("first"), max_tokens=6), TELL_STATISTICS, greedy("2", (1, 2))
    )
    statistics = [event for event in inbox.events if isinstance(event, WorkerStatistics)]
    (told,) = [each for each in statistics if each.in_answer]
    steps = told.recent_steps
    assert len(steps) == told.steps
    assert sum(step.prompt_tokens for step in steps) == told.prompt_tokens == 300
    assert sum(step.generated_tokens for step in steps) == told.generated_tokens == 6
    assert {step.sequences for step in steps} == {1}
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    # unrequested figures are sent often, so they are small
    assert all(each.recent_steps == () for each in statistics if not each.in_answer)


def test_only_recent_steps_are_kept() -> None:
    counters = Counters()
    for number in range(MOST_RECENT_STEPS + 5):
        counters.count_step(1.0, sequences=number, prompt_tokens=0, generated_tokens=0)
    assert [step.sequences for step in counters.recent_steps] == list(
        range(5, MOST_RECENT_STEPS + 5)
    )
