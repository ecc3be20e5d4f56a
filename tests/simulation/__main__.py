"""Runs simulated worlds: `python -m tests.simulation --seconds 60`, or `--seed 7` for one world.

docs/how-it-works/simulation.md explains it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from tests.simulation.actions import Scenario, scenario_of
from tests.simulation.outcomes import MOST_EVENTS, Result, Task
from tests.simulation.pool import Worlds
from tests.simulation.search import Search, Shrinker
from tests.simulation.stories import regression, story

REPORT_SECONDS = 10.0
FIRST_WORLD_SECONDS = 600.0  # a run waits up to this long, so that at least one world counts
MOST_SHRUNK = 5  # failures to shrink, one for each violated invariant


@dataclass
class _Run:
    """A world that was run."""

    name: str
    scenario: Scenario
    result: Result


@dataclass
class _Totals:
    """The results of all worlds so far, by number."""

    runs: dict[int, _Run] = field(default_factory=dict)

    @property
    def states(self) -> int:
        """How many pairs of states have been reached."""
        return len(set[tuple[str, str]]().union(*(run.result.states for run in self.runs.values())))

    @property
    def failed(self) -> list[_Run]:
        return [run for _, run in sorted(self.runs.items()) if run.result.failures]

    @property
    def violations(self) -> int:
        return sum(len(run.result.failures) for run in self.runs.values())

    @property
    def hours(self) -> float:
        return sum(run.result.seconds for run in self.runs.values()) / 3600

    @property
    def events(self) -> int:
        return sum(run.result.events for run in self.runs.values())

    def trace(self) -> str:
        """The hash of one world, or of the hashes of all."""
        hashes = [run.result.trace_hash for _, run in sorted(self.runs.items())]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.blake2b("\n".join(hashes).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return (
            f"{self.hours:.1f} hours, {self.events} events, {len(self.runs)} seeds, "
            f"{self.violations} violations"
        )


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _search(first: int, seconds: float, processes: int, *, only_first: bool) -> _Totals:
    """Run worlds for this long. only_first: stop at the first violation."""
    search, totals = Search(first), _Totals()
    began = time.monotonic()
    reports_at = began + REPORT_SECONDS
    known: dict[int, tuple[Scenario, Result]] = {}
    running: dict[Future[Result | None], tuple[int, str, Scenario]] = {}
    number = 0
    with Worlds(processes) as worlds:
        while True:
            now = time.monotonic()
            is_late = now >= began + seconds
            if is_late and (totals.runs or now > began + seconds + FIRST_WORLD_SECONDS):
                break
            while not is_late and len(running) < processes:
                chosen = search.scenario(number, known)
                if chosen is None:
                    break
                name, scenario = chosen
                running[worlds.submit(Task(scenario=scenario))] = (number, name, scenario)
                number += 1
            left = FIRST_WORLD_SECONDS if is_late else began + seconds - now
            done, _ = wait(running, min(left, REPORT_SECONDS), return_when=FIRST_COMPLETED)
            for future in done:
                place, name, scenario = running.pop(future)
                result = future.result()
                assert result is not None
                totals.runs[place] = _Run(name, scenario, result)
                known[place] = (scenario, result)
                for failure in result.failures:
                    _say(f"{name}: {failure.invariant}: {failure.what.strip().splitlines()[-1]}")
            if time.monotonic() > reports_at:
                reports_at = time.monotonic() + REPORT_SECONDS
                _say(f"{totals}, {totals.states} states")
            if only_first and totals.failed:
                break
        worlds.give_up()
    if running:
        _say(f"{len(running)} worlds were still running and do not count.")
    return totals


def _one(seed: int, *, tells: bool, trace: str) -> _Totals:
    """Run the world of one seed."""
    scenario = scenario_of(seed)
    with Worlds(1) as worlds:
        result = worlds.run(Task(scenario=scenario, trace=trace))
    if tells and not result.failures:
        _say(f"seed {seed}:\n{story(scenario, result)}")
    return _Totals({0: _Run(f"seed {seed}", scenario, result)})


def _tell(totals: _Totals, *, processes: int, seconds: float) -> None:
    """Print one failure for each violated invariant, as a story and as a regression test."""
    told: set[str] = set()
    for run in totals.failed:
        invariant = run.result.failures[0].invariant
        if invariant in told or len(told) >= MOST_SHRUNK:
            continue
        told.add(invariant)
        scenario, result = run.scenario, run.result
        if seconds:
            with Worlds(processes) as worlds:
                found = Shrinker(worlds, scenario, result, seconds=seconds).shrink()
            _say(
                f"\n{run.name}: shrunk from {len(scenario.actions)} to "
                f"{len(found.scenario.actions)} actions in {found.worlds} worlds"
            )
            scenario, result = found.scenario, found.result
        else:
            _say(f"\n{run.name}")
        _say(story(scenario, result))
        _say("\nTo keep it, in tests/simulation/test_regressions.py:\n")
        _say(regression(scenario, result.failures[0], was_in=run.name))
    cut = sum(run.result.events > MOST_EVENTS for run in totals.runs.values())
    if cut:
        _say(f"{cut} worlds were ended after {MOST_EVENTS} events.")


def main() -> int:
    """Return the exit status: 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to search")
    parser.add_argument("--seed", type=int, help="run only the world of this seed")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first world")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first-violation", action="store_true", help="stop at the first one")
    parser.add_argument("--story", action="store_true", help="always print the story of --seed")
    parser.add_argument("--trace", default="", help="write all events of --seed to this file")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS",
                        help="how long to shrink each failure; 0: not at all")  # fmt: skip
    given = parser.parse_args()
    if given.seed is not None:
        totals = _one(
            given.seed, tells=given.story, trace=given.trace and os.path.abspath(given.trace)
        )
    else:
        totals = _search(
            given.first, given.seconds, given.processes, only_first=given.first_violation
        )
    _tell(totals, processes=given.processes, seconds=given.shrink)
    if not totals.runs:
        _say("no world has ended")
        return 1
    _say(f"{totals.states} states")
    _say(f"{totals}, trace {totals.trace()}")
    return int(totals.violations > 0)


if __name__ == "__main__":
    sys.exit(main())
