"""Runs scenarios one after the other within a time limit, and saves each case when it ends.

In a case, the first contender is measured against itself to show the noise. Then all contenders are
measured in rounds, each in reverse order of the previous one (A B, B A), so drift (temperature,
other programs) affects all equally.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast_bench.comparison import agreement, ratios_by_round
from holdfast_bench.contenders import Contender, products_of
from holdfast_bench.load import user
from holdfast_bench.machine import machine, new_results
from holdfast_bench.models import BenchModel, ensure_model
from holdfast_bench.null_server import client_cost
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample, write_results
from holdfast_bench.scenario import Case, Scenario, Stage, Trial
from holdfast_bench.servers import ServerFailed, ServerStarter
from holdfast_bench.wire import TOO_LONG, ServerUnreachable

RESULTS_FILE = "results.json"
_GENEROSITY = 1.6  # a case may exceed its share of the remaining time, since most take less
_WARM_UP_TOKENS = 300
_EXCERPT = 160
_GAP_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A scenario with its model and contenders."""

    scenario: Scenario
    model: str
    contenders: tuple[Contender, ...]  # others are compared with the first one
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and how long it may take."""

    items: tuple[Item, ...]
    out: Path
    minutes: float = 60.0
    case_seconds: float = 180.0  # the first round of a case always ends
    rounds: int = 0  # 0: as many as the case or scenario specifies
    noise_rounds: int = 2
    threads: int = 0
    request_seconds: float = 300.0  # a longer request counts as failed
    command: str = ""
    # before each measurement, since threads of the previous server keep spinning for a moment; ten
    # times as long to measure the machine's load
    settling_seconds: float = 0.1
    say: Callable[[str], None] = print


async def run_benchmarks(plan: Plan) -> Results:
    """Run everything and write the result file."""
    results = new_results(plan.command)
    results.machine = machine(watched_seconds=10 * plan.settling_seconds)
    labels = {contender.label for item in plan.items for contender in item.contenders}
    results.machine["matrix_products"] = products_of(labels)
    deadline = time.perf_counter() + plan.minutes * 60
    cases_left = sum(len(item.cases) for item in plan.items)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        nothing = BenchModel(name="none", folder=folder)
        results.client = await client_cost(ServerStarter(folder=folder, model=nothing))
        for number, item in enumerate(plan.items):
            with _stage(item, plan, folder / str(number)) as stage:
                for case in item.cases:
                    share = (deadline - time.perf_counter()) / cases_left * _GENEROSITY
                    cases_left -= 1
                    if isinstance(stage, Stage) and share > 0:
                        seconds = min(share, plan.case_seconds)
                        run = CaseRun(item, case, stage, plan, seconds=seconds, deadline=deadline)
                        results.cases.append(await run.result())
                    else:
                        why = "no time left" if share <= 0 else str(stage)
                        results.cases.append(_left_out(item, case, why))
                        plan.say(f"{item.scenario.name} / {case.name}: left out, {why}")
                    write_results(results, plan.out / RESULTS_FILE)
    return results


@contextlib.contextmanager
def _stage(item: Item, plan: Plan, folder: Path) -> Iterator[Stage | HoldfastError]:
    """The stage of a scenario; an error if its model is not available, since those of other
    scenarios may be.
    """
    folder.mkdir()
    try:
        model = ensure_model(item.model)
    except HoldfastError as error:
        yield error
        return
    starter = ServerStarter(
        folder=folder, model=model, threads=plan.threads, request_seconds=plan.request_seconds
    )
    with contextlib.closing(Stage(starter, PromptMaker(model.folder))) as stage:
        yield stage


def _left_out(item: Item, case: Case, why: str) -> CaseResult:
    notes = [f"left out: {why}"]
    return CaseResult(scenario=item.scenario.name, case=case.name, model=item.model, notes=notes)


class CaseRun:
    """The measurements of one case. deadline: of `time.perf_counter`."""

    def __init__(
        self,
        item: Item,
        case: Case,
        stage: Stage,
        plan: Plan,
        *,
        seconds: float,
        deadline: float = float("inf"),
    ) -> None:
        self._item, self._case, self._stage, self._plan = item, case, stage, plan
        self._seconds, self._deadline = seconds, deadline
        self._began = self._last = time.perf_counter()
        self._longest = 0.0  # of the measurements so far

    async def result(self) -> CaseResult:
        """Measure all rounds of all contenders. Failures of servers are recorded, never raised."""
        scenario, case, plan = self._item.scenario, self._case, self._plan
        result = CaseResult(
            scenario=scenario.name,
            case=case.name,
            model=self._stage.starter.model.name,
            settings=dict(case.settings),
            contenders=[ContenderResult(label=each.label) for each in self._item.contenders],
        )
        sides = list(zip(self._item.contenders, result.contenders, strict=True))
        for contender in self._item.contenders:
            await self._prepare(contender)
        self._began = self._last = time.perf_counter()  # preparation counts for the deadline only
        rounds = plan.rounds or case.rounds or scenario.rounds
        for contender, each in sides if scenario.measures_all_noise else sides[:1]:
            each.noise = await self._noise(contender, min(plan.noise_rounds, rounds))
        result.noise = result.contenders[0].noise
        for number in range(rounds):
            if self._is_late(parts=len(sides), is_first=number == 0):
                result.notes.append(f"{number} of {rounds} rounds: no time left")
                break
            # the position within a round may matter
            for contender, each in reversed(sides) if number % 2 else sides:
                each.rounds.append(await self._measured(contender, f"round {number}"))
            spent = time.perf_counter() - self._began
            plan.say(
                f"{scenario.name} / {case.name}: round {number + 1} of {rounds}, {spent:.0f} s"
            )
        _compare_answers(result, self._stage.prompts.tokens)
        self._stage.let_go()
        if scenario.judge is not None:
            result.notes += scenario.judge(result)
        for sample in [sample for each in result.contenders for sample in each.rounds]:
            sample.answers = []  # already compared, and too long to store
            sample.gaps = [round(gap, _GAP_DIGITS) for gap in sample.gaps]
        result.seconds = time.perf_counter() - self._began
        return result

    def _trial(self, contender: Contender, *seed: str) -> Trial:
        names = (self._item.scenario.name, self._case.name, *seed)
        return Trial(stage=self._stage, contender=contender, case=self._case, seed="/".join(names))

    async def _prepare(self, contender: Contender) -> None:
        """Send a request, because first ones are slower, and what the scenario needs."""
        text = self._stage.prompts.text(_WARM_UP_TOKENS, seed="warm-up")
        try:
            client = (await self._stage.server(contender)).client
            await client.ask(user(text, max_tokens=16))
            if self._item.scenario.prepare is not None:
                await self._item.scenario.prepare(self._trial(contender))
        except (ServerFailed, ServerUnreachable):
            self._stage.drop(contender, kill=True)  # its rounds will report it

    async def _noise(self, contender: Contender, rounds: int) -> dict[str, list[float]]:
        """Ratios of a server to itself, by metric."""
        samples: list[Sample] = []
        for number in range(2 * rounds):
            if self._is_late(parts=2, is_first=number == 0):
                break
            samples.append(await self._measured(contender, f"noise {number}"))
        names = dict.fromkeys(name for sample in samples for name in sample.metrics)
        values = {name: [sample.metrics.get(name, []) for sample in samples] for name in names}
        found = {name: ratios_by_round(each[1::2], each[0::2]) for name, each in values.items()}
        return {name: ratios for name, ratios in found.items() if ratios}

    async def _measured(self, contender: Contender, seed: str) -> Sample:
        await asyncio.sleep(self._plan.settling_seconds)
        stage = self._stage
        began, others = time.perf_counter(), stage.cpu_seconds_of_others(contender)
        try:
            sample = await self._item.scenario.measure(self._trial(contender, seed))
        except (ServerFailed, ServerUnreachable) as error:
            stage.drop(contender, kill=True)
            sample = Sample(errors=[str(error)])
        if any(error.startswith(TOO_LONG) for error in sample.errors):
            # it may still be computing, and the next round must not wait for it
            stage.drop(contender, kill=True)
        now = time.perf_counter()
        used = max(0.0, stage.cpu_seconds_of_others(contender) - others)
        sample.others_cpu_share = used / max(now - began, 1e-9)
        self._longest, self._last = max(self._longest, now - self._last), now
        return sample

    def _is_late(self, *, parts: int, is_first: bool) -> bool:
        """Whether another round would exceed the time limit if its measurements took as long as the
        longest one so far.
        """
        if is_first:
            return time.perf_counter() > self._deadline
        end = time.perf_counter() + parts * self._longest / 2
        return end - self._began > self._seconds or end > self._deadline


def _compare_answers(result: CaseResult, cut: Callable[[str], list[str]]) -> None:
    first, *others = result.contenders
    for other in others:
        pairs = [
            pair
            for ours, theirs in zip(first.rounds, other.rounds, strict=False)
            for pair in zip(ours.answers, theirs.answers, strict=False)
        ]
        for expected, got in pairs:
            if cut(expected) != cut(got):
                other.notes.append(
                    f"first answer that differs: {expected[:_EXCERPT]!r} against {got[:_EXCERPT]!r}"
                )
                break
        expected_answers, answers = ([pair[side] for pair in pairs] for side in (0, 1))
        other.agreement = agreement(expected_answers, answers, cut=cut)
