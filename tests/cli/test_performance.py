"""The output of `holdfast performance`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.performance import Range, performance, seconds_text
from holdfast.front.telemetry.history import RANGES, Cell, PerformanceHistory
from tests.fakes.command_line import holdfast_here


class Server:
    """Answers like a server with this history."""

    def __init__(self, history: PerformanceHistory) -> None:
        self._history = history

    def call(self, method: str, path: str, params: dict[str, Any]) -> Any:
        assert (method, path) == ("GET", "/admin/performance")
        report = self._history.report(params["range"], model=params.get("model"))
        return json.loads(msgspec.json.encode(report))


def history(*models: str) -> PerformanceHistory:
    made = PerformanceHistory()
    for model in models:
        cell = Cell(answers=1, prompt_tokens=2000, cached_tokens=1500, generated_tokens=80)
        cell.drafted_tokens, cell.accepted_tokens = 40, 10
        cell.add_duration("queue", 0.02)
        cell.add_duration("first_token", 1.5)
        cell.speed.add(42.0)
        made.add(model, cell)
    return made


def printed(made: PerformanceHistory, capsys: pytest.CaptureFixture[str], **given: Any) -> str:
    performance.__wrapped__(Server(made), **given)  # type: ignore[attr-defined]
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_totals_and_phases_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(printed(history("m"), capsys))
    assert ["generated", "tokens", "80"] in found
    assert ["from", "the", "cache", "75", "%"] in found
    assert ["drafts", "accepted", "25", "%"] in found
    (queue,) = [row for row in found if row[:1] == ["queue"]]
    assert queue[-3:] == ["20", "ms", "1"]
    assert not any(row[:1] == ["load"] for row in found)


def test_several_models_are_compared_over_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = history("a", "b")
    text = printed(made, capsys)
    assert {row[0] for row in rows(text) if row} >= {"a", "b"}
    assert "time" not in text
    assert "time" in printed(made, capsys, over_time=True)
    assert "b" not in {row[0] for row in rows(printed(made, capsys, model="a")) if row}


def test_without_answers_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(history(), capsys, time_range=Range.QUARTER)
    assert text == "no answers in the last 15 minutes; try --range 7d\n"
    text = printed(history(), capsys, time_range=Range.WEEK)
    assert text == "no answers in the last 7 days\n"


def test_ranges_are_the_servers_in_any_case(tmp_path: Path) -> None:
    assert [each.value for each in Range] == list(RANGES)
    refused = holdfast_here("performance", "--range", "2H", cwd=tmp_path)
    assert refused.returncode == 2
    assert "'2H' is not one of '15m', '1h', '6h', '24h', '7d'" in refused.stderr


def test_programs_get_the_answer_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(history("m"), capsys, as_json=True))["total"]["answers"] == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0005, "0.5 ms"), (0.0182, "18.2 ms"), (1.534, "1.53 s"), (1500.0, "1,500 s")],
)
def test_durations_have_three_digits(seconds: float, words: str) -> None:
    assert seconds_text(seconds) == words
