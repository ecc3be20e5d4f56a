"""Tests of a case on several servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast_bench.alternation import Effort, measure_case
from holdfast_bench.contenders import by_url
from holdfast_bench.models import BenchModel
from holdfast_bench.null_server import NullServer
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.registry import SCENARIOS
from holdfast_bench.results import CaseResult
from holdfast_bench.scenario import Case, Stage
from holdfast_bench.servers import ServerStarter
from tests.fakes.null_servers import WrongServer, serving

CASE = Case(name="few", settings={"max_tokens": 6, "requests": 2, "streamed": True})


async def measured(
    folder: Path, servers: Sequence[NullServer], *, rounds: int = 2, deadline: float = float("inf")
) -> CaseResult:
    model = BenchModel(name="none", folder=folder)
    stage = Stage(ServerStarter(folder, model), PromptMaker(None))
    async with contextlib.AsyncExitStack() as running:
        contenders = [
            by_url(await running.enter_async_context(serving(server)), label=f"server {number}")
            for number, server in enumerate(servers)
        ]
        effort = Effort(rounds=rounds, noise_rounds=1, deadline=deadline, settling_seconds=0.0)
        return await measure_case(
            SCENARIOS["overhead"], CASE, contenders, stage, effort=effort, say=lambda line: None
        )


async def test_equal_servers_get_equal_prompts_and_agree(tmp_path: Path) -> None:
    servers = [NullServer(), NullServer()]
    result = await measured(tmp_path, servers)
    one, other = result.contenders
    assert other.agreement is not None
    assert other.agreement.rate == 1.0
    assert (len(one.rounds), len(other.rounds), len(other.pooled("request_seconds"))) == (2, 2, 4)
    assert result.noise.keys() >= {"request_seconds", "tokens_per_second"}
    asked = [[body["messages"] for body in server.seen] for server in servers]
    assert all(messages in asked[0] for messages in asked[1])
    assert one.errors() == other.errors() == []


async def test_a_wrong_answer_lowers_the_agreement(tmp_path: Path) -> None:
    result = await measured(tmp_path, [NullServer(), WrongServer(wrong_from=3)])
    agreed = result.contenders[1].agreement
    assert agreed is not None
    assert agreed.equal_answers == 0
    assert 0.0 < agreed.rate < 1.0
    assert "first answer that differs" in result.contenders[1].notes[0]


async def test_a_slower_server_takes_longer(tmp_path: Path) -> None:
    result = await measured(tmp_path, [NullServer(), NullServer(token_seconds=0.005)], rounds=1)
    fast, slow = (each.pooled("request_seconds") for each in result.contenders)
    assert min(slow) >= 5 * 0.005
    assert min(fast) < min(slow)


async def test_an_unreachable_server_fails_only_its_own_rounds(
    tmp_path: Path,
) -> None:
    stage = Stage(
        ServerStarter(tmp_path, BenchModel(name="none", folder=tmp_path)), PromptMaker(None)
    )
    gone = by_url("http://127.0.0.1:9", label="gone")
    async with serving(NullServer()) as url:
        contenders = [by_url(url, label="there"), gone]
        result = await measure_case(
            SCENARIOS["overhead"],
            CASE,
            contenders,
            stage,
            effort=Effort(rounds=1, noise_rounds=0, settling_seconds=0.0),
            say=lambda line: None,
        )
    assert result.contenders[0].errors() == []
    assert "cannot be reached" in result.contenders[1].errors()[0]
    assert result.contenders[1].agreement is None


async def test_no_round_starts_after_the_deadline(tmp_path: Path) -> None:
    result = await measured(tmp_path, [NullServer()], deadline=time.perf_counter() - 1)
    assert result.contenders[0].rounds == []
    assert result.notes == ["0 of 2 rounds: no time left"]
