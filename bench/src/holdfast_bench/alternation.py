"""Runs one case and compares the answers.

First, the first contender is measured against itself to show the noise. Then all contenders are
measured in rounds, each in reverse order of the previous one (A B, B A), so drift (temperature,
other programs) affects all equally.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast_bench.contenders import Contender
from holdfast_bench.figures import pairwise_ratios
from holdfast_bench.load import user
from holdfast_bench.quality import agreement
from holdfast_bench.results import CaseResult, ContenderResult, Sample
from holdfast_bench.scenario import Case, Scenario, Stage, Trial
from holdfast_bench.servers import ServerFailed
from holdfast_bench.wire import TOO_LONG, ServerUnreachable

_WARM_UP_TOKENS = 300
_EXCERPT = 160
_GAP_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time a case may take. The first round always runs."""

    rounds: int = 0  # 0: as many as the scenario or case specifies
    noise_rounds: int = 2
    seconds: float = 120.0
    deadline: float = float("inf")  # of time.perf_counter
    # before each measurement, since threads of the previous server keep spinning for a moment
    settling_seconds: float = 0.1


async def measure_case(
    scenario: Scenario,
    case: Case,
    contenders: Sequence[Contender],
    stage: Stage,
    *,
    effort: Effort,
    say: Callable[[str], None],
) -> CaseResult:
    """Measure all rounds of all contenders. Failures of servers are recorded, never raised."""
    result = CaseResult(
        scenario=scenario.name, case=case.name, model="", settings=dict(case.settings)
    )
    result.contenders = [ContenderResult(label=contender.label) for contender in contenders]
    rounds = effort.rounds or case.rounds or scenario.rounds
    await _warm_up(contenders, stage)
    await _prepare(scenario, case, contenders, stage)
    clock = _Clock(effort)  # preparation counts towards the deadline only
    measured = {"nobody": 0, "first": 1, "everybody": len(contenders)}[scenario.against_itself]
    for contender, each in zip(contenders[:measured], result.contenders, strict=False):
        itself: list[Sample] = []
        for number in range(2 * min(effort.noise_rounds, rounds)):
            if clock.is_late(parts=2, first_round=not itself):
                break
            await asyncio.sleep(effort.settling_seconds)
            itself.append(await _measured(scenario, case, contender, stage, seed=f"noise {number}"))
            clock.tick()
        each.noise = _noise(itself)
    result.noise = result.contenders[0].noise
    for number in range(rounds):
        if clock.is_late(parts=len(contenders), first_round=number == 0):
            result.notes.append(f"{number} of {rounds} rounds: no time left")
            break
        sides = list(zip(contenders, result.contenders, strict=True))
        if number % 2:  # the position within a round may matter
            sides.reverse()
        for contender, each in sides:
            await asyncio.sleep(effort.settling_seconds)
            each.rounds.append(
                await _measured(scenario, case, contender, stage, seed=f"round {number}")
            )
            clock.tick()
        say(f"{scenario.name} / {case.name}: round {number + 1} of {rounds}, {clock.seconds:.0f} s")
    _compare_answers(result, stage)
    stage.let_go()
    if scenario.judge is not None:
        result.notes += scenario.judge(result)
    for sample in [sample for each in result.contenders for sample in each.rounds]:
        sample.answers = []  # already compared, and too long to store
        sample.gaps = [round(gap, _GAP_DIGITS) for gap in sample.gaps]
    result.seconds = clock.seconds
    return result


async def _warm_up(contenders: Sequence[Contender], stage: Stage) -> None:
    """Send one request to each server, because first requests are slower."""
    for contender in contenders:
        try:
            client = (await stage.server(contender)).client
            await client.ask(
                user(stage.prompts.text(_WARM_UP_TOKENS, seed="warm-up"), max_tokens=16)
            )
        except (ServerFailed, ServerUnreachable):
            stage.drop(contender, kill=True)  # its rounds will report it


async def _prepare(
    scenario: Scenario, case: Case, contenders: Sequence[Contender], stage: Stage
) -> None:
    if scenario.prepare is None:
        return
    for contender in contenders:
        with contextlib.suppress(ServerFailed, ServerUnreachable):  # its rounds will report it
            await scenario.prepare(
                Trial(
                    stage=stage, contender=contender, case=case, seed=f"{scenario.name}/{case.name}"
                )
            )


async def _measured(
    scenario: Scenario, case: Case, contender: Contender, stage: Stage, *, seed: str
) -> Sample:
    trial = Trial(
        stage=stage, contender=contender, case=case, seed=f"{scenario.name}/{case.name}/{seed}"
    )
    began, others = time.perf_counter(), stage.cpu_seconds_of_others(contender)
    try:
        sample = await scenario.measure(trial)
    except (ServerFailed, ServerUnreachable) as error:
        stage.drop(contender, kill=True)
        return Sample(errors=[str(error)])
    if any(error.startswith(TOO_LONG) for error in sample.errors):
        # it may still be computing, and the next round must not wait for it
        stage.drop(contender, kill=True)
    seconds = time.perf_counter() - began
    sample.others_cpu_share = (
        max(0.0, stage.cpu_seconds_of_others(contender) - others) / seconds if seconds else 0.0
    )
    return sample


class _Clock:
    """Predicts from the longest step so far whether another round fits."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._began = self._last = time.perf_counter()
        self._longest = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def tick(self) -> None:
        now = time.perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now

    def is_late(self, *, parts: int, first_round: bool) -> bool:
        if first_round:
            return time.perf_counter() > self._effort.deadline
        end = time.perf_counter() + parts * self._longest / 2
        return end - self._began > self._effort.seconds or end > self._effort.deadline


def _noise(samples: Sequence[Sample]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    ratios = {}
    for name in names:
        values = [sample.metrics.get(name, []) for sample in samples]
        if found := pairwise_ratios(values[1::2], values[0::2]):
            ratios[name] = found
    return ratios


def _compare_answers(result: CaseResult, stage: Stage) -> None:
    first, *others = result.contenders
    for other in others:
        pairs = list(zip(first.rounds, other.rounds, strict=False))
        expected = [
            answer
            for ours, theirs in pairs
            for answer, _ in zip(ours.answers, theirs.answers, strict=False)
        ]
        got = [
            answer
            for ours, theirs in pairs
            for _, answer in zip(ours.answers, theirs.answers, strict=False)
        ]
        cut = stage.prompts.tokens
        different = next(
            ((a, b) for a, b in zip(expected, got, strict=False) if cut(a) != cut(b)), None
        )
        if different is not None:
            other.notes.append(
                f"first answer that differs: {different[0][:_EXCERPT]!r} against "
                f"{different[1][:_EXCERPT]!r}"
            )
        other.agreement = agreement(expected, got, cut=cut)
