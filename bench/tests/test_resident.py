"""Agents that are alive: what is said of the figures."""

from __future__ import annotations

import pytest

from holdfast_bench.results import CaseResult, ContenderResult, Sample
from holdfast_bench.scenarios.resident import SCENARIO


@pytest.mark.parametrize(
    ("common", "disk", "not_met"), [(0, 2.0, 0), (4000, 2.0, 1), (4000, 1.1, 0)]
)
def test_bytes_on_disk_count_where_agents_share_a_prefix(
    common: int, disk: float, not_met: int
) -> None:
    names = ("ram_over_states", "peak_ram_over_states", "grown_over_states")
    sample = Sample(
        metrics={
            **{name: [1.05] for name in names},
            "peak_grown_over_states": [3.0],
            "disk_over_states": [disk],
        }
    )
    contenders = [ContenderResult(label="holdfast", rounds=[sample])]
    case = CaseResult(
        scenario="resident",
        case="c",
        model="m",
        settings={"common_tokens": common},
        contenders=contenders,
    )
    assert SCENARIO.judge is not None
    assert sum("NOT MET" in line for line in SCENARIO.judge(case)) == not_met
