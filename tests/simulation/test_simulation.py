"""The server in simulated worlds: docs/how-it-works/simulation.md."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.actions import Scenario, Trouble, Turn
from tests.simulation.outcomes import Result, Task
from tests.simulation.pool import Worlds
from tests.simulation.sweeps import sweep

LAST_LINE = re.compile(
    r"\d+\.\d hours, \d+ events, (\d+) seeds, (\d+) violations, trace [0-9a-f]{16}"
)
SCENARIO = Scenario(
    order=7,
    actions=(
        Turn(at=0.0, agent="a0", tokens=600, max_tokens=60, seed=7),
        Turn(at=0.1, agent="a1", protocol="responses", reader="breaks"),
        Trouble(at=0.3, kind="worker dies"),
        Turn(at=2.0, agent="a0", protocol="messages", session="s-a0", choices=2),
        Trouble(at=2.2, kind="server dies"),
        Turn(at=6.0, agent="a1", reader="retries", streams=False),
    ),
    options={"kv_tokens": 3000, "ram_tokens": 2000, "has_key": True},
)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1200)  # on a busy machine, the first world alone takes minutes
def test_no_invariant_is_violated_in_twenty_seconds_of_search() -> None:
    ran = command("--seconds", "20", "--first", "0", "--processes", "2", "--shrink", "30")
    found = LAST_LINE.fullmatch(ran.stdout.rstrip().splitlines()[-1])
    assert found is not None, ran.stdout
    assert (found[2], ran.returncode) == ("0", 0), ran.stdout
    assert int(found[1]) >= 1


def test_a_scenario_gives_the_same_trace_in_every_process_and_after_other_worlds(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Scenario(order=1, actions=(Turn(at=0.0, agent="a0", max_tokens=1),))
    worlds.run(Task(scenario=other))
    results = [worlds.run(Task(scenario=SCENARIO))]
    long = tmp_path / ("long-name-" * 5)
    long.mkdir()
    monkeypatch.setenv("PYTHONHASHSEED", "123")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PATH", "/usr/bin:/bin:" + "x" * 3000)  # changes memory addresses
    with Worlds(1, folder=long) as fresh:
        results.append(fresh.run(Task(scenario=SCENARIO)))
    assert results[0].failures == ()
    assert results[0].answers >= 4 and results[0].events > 1000
    assert results[0] == results[1]


def test_a_sweep_fails_one_operation_in_each_run(worlds: Worlds) -> None:
    ran = list(sweep(worlds, "rename", errno.EIO, every=10))
    assert [scenario.options["failing"][1] for scenario, _ in ran] == [1, 11, 21]
    assert [result.failures for _, result in ran] == [(), (), ()]
    assert len({result.trace_hash for _, result in ran}) == 3


def test_another_scheduler_seed_gives_another_trace(worlds: Worlds) -> None:
    scenario = Scenario(order=1, actions=SCENARIO.actions[:2])
    hashes = {
        worlds.run(Task(scenario=replace(scenario, order=order))).trace_hash for order in (1, 2)
    }
    assert len(hashes) == 2


def test_a_failed_assertion_is_a_violation(worlds: Worlds) -> None:
    result = worlds.run(
        Task(scenario=Scenario(order=1, actions=(Trouble(at=0.0, kind="no such thing"),)))
    )
    (failure,) = result.failures
    assert failure.invariant == "assertion" and "no such thing" in failure.what


def test_a_crash_of_the_process_is_a_violation(worlds: Worlds) -> None:
    result = worlds.run(Task(scenario=None))  # type: ignore[arg-type]
    assert [each.invariant for each in result.failures] == ["no crash"]
    after = worlds.run(Task(scenario=Scenario(order=1, actions=())))
    assert isinstance(after, Result) and after.failures == ()


def test_the_story_of_a_seed_can_be_printed() -> None:
    ran = command("--seed", "3", "--story", "--shrink", "0")
    lines = ran.stdout.rstrip().splitlines()
    assert LAST_LINE.fullmatch(lines[-1]) is not None, ran.stdout
    assert any(re.search(r"\d s  a\d+ asks (m|other)", line) for line in lines), ran.stdout
