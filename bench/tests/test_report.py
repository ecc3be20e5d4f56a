"""Tests of result files, reports and charts."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.charts import charts_of, histogram, write_charts
from holdfast_bench.machine import _PREFIXES, machine
from holdfast_bench.report import markdown
from holdfast_bench.results import (
    Agreement,
    CaseResult,
    ContenderResult,
    Results,
    Sample,
    read_results,
    write_results,
)

PUBLISHED = Path(__file__).parents[2] / "docs" / "bench"


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


# -- the report


def a_case(ours: list[float], theirs: list[float]) -> CaseResult:
    name = "first_token_seconds @ cold"
    contenders = [
        ContenderResult(label=label, rounds=[Sample(metrics={name: [value]}) for value in values])
        for label, values in (("holdfast", ours), ("peer", theirs))
    ]
    contenders[1].agreement = Agreement(answers=2, equal_answers=1, tokens=8, agreeing_tokens=6)
    noise = {name: [1.05, 0.98]}
    return CaseResult(
        scenario="reuse", case="1000 tokens", model="m", contenders=contenders, noise=noise
    )


def test_the_report_has_medians_ratios_and_agreement() -> None:
    text = markdown(Results(cases=[a_case([1.0, 1.2], [2.0, 2.4])]), pictures=("a.svg",))
    assert (
        "| first token, cold | 1.10 s [1.05 s, 1.15 s] | 2.20 s [2.10 s, 2.30 s] | 0.50 × [0.50, "
        "0.50] better |" in text
    )
    assert "Answers agree with peer: 75.0% of 8 tokens, 1 of 2 answers are equal." in text
    assert "![a.svg](a.svg)" in text


def test_the_report_names_the_blas_and_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_KERNELS", "few_rows")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    facts = {
        **machine(watched_seconds=0.01),
        "matrix_products": {"holdfast": "OpenBLAS 0.3.31 for SkylakeX, 2 threads"},
    }
    lines = markdown(Results(machine=facts)).splitlines()
    assert "- Matrix products: holdfast: OpenBLAS 0.3.31 for SkylakeX, 2 threads" in lines
    variables = "`HOLDFAST_KERNELS=few_rows`, `OPENBLAS_CORETYPE=Haswell`"
    assert f"- Variables for threads, BLAS and kernels: {variables}" in lines


def test_only_differences_beyond_the_noise_get_a_verdict() -> None:
    assert "2.00 × [2.00, 2.00] worse" in markdown(Results(cases=[a_case([2.0, 2.0], [1.0, 1.0])]))
    assert "1.04 × [1.04, 1.04] no difference seen" in markdown(
        Results(cases=[a_case([1.04, 1.04], [1.0, 1.0])])
    )


def test_failures_appear_in_the_report() -> None:
    case = a_case([1.0], [1.0])
    case.contenders[1].rounds.append(Sample(errors=["it fell over"]))
    assert "peer FAILED: it fell over" in markdown(Results(cases=[case]))


# -- charts


@pytest.mark.parametrize("folder", ["growth", "growth-hybrid", "memory", "reuse", "reuse-long"])
def test_published_results_give_the_charts_beside_them(folder: str) -> None:
    published = PUBLISHED / "memory" / folder
    charts = charts_of(read_results(published / "results.json"))
    names = {f"{chart.name}.svg" for chart in charts}
    assert names == {file.name for file in published.glob("*.svg")}
    assert all(points == sorted(points) for chart in charts for points in chart.lines.values())


def test_a_line_connects_the_cases_of_a_model() -> None:
    cases = [
        CaseResult(
            scenario="streams",
            case=f"{streams} equal",
            model=model,
            settings={"streams": streams, "kind": "equal"},
            contenders=[
                ContenderResult(
                    label="holdfast", rounds=[Sample(metrics={"tokens_per_second": [speed]})]
                )
            ],
        )
        for model, streams, speed in (("m", 8, 800.0), ("m", 1, 100.0), ("n", 1, 50.0))
    ]
    charts = charts_of(Results(cases=cases))
    assert [chart.name for chart in charts] == ["streams-equal-m", "streams-equal-n"]
    assert charts[0].lines == {"holdfast": [(1.0, 100.0), (8.0, 800.0)]}


def test_a_histogram_contains_every_value_once() -> None:
    found = histogram([0.001, 0.0011, 0.1])
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert found[0][0] <= 1.0
    assert found[-1][1] == 0.0
    assert histogram([]) == []


def test_charts_are_written_as_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the benchmarks' extra charts")
    charts = charts_of(read_results(PUBLISHED / "memory" / "growth" / "results.json"))
    (name,) = write_charts(charts, tmp_path)
    assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
