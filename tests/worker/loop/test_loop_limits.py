"""The limits of a busy worker change, and every stream continues."""

from __future__ import annotations

from holdfast.wire.commands import TELL_STATISTICS, Command, SchedulerLimits
from holdfast.wire.events import WorkerStatistics
from tests.fakes.looped_worker import request, serve


def limits(max_running: int, step_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(max_running=max_running, step_tokens=step_tokens)


def answers_with(*changes: Command) -> dict[str, tuple[int, ...]]:
    """The tokens of eight requests while the limits change after every other step."""
    script: list[list[Command]] = [
        [request(f"r{n}", *range(1, 4 + n), max_tokens=12) for n in range(8)]
    ]
    for change in changes:
        script += [[], [change]]
    inbox = serve(*script)
    return {f"r{n}": tuple(inbox.tokens(f"r{n}")) for n in range(8)}


def test_changing_limits_loses_and_changes_no_stream() -> None:
    undisturbed = answers_with()
    assert all(len(tokens) == 12 for tokens in undisturbed.values())
    assert answers_with(limits(1, 4), limits(8, 64), limits(2, 2)) == undisturbed


def test_the_statistics_show_the_limits_in_force() -> None:
    inbox = serve([limits(7, 33), TELL_STATISTICS])
    told = [
        event for event in inbox.events if isinstance(event, WorkerStatistics) and event.in_answer
    ]
    assert (told[-1].max_running, told[-1].step_tokens) == (7, 33)


def test_invalid_limits_change_nothing() -> None:
    inbox = serve([limits(7, 3), limits(0, 16), TELL_STATISTICS, request("a")])
    told = [
        event for event in inbox.events if isinstance(event, WorkerStatistics) and event.in_answer
    ]
    assert (told[-1].max_running, told[-1].step_tokens) == (4, 16)
