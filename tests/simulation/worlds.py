"""The process that runs simulated worlds: it reads tasks from standard input and writes results.

Its threads, clocks and sockets are simulated. `Worlds` in `pool.py` starts it, as
`python -m tests.simulation.worlds`. Each world runs in a fork, so it is not affected by the caches,
counters and leaks of earlier ones, and a crash ends only one world. Where a fork cannot use the
device (macOS), the process exits after one world.
"""

from __future__ import annotations

from tests.simulation import links, threads

threads.install()  # before other modules import Python's threads and clocks
links.install()

from tests.simulation import disk_calls  # noqa: E402

disk_calls.install()

import gc  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from types import FrameType  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402

from holdfast.front.structured import grammar_check  # noqa: E402
from tests.simulation import front, vision, watching, worker  # noqa: E402

front.install()
vision.install()
watching.install()
worker.install()

from tests.simulation.device import grammar_tokenizer, plain_tokens  # noqa: E402
from tests.simulation.outcomes import BEGAN, FORKS, Failure, Result, Task  # noqa: E402
from tests.simulation.simulation import run  # noqa: E402
from tests.simulation.world import World, world_or_none  # noqa: E402

CORES = 8  # of the simulated machine, for the size of executors
PROCESSOR_SECONDS = 40.0  # between two events, at most


class NoProgress(BaseException):
    """The code under test is in an endless loop, in which no virtual time passes."""


class _Watch:
    """Interrupts a world that uses processor time without any event."""

    def __init__(self) -> None:
        self.world: World | None = None
        self._events = -1
        signal.signal(signal.SIGVTALRM, self._look)
        signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_SECONDS, PROCESSOR_SECONDS)

    def _look(self, number: int, frame: FrameType | None) -> None:
        found = world_or_none()
        if found is None:
            return
        if found is self.world and found.events == self._events:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            raise NoProgress("".join(traceback.format_stack(frame)[-8:]))
        self.world, self._events = found, found.events


def _result(task: Task) -> Result:
    mx.set_default_device(mx.Device(mx.cpu))
    os.cpu_count = lambda: CORES
    if sys.version_info >= (3, 13):
        os.process_cpu_count = os.cpu_count
    watch = _Watch()
    if task.trace:
        _write_trace(task.trace)
    try:
        outcome = run(task.scenario, most_events=task.most_events)
    except NoProgress as stuck:
        found = watch.world
        assert found is not None
        return Result(
            failures=(Failure("progress", f"computes without end:\n{stuck}", at=found.now),),
            seconds=found.now - BEGAN,
            events=found.events,
            story=tuple(found.story),
            trace_hash=found.trace_hash,
        )
    return Result(
        failures=tuple(
            Failure(each.invariant, each.what, at=each.at) for each in outcome.violations
        ),
        seconds=outcome.seconds,
        events=outcome.events,
        states=frozenset(outcome.states),
        story=tuple(outcome.story),
        trace_hash=outcome.trace_hash,
        answers=outcome.answers,
        counts=outcome.counts,
    )


def _write_trace(path: str) -> None:
    """Write the trace to a file, to see where two runs differ."""
    file = open(path, "w", buffering=1)  # noqa: SIM115 (until the process ends)
    note = World.note

    def noted(self: World, *words: Any) -> None:
        note(self, *words)
        file.write(f"{self.now:.6f} {' '.join(map(str, words))}\n")

    World.note = noted  # type: ignore[method-assign]


def _send(result: Result, descriptor: int) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        pickle.dump(result, file)


def serve(results: int) -> None:
    """Run tasks until standard input ends. results: the descriptor to write to."""
    plain_tokens()  # cached once for all worlds
    grammar_tokenizer()
    for limit_factor in (1, 6):
        grammar_check._trial_tools(limit_factor)
    while True:
        try:
            task: Task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        gc.collect()
        gc.freeze()  # so that the next collection happens at the same event in every run
        child = os.fork() if FORKS else 0
        if not child:
            _send(_result(task), results)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            _send(Result(failures=(Failure("no crash", f"ended with {code}", at=BEGAN),)), results)


if __name__ == "__main__":
    given = os.dup(1)
    os.dup2(2, 1)  # anything that is printed goes to standard error
    serve(given)
    os._exit(0)
