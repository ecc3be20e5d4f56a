"""Time from process start to the first answer, and memory when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.contenders import AS_INSTALLED
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_SETTLING_SECONDS = 1.5


def _cases(scale: Scale) -> Sequence[Case]:
    return [Case(name="start", rounds={"quick": 1, "normal": 3, "full": 7}[scale])]


async def _measure(trial: Trial) -> Sample:
    server = await trial.stage.restart(trial.contender)
    await asyncio.sleep(_SETTLING_SECONDS)
    use = server.use()
    return Sample(
        metrics={
            "ready_seconds": [server.ready_seconds],
            "listening_seconds": [server.listening_seconds],
            "idle_bytes": [float(use.resident_bytes)],
            "processes": [float(use.processes)],
        }
    )


SCENARIO = Scenario(
    name="start",
    summary="time from process start to the first answer, idle memory",
    model="holdfast-demo",
    cases=_cases,
    measure=_measure,
    peers=("mlx_lm", AS_INSTALLED),
    rounds=3,
)
