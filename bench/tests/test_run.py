"""Tests of running cases on several servers, and of real servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast_bench.contenders import AS_INSTALLED, Contender, llama_cpp
from holdfast_bench.models import BenchModel
from holdfast_bench.null_server import NullServer
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.report import publish
from holdfast_bench.results import CaseResult, Results
from holdfast_bench.run import CaseRun, Item, Plan, run_benchmarks
from holdfast_bench.scenario import Case, Stage
from holdfast_bench.servers import ServerStarter
from holdfast_bench.suite import SCENARIOS, items_of
from tests.fakes.null_servers import WrongServer, serving
from tests.fakes.tiny_models import write_tiny

CASE = Case(name="few", settings={"max_tokens": 6, "requests": 2, "streamed": True})
GONE = Contender(label="gone", url="http://127.0.0.1:9")


async def measured(
    folder: Path,
    servers: Sequence[NullServer],
    *others: Contender,
    rounds: int = 2,
    deadline: float = float("inf"),
) -> CaseResult:
    starter = ServerStarter(folder=folder, model=BenchModel(name="none", folder=folder))
    async with contextlib.AsyncExitStack() as running:
        urls = [await running.enter_async_context(serving(server)) for server in servers]
        contenders = [Contender(label=f"server {place}", url=url) for place, url in enumerate(urls)]
        item = Item(
            scenario=SCENARIOS["overhead"],
            model="none",
            contenders=(*contenders, *others),
            cases=(CASE,),
        )
        plan = Plan(items=(item,), out=folder, rounds=rounds, noise_rounds=1, settling_seconds=0.0)
        stage = Stage(starter, PromptMaker(None))
        return await CaseRun(item, CASE, stage, plan, seconds=60.0, deadline=deadline).result()


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


async def test_an_unreachable_server_fails_only_its_own_rounds(tmp_path: Path) -> None:
    result = await measured(tmp_path, [NullServer()], GONE, rounds=1)
    assert result.contenders[0].errors() == []
    assert "cannot be reached" in result.contenders[1].errors()[0]
    assert result.contenders[1].agreement is None


async def test_no_round_starts_after_the_deadline(tmp_path: Path) -> None:
    result = await measured(tmp_path, [NullServer()], deadline=time.perf_counter() - 1)
    assert result.contenders[0].rounds == []
    assert result.notes == ["0 of 2 rounds: no time left"]


# -- whole runs


async def run_of(folder: Path, *models: str, minutes: float = 1.0) -> Results:
    async with serving(NullServer()) as url:
        item = replace(items_of(["prefill"], "quick", peers=["none"])[0], contenders=(GONE,))
        contenders = (Contender(label="null", url=url),)
        items = tuple(replace(item, model=model, contenders=contenders) for model in models)
        plan = Plan(items=items, out=folder, minutes=minutes, rounds=1, settling_seconds=0.005)
        return await run_benchmarks(plan)


async def test_a_run_saves_its_results(tmp_path: Path) -> None:
    results = await run_of(tmp_path, "holdfast-demo")
    assert [case.scenario for case in results.cases] == ["prefill"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert results.client["events_per_second"] > 1000
    assert results.machine["cores"] >= 1


async def test_an_unknown_model_leaves_out_only_its_scenarios(tmp_path: Path) -> None:
    results = await run_of(tmp_path, "nothing", "holdfast-demo")
    assert "neither a model folder" in results.cases[0].notes[0]
    assert results.cases[1].contenders


async def test_cases_beyond_the_time_are_left_out(tmp_path: Path) -> None:
    results = await run_of(tmp_path, "holdfast-demo", minutes=0.0)
    assert results.cases[0].notes == ["left out: no time left"]


def test_a_scenario_has_its_peers_and_models_or_the_wanted_ones() -> None:
    def of(name: str, **options: object) -> Iterator[tuple[str, list[str]]]:
        for item in items_of([name], **options):  # type: ignore[arg-type]
            yield item.model, [each.label for each in item.contenders]

    assert list(of("stall", peers=["none"])) == [(SCENARIOS["stall"].model, ["holdfast"])]
    assert list(of("stall", peers=[AS_INSTALLED] * 2, others=[GONE], model="mine")) == [
        ("mine", ["holdfast", "mlx_lm as installed", "gone"])
    ]
    assert [model for model, _ in of("speculation")] == ["holdfast-demo", "holdfast-demo-120m"]


def test_only_scenarios_about_reuse_have_a_store() -> None:
    speed, memory = (item.contenders[0] for item in items_of(["streams", "reuse"]))
    assert "--store" not in speed.command
    assert memory.command[-2:] == ("--store", "{store}")


@pytest.mark.slow
async def test_llama_cpp_in_float32_gives_equal_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the benchmarks' extra llama-cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exact = replace(llama_cpp(), command=(*llama_cpp().command, "--exact"))
    items = items_of(
        ["streams"], "quick", peers=["none"], others=[exact], model="qwen3-9m", case="equal"
    )
    plan = Plan(items=tuple(items), out=tmp_path / "out", rounds=1, noise_rounds=0)
    results = await run_benchmarks(plan)
    assert len(results.cases) == 2
    for case in results.cases:
        assert [error for each in case.contenders for error in each.errors()] == []
        agreed = case.contenders[1].agreement
        assert agreed is not None
        assert agreed.equal_answers == agreed.answers > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every request has its own limit; on a busy machine, all take longer
async def test_holdfast_and_its_peer_give_equal_answers_and_end(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", "qwen3")
    names = ("overhead", "next-turn", "memory")
    items = items_of(names, "quick", peers=[AS_INSTALLED], model=str(model))
    plan = Plan(items=tuple(items), out=tmp_path / "out", rounds=1, noise_rounds=1, threads=1)
    before = psutil.Process().children(recursive=True)
    results = await run_benchmarks(plan)
    assert [
        error for case in results.cases for each in case.contenders for error in each.errors()
    ] == []
    agreements = [
        case.contenders[1].agreement for case in results.cases if case.scenario == "overhead"
    ]
    assert all(agreed is not None and agreed.rate > 0.99 for agreed in agreements)
    report = publish(results, plan.out).read_text()
    assert report.count("mlx_lm as installed") > 4
    assert "kept" in report
    started = set(psutil.Process().children(recursive=True)) - set(before)
    commands = [" ".join(child.cmdline()) for child in started]
    assert [command for command in commands if "serve" in command] == []
