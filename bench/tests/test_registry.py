"""Tests of every scenario with a server without a model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.charts import charts_of
from holdfast_bench.contenders import by_url
from holdfast_bench.metrics import METRICS
from holdfast_bench.models import SHAPES, BenchModel
from holdfast_bench.null_server import NullServer
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.registry import SCENARIOS, scenarios_of
from holdfast_bench.report import markdown
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample
from holdfast_bench.scenario import Case, Stage, Trial
from holdfast_bench.scenarios import agents, peers, prefill, reuse, stall, streams
from holdfast_bench.servers import ServerStarter
from tests.fakes.null_servers import serving

SMALL = {
    "overhead": {"max_tokens": 3, "requests": 2, "streamed": True},
    "prefill": {"prompt_tokens": 20},
    "streams": {"streams": 3, "kind": "ragged", "prompt_tokens": [5, 9, 30], "max_tokens": 4},
    "stall": {"prompts": [40, 40]},
    "reuse": {"context_tokens": 40, "push_out": False},
    "agents": {"agents": 3, "turns": 2, "system_tokens": 30},
    "next-turn": {"context_tokens": 40, "turns": 2, "is_chat": False},
    "peers": {"as_in": "overhead", "max_tokens": 3, "requests": 2, "streamed": False},
}


async def sample_of(name: str, folder: Path, server: NullServer) -> Sample:
    stage = Stage(ServerStarter(folder, BenchModel(name="none", folder=folder)), PromptMaker(None))
    async with serving(server) as url:
        case = Case(name="small", settings=SMALL[name])
        trial = Trial(stage=stage, contender=by_url(url), case=case, seed="s")
        if (prepare := SCENARIOS[name].prepare) is not None:
            await prepare(trial)
        return await SCENARIOS[name].measure(trial)


@pytest.mark.parametrize("name", SMALL)
async def test_a_scenario_produces_known_metrics_and_charts(name: str, tmp_path: Path) -> None:
    sample = await sample_of(
        name,
        tmp_path,
        NullServer(token_seconds=0.0005, prompt_token_seconds=0.0001),
    )
    assert sample.errors == []
    assert sample.answers
    assert all(metric.split(" @ ")[0] in METRICS for metric in sample.metrics)
    assert all(value >= 0 for values in sample.metrics.values() for value in values)
    each = ContenderResult(label="null", rounds=[sample])
    case = CaseResult(
        scenario=name, case="small", model="none", settings=dict(SMALL[name]), contenders=[each]
    )
    results = Results(cases=[case])
    assert f"## {name}" in markdown(results)
    assert len(charts_of(results)) == (
        1 if name in ("prefill", "streams", "stall", "reuse", "next-turn") else 0
    )


async def test_gaps_during_prefill_are_separate_from_idle_gaps(
    tmp_path: Path,
) -> None:
    class Stalling(NullServer):
        """Stops all streams during prefill, like a server without chunked prefill."""

        async def _generate(self, writer, body):  # type: ignore[no-untyped-def]
            if len(body["messages"][0]["content"].split()) > 200:
                time.sleep(0.05)
            await super()._generate(writer, body)

    case = {"prompts": [400]}
    stage = Stage(
        ServerStarter(tmp_path, BenchModel(name="none", folder=tmp_path)), PromptMaker(None)
    )
    async with serving(Stalling(token_seconds=0.001)) as url:
        trial = Trial(
            stage=stage, contender=by_url(url), case=Case(name="c", settings=case), seed="s"
        )
        sample = await stall.SCENARIO.measure(trial)
    assert sample.errors == []
    assert (
        sample.metrics["stalled_gap_max_seconds"][0] >= 0.05 > sample.metrics["idle_gap_seconds"][0]
    )


async def test_agents_send_their_history_after_a_common_system_prompt(tmp_path: Path) -> None:
    server = NullServer()
    await sample_of("agents", tmp_path, server)
    histories = [body["messages"] for body in server.seen]
    assert (
        len({messages[0]["content"] for messages in histories if messages[0]["role"] == "system"})
        == 1
    )
    longest = max(histories, key=len)
    assert [message["role"] for message in longest] == [
        "system",
        *["user", "assistant"] * 2,
        "user",
    ]
    assert "Tools:" in longest[0]["content"]
    assert longest[3]["content"].startswith("Tool result: ")


async def test_a_changed_context_keeps_the_requested_prefix(tmp_path: Path) -> None:
    server = NullServer()
    await sample_of("reuse", tmp_path, server)
    texts = [
        body["messages"][0]["content"]
        for body in server.seen
        if body["messages"][0]["content"] != "Hello"
    ]
    cold, repeat, extended, ninety, fifty = texts
    assert cold == repeat == extended
    for changed, share in ((ninety, 0.9), (fifty, 0.5)):
        same = next(
            place for place, (a, b) in enumerate(zip(cold, changed, strict=False)) if a != b
        )
        assert share - 0.15 < same / len(cold) <= share + 0.05


def test_larger_scales_do_not_have_fewer_cases() -> None:
    for scenario in SCENARIOS.values():
        quick, normal, full = (
            [case.name for case in scenario.cases(scale)] for scale in ("quick", "normal", "full")
        )
        assert 0 < len(quick) <= len(normal) <= len(full)
        assert len(set(full)) == len(full)
    assert {
        module.SCENARIO.name for module in (agents, prefill, reuse, stall, streams)
    } <= SCENARIOS.keys()


def test_peers_repeats_the_cases_of_other_scenarios() -> None:
    for scenario in (peers.SCENARIO, peers.FOUR_BIT_SCENARIO):
        cases = scenario.cases("normal")
        assert [case.settings["as_in"] for case in cases] == [
            "overhead",
            "streams",
            "streams",
            "prefill",
            "memory",
        ]
        assert cases[2].settings["prompt_tokens"] == streams.ragged_tokens(8)
        assert all(
            SHAPES[model.removesuffix("-4bit")].model_type == "llama"
            for model in (scenario.model, *scenario.more_models)
        )


def test_scenarios_are_chosen_by_name() -> None:
    assert [scenario.name for scenario in scenarios_of(["stall", "start"])] == ["stall", "start"]
    everything = scenarios_of(["all"])
    assert [each for each in SCENARIOS if SCENARIOS[each] not in everything] == [
        "peers",
        "peers-4bit",
    ]
    with pytest.raises(HoldfastError, match="unknown scenario 'nothing'"):
        scenarios_of(["nothing"])
