"""Which pictures results give."""

from __future__ import annotations

from holdfast_bench.charts import charts_of
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample


def case_of(scenario: str, settings: dict[str, object], **metrics: float) -> CaseResult:
    named = {
        name.replace("__", " @ ").replace("_agents", " agents"): [value]
        for name, value in metrics.items()
    }
    contender = ContenderResult(label="holdfast", rounds=[Sample(metrics=named, gaps=[0.01, 0.02])])
    return CaseResult(
        scenario=scenario, case="c", model="m", settings=dict(settings), contenders=[contender]
    )


def test_a_line_goes_over_the_cases_of_a_scenario() -> None:
    cases = [
        case_of("streams", {"streams": n, "kind": "equal"}, tokens_per_second=100.0 * n)
        for n in (8, 1)
    ]
    (chart,) = charts_of(Results(cases=cases))
    assert chart.lines[0].points == ((1.0, 100.0), (8.0, 800.0))


def test_memory_grows_from_nothing_with_every_agent() -> None:
    case = case_of(
        "memory",
        {"common_tokens": 0},
        kept_bytes__1_agents=2.0**20,
        kept_bytes__4_agents=3 * 2.0**20,
    )
    (chart,) = charts_of(Results(cases=[case]))
    assert chart.lines[0].points == ((0.0, 0.0), (1.0, 1.0), (4.0, 3.0))


def test_what_comes_after_a_restart_has_a_picture_of_its_own() -> None:
    case = case_of("reuse", {"context_tokens": 1000})
    case.contenders[0].rounds[0].metrics.update({"first_token_seconds @ after a restart": [0.25]})
    chart = next(chart for chart in charts_of(Results(cases=[case])) if chart.name == "restart-m")
    assert (chart.lines[0].points, chart.names_values) == (((1000.0, 0.25),), True)


def test_models_have_pictures_of_their_own_and_what_has_no_figures_has_none() -> None:
    one, other = (
        case_of("prefill", {"prompt_tokens": 512}, first_token_seconds=1.0) for _ in range(2)
    )
    other.model = "n"
    assert [chart.name for chart in charts_of(Results(cases=[one, other]))] == [
        "first-token-m",
        "first-token-n",
    ]
    assert charts_of(Results(cases=[CaseResult(scenario="streams", case="c", model="m")])) == []
