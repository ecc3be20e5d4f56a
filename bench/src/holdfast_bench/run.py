"""Runs scenarios one after the other within a time limit, and saves each case when it ends."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast_bench.alternation import Effort, measure_case
from holdfast_bench.contenders import Contender, products_of
from holdfast_bench.floor import client_floor
from holdfast_bench.machine import commit, holdfast_version, machine, now
from holdfast_bench.models import BenchModel, ensure_model
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, Results, read_results, write_results
from holdfast_bench.scenario import Case, Scale, Scenario, Stage
from holdfast_bench.servers import ServerStarter

RESULTS_FILE = "results.json"
PARTS_FOLDER = "parts"  # one file per scenario, for --resume
UNKNOWN_MODEL = "served"  # the model of a server at a URL; its tokenizer is unknown
_GENEROSITY = 1.6  # a case may exceed its share of the remaining time, since most take less


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A scenario with its model and contenders."""

    scenario: Scenario
    contenders: tuple[Contender, ...]  # others are compared with the first one
    model: str = ""  # "": that of the scenario
    only: str = ""  # part of the names of the cases to run
    not_installed: tuple[str, ...] = ()  # peers of the scenario that are missing

    def cases(self, scale: Scale) -> list[Case]:
        """The cases to run at this scale."""
        return [case for case in self.scenario.cases(scale) if self.only in case.name]

    @property
    def model_name(self) -> str:
        """The model to start servers on; unknown if none is started."""
        needed = any(contender.is_ours_to_start for contender in self.contenders)
        return self.model or (self.scenario.model if needed else UNKNOWN_MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What to run, and how long it may take."""

    items: tuple[Item, ...]
    out: Path
    scale: Scale = "normal"
    minutes: float = 60.0
    case_seconds: float = 180.0
    rounds: int = 0
    noise_rounds: int = 2
    threads: int = 0
    request_seconds: float = 300.0  # a longer request counts as failed
    resume: bool = False
    command: str = ""
    # between measurements; ten times as long to measure the machine's load
    settling_seconds: float = 0.1


async def run_benchmarks(plan: RunPlan, *, say: Callable[[str], None]) -> Results:
    """Run everything and write the result files."""
    plan.out.mkdir(parents=True, exist_ok=True)
    results = Results(
        made_at=now(),
        version=holdfast_version(),
        commit=commit(),
        command=plan.command,
        machine=machine(watched_seconds=10 * plan.settling_seconds),
    )
    labels = {contender.label for item in plan.items for contender in item.contenders}
    results.machine["matrix_products"] = products_of(labels)
    clock = _Budget(plan)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        stages = _Stages(Path(folder), threads=plan.threads, request_seconds=plan.request_seconds)
        results.client = await client_floor(
            stages.starter(BenchModel(name="null", folder=Path(folder)))
        )
        with contextlib.closing(stages):
            for item in plan.items:
                async for case in _run_item(item, plan, stages, clock, say):
                    results.cases.append(case)
                    write_results(results, plan.out / RESULTS_FILE)
    return results


async def _run_item(
    item: Item, plan: RunPlan, stages: _Stages, clock: _Budget, say: Callable[[str], None]
) -> AsyncIterator[CaseResult]:
    model_name = item.model_name
    cases = item.cases(plan.scale)
    file = plan.out / PARTS_FOLDER / f"{item.scenario.name}-{Path(model_name).name}.json"
    if plan.resume and file.exists():
        clock.skip(len(cases))
        say(f"{item.scenario.name}: taken from {file.name}")
        for case_result in read_results(file).cases:
            yield case_result
        return
    try:
        stage, model = stages.stage(model_name)
    except HoldfastError as error:
        # other scenarios may have a model that is available
        clock.skip(len(cases))
        say(f"{item.scenario.name}: left out, {error}")
        for case in cases:
            yield _left_out(item, case, f"left out: {error}")
        return
    done = []
    for case in cases:
        done.append(await _run_case(item, case, plan, stage, clock, say))
        done[-1].model = model.name
        done[-1].notes += [f"not measured: {peer} is not installed" for peer in item.not_installed]
        yield done[-1]
    part = Results(
        made_at=now(), version=holdfast_version(), commit=commit(), command=plan.command, cases=done
    )
    write_results(part, file)


async def _run_case(
    item: Item, case: Case, plan: RunPlan, stage: Stage, clock: _Budget, say: Callable[[str], None]
) -> CaseResult:
    seconds = clock.seconds_for_next()
    if seconds <= 0:
        say(f"{item.scenario.name} / {case.name}: left out, no time left")
        return _left_out(item, case, "left out: no time left")
    effort = Effort(
        rounds=plan.rounds,
        noise_rounds=plan.noise_rounds,
        seconds=min(seconds, plan.case_seconds),
        deadline=clock.deadline,
        settling_seconds=plan.settling_seconds,
    )
    return await measure_case(item.scenario, case, item.contenders, stage, effort=effort, say=say)


def _left_out(item: Item, case: Case, why: str) -> CaseResult:
    return CaseResult(
        scenario=item.scenario.name, case=case.name, model=item.model_name, notes=[why]
    )


class _Budget:
    """Divides the remaining time among the remaining cases."""

    def __init__(self, plan: RunPlan) -> None:
        self.deadline = time.perf_counter() + plan.minutes * 60
        self._cases_left = sum(len(item.cases(plan.scale)) for item in plan.items)

    def seconds_for_next(self) -> float:
        left = self.deadline - time.perf_counter()
        share = left / max(self._cases_left, 1) * _GENEROSITY
        self._cases_left -= 1
        return share

    def skip(self, cases: int) -> None:
        self._cases_left -= cases


@dataclass(slots=True)
class _Stages:
    """The servers of the latest model. Those of the previous model are ended first."""

    folder: Path
    threads: int
    request_seconds: float
    _current: tuple[str, Stage, BenchModel] | None = field(default=None, init=False)

    def starter(self, model: BenchModel) -> ServerStarter:
        folder = self.folder / model.name
        folder.mkdir(exist_ok=True)
        return ServerStarter(
            folder, model, threads=self.threads, request_seconds=self.request_seconds
        )

    def stage(self, model_name: str) -> tuple[Stage, BenchModel]:
        if self._current is not None and self._current[0] == model_name:
            return self._current[1], self._current[2]
        self.close()
        if model_name == UNKNOWN_MODEL:
            model, prompts = BenchModel(name=model_name, folder=self.folder), PromptMaker(None)
        else:
            model = ensure_model(model_name)
            prompts = PromptMaker(model.folder)
        stage = Stage(self.starter(model), prompts)
        self._current = (model_name, stage, model)
        return stage, model

    def close(self) -> None:
        if self._current is not None:
            self._current[1].close()
            self._current = None
