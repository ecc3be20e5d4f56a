"""A whole run: scenarios one after the other, each case saved as it ends, within a given time."""

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
PARTS_FOLDER = "parts"  # one file for each scenario, from which a run is taken up again
UNKNOWN_MODEL = "served"  # whatever the server at a given URL serves; its tokenizer is not at hand
_GENEROSITY = 1.6  # a case may take more than its share of the time that is left: most take less


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One scenario of a run: on which model, against whom."""

    scenario: Scenario
    contenders: tuple[Contender, ...]  # the first is the one that the others are compared with
    model: str = ""  # "" is the scenario's own
    only: str = ""  # a part of the names of the cases that are wanted
    not_installed: tuple[str, ...] = ()  # peers that would be measured too

    def cases(self, scale: Scale) -> list[Case]:
        """Those that run at this scale."""
        return [case for case in self.scenario.cases(scale) if self.only in case.name]

    @property
    def model_name(self) -> str:
        """The model that its servers are started on; unknown where none is started."""
        needed = any(contender.is_ours_to_start for contender in self.contenders)
        return self.model or (self.scenario.model if needed else UNKNOWN_MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What to run and how long it may take."""

    items: tuple[Item, ...]
    out: Path
    scale: Scale = "normal"
    minutes: float = 60.0
    case_seconds: float = 180.0
    rounds: int = 0
    noise_rounds: int = 2
    threads: int = 0
    request_seconds: float = 300.0  # a request that takes longer failed
    resume: bool = False
    command: str = ""
    # between turns, and ten times that to see how busy the machine is
    settling_seconds: float = 0.1


async def run_benchmarks(plan: RunPlan, *, say: Callable[[str], None]) -> Results:
    """Run all, write `results.json` and one file for each scenario into the folder of the plan,
    return the results.
    """
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
        # a model that is not to be had here; the other scenarios may have theirs
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
        say(f"{item.scenario.name} / {case.name}: left out, the time is up")
        return _left_out(item, case, "left out: the time was up")
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
    """Shares the time that is left among the cases that are left."""

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
    """The stage of the model that was measured last; another model's servers are ended first."""

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
