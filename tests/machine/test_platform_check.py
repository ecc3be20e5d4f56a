"""The parts of the machine check that fail or would take too long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import machine_check
from tools.machine_check import Sizes


def test_a_failing_part_is_reported_and_the_next_one_runs() -> None:
    sizes = Sizes(quick=True)
    sizes.stream_tokens = -1
    ((what, figures),) = machine_check._reporting_errors(machine_check._streams, sizes)
    assert what == "streams"
    assert figures.startswith("failed: ValueError: ")


def test_a_slow_part_is_repeated_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "MOST_SECONDS", 0.1)
    sizes = Sizes(quick=False)
    calls: list[float] = []

    def slow() -> None:
        calls.append(time.perf_counter())
        while time.perf_counter() - calls[0] <= machine_check.MOST_SECONDS:
            continue

    machine_check._least_ms(slow, sizes)
    assert len(calls) == 2


def test_no_part_takes_more_than_a_third_of_the_memory() -> None:
    sizes = Sizes(quick=False)
    largest = max(*sizes.contexts, *(count * sizes.stream_tokens for count in sizes.streams), 0, 0)
    assert 2 * largest * sizes.layers * machine_check._BYTES_PER_TOKEN <= sizes.most_bytes


@pytest.mark.parametrize("error", [TypeError("no such field"), KeyError("x"), MemoryError()])
def test_any_error_of_a_check_is_reported(error: Exception) -> None:
    def _part(sizes: Sizes) -> Iterator[tuple[str, str]]:
        yield "before", "1 ms"
        raise error

    found = list(machine_check._reporting_errors(_part, Sizes(quick=True)))
    assert found[0] == ("before", "1 ms")
    assert found[1][0] == "part"
    assert found[1][1].startswith(f"failed: {type(error).__name__}: ")


def test_the_streams_are_cleared_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(machine_check.mx, "clear_streams", lambda: cleared.append(True))
    monkeypatch.setattr(machine_check, "save", lambda found, file: 1 / 0)
    monkeypatch.setattr("sys.argv", ["machine_check", "--quick"])
    with pytest.raises(ZeroDivisionError):
        machine_check.main()
    assert cleared == [True]


def test_every_measurement_is_printed_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_check.save(machine_check.findings(Sizes(quick=True)), tmp_path / "file")
    rows = [line for line in (tmp_path / "file").read_text().splitlines()[4:] if line]
    assert len(rows) >= 25
    assert not [line for line in rows if "failed:" in line]
    assert all(line.startswith("| ") and line.count(" | ") == 1 for line in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
