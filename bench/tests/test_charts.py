from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast_bench.charts import charts_of, histogram, write_charts
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample


def case_of(scenario: str, settings: dict[str, object], metrics: dict[str, float]) -> CaseResult:
    values = {name: [value] for name, value in metrics.items()}
    rounds = [Sample(metrics=values, gaps=[0.01, 0.02])]
    contenders = [ContenderResult(label="holdfast", rounds=rounds)]
    return CaseResult(
        scenario=scenario, case="c", model="m", settings=dict(settings), contenders=contenders
    )


def test_a_line_connects_the_cases_of_a_scenario() -> None:
    cases = [
        case_of("streams", {"streams": n, "kind": "equal"}, {"tokens_per_second": 100.0 * n})
        for n in (8, 1)
    ]
    (chart,) = charts_of(Results(cases=cases))
    assert chart.lines == {"holdfast": [(1.0, 100.0), (8.0, 800.0)]}


def test_retained_memory_starts_at_zero_agents() -> None:
    metrics = {"kept_bytes @ 1 agents": 2.0**20, "kept_bytes @ 4 agents": 3 * 2.0**20}
    (chart,) = charts_of(Results(cases=[case_of("memory", {"common_tokens": 0}, metrics)]))
    assert chart.lines == {"holdfast": [(0.0, 0.0), (1.0, 1.0), (4.0, 3.0)]}


def test_restarts_have_a_chart_with_values() -> None:
    metrics = {"first_token_seconds @ after a restart": 0.25}
    charts = charts_of(Results(cases=[case_of("reuse", {"context_tokens": 1000}, metrics)]))
    chart = next(chart for chart in charts if chart.name == "restart-m")
    assert chart.lines == {"holdfast": [(1000.0, 0.25)]}
    assert chart.shows_values


def test_each_model_has_its_own_charts() -> None:
    cases = [
        case_of("prefill", {"prompt_tokens": 512}, {"first_token_seconds": 1.0}) for _ in range(2)
    ]
    cases[1].model = "n"
    names = [chart.name for chart in charts_of(Results(cases=cases))]
    assert names == ["first-token-m", "first-token-n"]


def test_a_case_without_figures_gets_no_chart() -> None:
    assert charts_of(Results(cases=[CaseResult(scenario="streams", case="c", model="m")])) == []


def test_a_histogram_contains_every_value_once() -> None:
    found = histogram([0.001, 0.0011, 0.1])
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert found[0][0] <= 1.0
    assert found[-1][1] == 0.0
    assert histogram([]) == []


def test_charts_are_written_as_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the benchmarks' extra charts")
    charts = charts_of(Results(cases=[case_of("stall", {}, {})]))
    assert write_charts(charts, tmp_path) == ["gaps-c-m.svg"]
    root = ElementTree.parse(tmp_path / "gaps-c-m.svg").getroot()
    assert root.tag.endswith("svg")
