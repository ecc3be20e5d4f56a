"""Tests of the scenarios with a server without a model."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from holdfast_bench.charts import charts_of
from holdfast_bench.contenders import Contender
from holdfast_bench.metrics import METRICS
from holdfast_bench.models import BenchModel
from holdfast_bench.null_server import NullServer
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.report import markdown
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample
from holdfast_bench.scenario import Case, Stage, Trial
from holdfast_bench.scenarios import next_turn
from holdfast_bench.servers import ServerStarter
from holdfast_bench.suite import SCENARIOS
from tests.fakes.null_servers import serving

SMALL = {
    "overhead": {"max_tokens": 3, "requests": 2, "streamed": True},
    "prefill": {"prompt_tokens": 20},
    "streams": {"streams": 3, "kind": "ragged", "prompt_tokens": [5, 9, 30], "max_tokens": 4},
    "stall": {"prompts": [40, 40]},
    "reuse": {"context_tokens": 40, "push_out": False},
    "agents": {"agents": 3, "turns": 2, "system_tokens": 30},
    "next-turn": {"context_tokens": 40, "turns": 2, "is_chat": False},
    "saving": {"contexts": 2, "context_tokens": 30, "max_tokens": 4},
}
CHARTS = {"prefill": 1, "streams": 1, "stall": 1, "reuse": 2, "next-turn": 1}


async def samples_of(
    name: str, folder: Path, server: NullServer, settings: dict[str, object], *, rounds: int = 1
) -> list[Sample]:
    starter = ServerStarter(folder=folder, model=BenchModel(name="none", folder=folder))
    case, scenario = Case(name="small", settings=settings), SCENARIOS[name]
    async with serving(server) as url:
        stage, contender = Stage(starter, PromptMaker(None)), Contender(label="null", url=url)
        trials = [
            Trial(stage=stage, contender=contender, case=case, seed=f"{number}")
            for number in range(rounds)
        ]
        if scenario.prepare is not None:
            await scenario.prepare(trials[0])
        return [await scenario.measure(trial) for trial in trials]


@pytest.mark.parametrize("name", SMALL)
async def test_a_scenario_produces_known_metrics_and_charts(name: str, tmp_path: Path) -> None:
    server = NullServer(token_seconds=0.0005, prompt_token_seconds=0.0001)
    (sample,) = await samples_of(name, tmp_path, server, SMALL[name])
    assert sample.errors == []
    assert sample.metrics
    assert all(metric.split(" @ ")[0] in METRICS for metric in sample.metrics)
    assert all(value >= 0 for values in sample.metrics.values() for value in values)
    each = ContenderResult(label="null", rounds=[sample])
    case = CaseResult(
        scenario=name, case="small", model="none", settings=dict(SMALL[name]), contenders=[each]
    )
    results = Results(cases=[case])
    assert f"## {name}" in markdown(results)
    assert len(charts_of(results)) == CHARTS.get(name, 0)


async def test_gaps_during_prefill_are_separate_from_idle_gaps(tmp_path: Path) -> None:
    class Stalling(NullServer):
        """Stops all streams during prefill, like a server without chunked prefill."""

        async def _generate(self, writer, body):  # type: ignore[no-untyped-def]
            if len(body["messages"][0]["content"].split()) > 200:
                time.sleep(0.05)
            await super()._generate(writer, body)

    server = Stalling(token_seconds=0.001)
    (sample,) = await samples_of("stall", tmp_path, server, {"prompts": [400]})
    assert sample.errors == []
    stalled, idle = (
        sample.metrics[name][0] for name in ("stalled_gap_max_seconds", "idle_gap_seconds")
    )
    assert stalled >= 0.05 > idle


async def test_agents_send_their_history_after_a_common_system_prompt(tmp_path: Path) -> None:
    server = NullServer()
    await samples_of("agents", tmp_path, server, SMALL["agents"])
    histories = [
        body["messages"] for body in server.seen if body["messages"][0]["role"] == "system"
    ]
    assert len({messages[0]["content"] for messages in histories}) == 1
    longest = max(histories, key=len)
    roles = [message["role"] for message in longest]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "Tools:" in longest[0]["content"]
    assert longest[3]["content"].startswith("Tool result: ")


async def test_a_changed_context_keeps_the_requested_prefix(tmp_path: Path) -> None:
    server = NullServer()
    await samples_of("reuse", tmp_path, server, SMALL["reuse"])
    texts = [body["messages"][0]["content"] for body in server.seen]
    cold, repeat, extended, ninety, fifty, again = [text for text in texts if text != "Hello"]
    assert cold == repeat == extended == again
    for changed, share in ((ninety, 0.9), (fifty, 0.5)):
        pairs = enumerate(zip(cold, changed, strict=False))
        same = next(place for place, (one, other) in pairs if one != other)
        assert share - 0.15 < same / len(cold) <= share + 0.05


@pytest.mark.parametrize("is_chat", [False, True])
async def test_each_turn_extends_the_previous_request_in_all_rounds(
    tmp_path: Path, is_chat: bool
) -> None:
    server, settings = NullServer(), {"context_tokens": 30, "turns": 2, "is_chat": is_chat}
    samples = await samples_of("next-turn", tmp_path, server, settings, rounds=2)
    assert [sample.errors for sample in samples] == [[], []]
    assert all(1 < new < 10 for sample in samples for new in sample.metrics["new_tokens"])
    asked = [
        " ".join(message["content"] for message in body["messages"]) if is_chat else body["prompt"]
        for body in server.seen[-5:]
    ]
    assert len(asked[0].split()) >= 15
    assert all(later.startswith(earlier + " ") for earlier, later in itertools.pairwise(asked))


@pytest.mark.parametrize(
    ("beyond", "peer", "met"),
    [(0.001, 1.0, 2), (0.001, 0.1, 1), (2 * next_turn.ALLOWED_SECONDS, 0.1, 0)],
)
def test_the_report_says_whether_a_claim_is_met(beyond: float, peer: float, met: int) -> None:
    ours = {"first_token_seconds": 0.1, "beyond_step_seconds": beyond, "context_tokens": 1000.0}
    contenders = [
        ContenderResult(
            label=label,
            rounds=[Sample(metrics={name: [value] for name, value in metrics.items()})],
        )
        for label, metrics in (("holdfast", ours), ("peer", {"first_token_seconds": peer}))
    ]
    case = CaseResult(
        scenario="next-turn",
        case="c",
        model="m",
        settings={"is_chat": False},
        contenders=contenders,
    )
    assert next_turn.SCENARIO.judge is not None
    lines = next_turn.SCENARIO.judge(case)
    assert (len(lines), sum(line.endswith(": met") for line in lines)) == (2, met)


def test_larger_scales_do_not_have_fewer_cases() -> None:
    for scenario in SCENARIOS.values():
        quick, normal, full = (
            [case.name for case in scenario.cases(scale)] for scale in ("quick", "normal", "full")
        )
        assert 0 < len(quick) <= len(normal) <= len(full)
        assert len(set(full)) == len(full)
