"""Tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample, write_results


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


def a_file(folder: Path, name: str, seconds: float) -> str:
    rounds = [Sample(metrics={"step_seconds": [seconds * factor]}) for factor in (1.0, 1.01, 0.99)]
    case = CaseResult(
        scenario="engine",
        case="1 streams",
        model="m",
        contenders=[ContenderResult(label="engine", rounds=rounds)],
    )
    write_results(Results(kind="engine", cases=[case]), folder / name)
    return str(folder / name)


def test_scenarios_and_models_are_listed() -> None:
    code, text = run("list")
    assert code == 0
    assert all(
        word in text for word in ("overhead", "reuse", "qwen3-120m", "holdfast-demo-endless")
    )


def test_compare_exits_with_1_if_something_got_worse(
    tmp_path: Path,
) -> None:
    fast, slow = a_file(tmp_path, "fast.json", 1.0), a_file(tmp_path, "slow.json", 1.5)
    code, text = run("compare", fast, slow)
    assert code == 1
    assert "WORSE" in text
    assert run("compare", slow, fast)[0] == 0
    assert run("compare", fast, fast)[0] == 0


def test_a_report_can_be_written_again_from_its_results(tmp_path: Path) -> None:
    code, text = run(
        "report", a_file(tmp_path, "results.json", 1.0), "--out", str(tmp_path / "new")
    )
    assert code == 0
    assert (tmp_path / "new" / "report.md").read_text().startswith("# Benchmark report")
    assert "report.md" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "nothing"], "unknown scenario 'nothing'"),
        (["run", "overhead", "--peer", "nobody"], "unknown peer 'nobody'"),
        (["run", "overhead", "--peer-command", "serve"], "must contain {port}"),
        (["compare", "none.json", "none.json"], "cannot be read"),
        (["report", "none.json"], "cannot be read"),
        (["engine", "--streams", "many"], "--streams"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_2(arguments: list[str], complaint: str) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert complaint in text
    assert "Traceback" not in text
