"""Tests of choosing contenders, and of real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast_bench.contenders import by_url, holdfast, llama_cpp
from holdfast_bench.publish import publish, summary
from holdfast_bench.registry import SCENARIOS
from holdfast_bench.run import RunPlan, run_benchmarks
from holdfast_bench.suite import AS_INSTALLED, item_for, models_of
from tests.fakes.tiny_models import write_tiny


def test_named_peers_are_used_once_each() -> None:
    alone = item_for(SCENARIOS["stall"], holdfast(), peers=["none"])
    assert [each.label for each in alone.contenders] == ["holdfast"]
    beside = item_for(
        SCENARIOS["stall"],
        holdfast(),
        peers=[AS_INSTALLED, AS_INSTALLED],
        others=[by_url("http://there:1")],
    )
    assert [each.label for each in beside.contenders] == [
        "holdfast",
        "mlx_lm as installed",
        "there:1",
    ]


def test_the_model_of_a_url_stays_unknown() -> None:
    assert (
        item_for(SCENARIOS["stall"], by_url("http://there:1"), peers=["none"]).model_name
        == "served"
    )
    assert (
        item_for(SCENARIOS["stall"], holdfast(), peers=["none"]).model_name
        == SCENARIOS["stall"].model
    )


def test_a_scenario_uses_its_models_or_the_requested_one() -> None:
    scenario = SCENARIOS["peers"]
    assert models_of(scenario, "") == ("llama-95m", "llama-6m")
    assert models_of(scenario, "mine") == ("mine",)
    assert models_of(scenario, "", is_served=True) == ("",)


def test_only_scenarios_about_reuse_have_a_store() -> None:
    speed, memory = (
        item_for(SCENARIOS[name], holdfast(), peers=["none"]).contenders[0]
        for name in ("streams", "reuse")
    )
    assert "--store" not in speed.command
    assert memory.command[-2:] == ("--store", "{store}")


@pytest.mark.slow
async def test_llama_cpp_in_float32_gives_equal_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the benchmarks' extra llama-cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exact = replace(llama_cpp(), command=(*llama_cpp().command, "--exact"))
    item = item_for(
        SCENARIOS["peers"],
        holdfast(),
        peers=["none"],
        others=[exact],
        model="llama-6m",
        case="stream",
    )
    plan = RunPlan(items=(item,), out=tmp_path / "out", scale="quick", rounds=1, noise_rounds=0)
    results = await run_benchmarks(plan, say=lambda line: None)
    assert [len(case.contenders[1].rounds) for case in results.cases] == [1, 1]
    for case in results.cases:
        assert [error for each in case.contenders for error in each.errors()] == []
        agreed = case.contenders[1].agreement
        assert agreed is not None
        assert agreed.equal_answers == agreed.answers > 0


@pytest.mark.slow
async def test_holdfast_and_its_peer_give_equal_answers_and_end(
    tmp_path: Path,
) -> None:
    model = write_tiny(tmp_path / "tiny", "qwen3")
    names = ("overhead", "next-turn", "memory")
    items = tuple(
        item_for(SCENARIOS[name], holdfast(), peers=[AS_INSTALLED], model=str(model))
        for name in names
    )
    plan = RunPlan(
        items=items, out=tmp_path / "out", scale="quick", rounds=1, noise_rounds=1, threads=1
    )
    before = psutil.Process().children(recursive=True)
    results = await run_benchmarks(plan, say=lambda line: None)
    assert [
        error for case in results.cases for each in case.contenders for error in each.errors()
    ] == []
    agreements = [
        case.contenders[1].agreement for case in results.cases if case.scenario == "overhead"
    ]
    assert all(agreed is not None and agreed.rate > 0.99 for agreed in agreements)
    assert any("kept" in line for line in summary(results))
    assert publish(results, plan.out).read_text().count("mlx_lm as installed") > 4
    started = set(psutil.Process().children(recursive=True)) - set(before)
    commands = [" ".join(child.cmdline()) for child in started]
    assert [command for command in commands if "serve" in command] == []
