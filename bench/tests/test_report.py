"""Tests of the report."""

from __future__ import annotations

import os

import pytest

from holdfast_bench.machine import _PREFIXES, machine
from holdfast_bench.publish import summary
from holdfast_bench.report import markdown
from holdfast_bench.results import Agreement, CaseResult, ContenderResult, Results, Sample


def a_case(ours: list[float], theirs: list[float]) -> CaseResult:
    def contender(label: str, values: list[float]) -> ContenderResult:
        return ContenderResult(
            label=label,
            rounds=[Sample(metrics={"first_token_seconds @ cold": [value]}) for value in values],
        )

    other = contender("peer", theirs)
    other.agreement = Agreement(answers=2, equal_answers=1, tokens=8, agreeing_tokens=6)
    noise = {"first_token_seconds @ cold": [1.05, 0.98]}
    return CaseResult(
        scenario="reuse",
        case="1000 tokens",
        model="m",
        contenders=[contender("holdfast", ours), other],
        noise=noise,
    )


def test_the_report_has_medians_ratios_and_agreement() -> None:
    text = markdown(Results(cases=[a_case([1.0, 1.2], [2.0, 2.4])]), pictures=("a.svg",))
    assert (
        "| first token, cold | 1.10 s [1.05 s, 1.15 s] | 2.20 s [2.10 s, 2.30 s] | 0.50 × [0.50, "
        "0.50] better |" in text
    )
    assert "Answers agree with peer: 75.0% of 8 tokens, 1 of 2 answers are equal." in text
    assert "![a.svg](a.svg)" in text


def test_the_report_names_the_blas_and_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in os.environ:
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_KERNELS", "few_rows")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    facts = {
        **machine(watched_seconds=0.01),
        "matrix_products": {"holdfast": "OpenBLAS 0.3.31 for SkylakeX, 2 threads"},
    }
    results = Results(machine=facts)
    for lines in (markdown(results).splitlines(), list(summary(results))):
        assert "- Matrix products: holdfast: OpenBLAS 0.3.31 for SkylakeX, 2 threads" in lines
        variables = "`HOLDFAST_KERNELS=few_rows`, `OPENBLAS_CORETYPE=Haswell`"
        assert f"- Variables for threads, BLAS and kernels: {variables}" in lines


def test_only_differences_beyond_the_noise_get_a_verdict() -> None:
    assert "2.00 × [2.00, 2.00] worse" in markdown(Results(cases=[a_case([2.0, 2.0], [1.0, 1.0])]))
    assert "1.04 × [1.04, 1.04] no difference seen" in markdown(
        Results(cases=[a_case([1.04, 1.04], [1.0, 1.0])])
    )


def test_failures_appear_in_the_report_and_on_the_terminal() -> None:
    case = a_case([1.0], [1.0])
    case.contenders[1].rounds.append(Sample(errors=["it fell over"]))
    results = Results(cases=[case])
    assert "peer FAILED: it fell over" in markdown(results)
    assert any("peer FAILED: it fell over" in line for line in summary(results))
    assert any("answers agree: peer 75.0%" in line for line in summary(results))
