"""Tests of a small run with a server without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from holdfast_bench.contenders import by_url
from holdfast_bench.null_server import NullServer
from holdfast_bench.registry import SCENARIOS
from holdfast_bench.run import Item, RunPlan, run_benchmarks
from tests.fakes.null_servers import serving


def plan_of(url: str, out: Path, *, resume: bool = False, minutes: float = 1.0) -> RunPlan:
    items = tuple(
        Item(scenario=SCENARIOS[name], contenders=(by_url(url),))
        for name in ("prefill", "overhead")
    )
    return RunPlan(
        items=items,
        out=out,
        scale="quick",
        rounds=1,
        noise_rounds=1,
        resume=resume,
        minutes=minutes,
        settling_seconds=0.005,
    )


async def test_a_run_saves_every_scenario_and_resumes(tmp_path: Path) -> None:
    server, said = NullServer(), list[str]()
    async with serving(server) as url:
        results = await run_benchmarks(plan_of(url, tmp_path), say=said.append)
        asked = len(server.seen)
        again = await run_benchmarks(plan_of(url, tmp_path, resume=True), say=said.append)
    assert [case.scenario for case in results.cases] == [
        "prefill",
        "overhead",
        "overhead",
        "overhead",
    ]
    assert len(server.seen) == asked
    assert again.cases == results.cases
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    assert written == {"results.json", "parts/prefill-served.json", "parts/overhead-served.json"}
    assert results.client["events_per_second"] > 1000
    assert results.machine["cores"] >= 1


async def test_a_missing_peer_is_reported(tmp_path: Path) -> None:
    async with serving(NullServer()) as url:
        plan = plan_of(url, tmp_path)
        item = replace(plan.items[0], not_installed=("llama.cpp",))
        results = await run_benchmarks(replace(plan, items=(item,)), say=lambda line: None)
    assert results.cases[0].notes == ["not measured: llama.cpp is not installed"]


async def test_cases_that_exceed_the_time_are_reported_as_skipped(tmp_path: Path) -> None:
    async with serving(NullServer()) as url:
        results = await run_benchmarks(plan_of(url, tmp_path, minutes=0.0), say=lambda line: None)
    assert all(case.notes == ["left out: no time left"] for case in results.cases)


async def test_an_unknown_model_skips_only_its_scenarios(tmp_path: Path) -> None:
    async with serving(NullServer()) as url:
        plan = plan_of(url, tmp_path)
        items = (replace(plan.items[0], model="nothing"), plan.items[1])
        results = await run_benchmarks(replace(plan, items=items), say=lambda line: None)
    assert "neither a model folder" in results.cases[0].notes[0]
    assert all(case.contenders for case in results.cases[1:])
