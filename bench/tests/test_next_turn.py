"""Tests of the next-turn scenario."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from holdfast_bench.contenders import by_url
from holdfast_bench.models import BenchModel
from holdfast_bench.null_server import NullServer
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, ContenderResult, Sample
from holdfast_bench.scenario import Case, Stage, Trial
from holdfast_bench.scenarios.next_turn import ALLOWED_SECONDS, SCENARIO
from holdfast_bench.servers import ServerStarter
from tests.fakes.null_servers import serving


@pytest.mark.parametrize("is_chat", [False, True])
async def test_each_turn_extends_the_previous_request_in_all_rounds(
    tmp_path: Path, is_chat: bool
) -> None:
    server = NullServer()
    stage = Stage(
        ServerStarter(tmp_path, BenchModel(name="none", folder=tmp_path)), PromptMaker(None)
    )
    case = Case(name="c", settings={"context_tokens": 30, "turns": 2, "is_chat": is_chat})
    assert SCENARIO.prepare is not None
    async with serving(server) as url:
        contender = by_url(url)
        await SCENARIO.prepare(Trial(stage=stage, contender=contender, case=case, seed="s"))
        for seed in ("one", "two"):
            sample = await SCENARIO.measure(
                Trial(stage=stage, contender=contender, case=case, seed=seed)
            )
            assert sample.errors == []
            assert all(1 < new < 10 for new in sample.metrics["new_tokens"])
    asked = [
        " ".join(message["content"] for message in body["messages"]) if is_chat else body["prompt"]
        for body in server.seen[-5:]
    ]
    assert len(asked[0].split()) >= 15
    assert all(later.startswith(earlier + " ") for earlier, later in itertools.pairwise(asked))


@pytest.mark.parametrize(
    ("beyond", "peer", "met"), [(0.001, 1.0, 2), (0.001, 0.1, 1), (2 * ALLOWED_SECONDS, 0.1, 0)]
)
def test_the_report_says_whether_a_claim_is_met(beyond: float, peer: float, met: int) -> None:
    ours = Sample(
        metrics={
            "first_token_seconds": [0.1],
            "beyond_step_seconds": [beyond],
            "context_tokens": [1000.0],
        }
    )
    theirs = Sample(metrics={"first_token_seconds": [peer]})
    contenders = [
        ContenderResult(label="holdfast", rounds=[ours]),
        ContenderResult(label="peer", rounds=[theirs]),
    ]
    case = CaseResult(
        scenario="next-turn",
        case="c",
        model="m",
        settings={"is_chat": False},
        contenders=contenders,
    )
    assert SCENARIO.judge is not None
    lines = SCENARIO.judge(case)
    assert (len(lines), sum(line.endswith(": met") for line in lines)) == (2, met)
