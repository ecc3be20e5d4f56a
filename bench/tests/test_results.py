"""Tests of result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.results import (
    CaseResult,
    ContenderResult,
    Results,
    Sample,
    read_results,
    write_results,
)


def test_results_survive_writing_and_reading(tmp_path: Path) -> None:
    rounds = [Sample(metrics={"request_seconds": [0.5, 0.25]}, gaps=[0.1])]
    case = CaseResult(
        scenario="overhead",
        case="c",
        model="m",
        contenders=[ContenderResult(label="a", rounds=rounds)],
    )
    results = Results(cases=[case], machine={"cores": 4})
    file = tmp_path / "deeper" / "results.json"
    write_results(results, file)
    assert read_results(file) == results
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "holdfast-bench/0"}', '{"cases": 3}'])
def test_other_files_are_rejected_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(HoldfastError, match=r"results\.json"):
        read_results(file)
    with pytest.raises(HoldfastError, match="cannot be read"):
        read_results(tmp_path / "none.json")
