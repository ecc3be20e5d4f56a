"""Compares steps of the engine with bare forward passes, in another process."""

from __future__ import annotations

import msgspec

from holdfast_bench.machine import machine, new_results
from holdfast_bench.measuring_process import Job, MeasuringProcess
from holdfast_bench.models import ensure_model
from holdfast_bench.results import CaseResult, Results


class EngineJob(Job, frozen=True, kw_only=True):
    """Streams of equal contexts, measured in rounds of some steps each."""

    streams: tuple[int, ...]
    context_tokens: int
    rounds: int
    steps: int


def engine_results(
    model: str,
    *,
    streams: tuple[int, ...],
    context_tokens: int,
    quick: bool,
    threads: int,
    command: str,
) -> Results:
    """Step times of the engine and of bare forward passes. Raises HoldfastError."""
    found = ensure_model(model)
    rounds, steps = (4, 4) if quick else (9, 16)
    job = EngineJob(
        folder=str(found.folder),
        threads=threads,
        streams=streams,
        context_tokens=context_tokens,
        rounds=rounds,
        steps=steps,
    )
    results = new_results(command, kind="engine")
    results.machine = machine()
    process = MeasuringProcess("engine_process", job)
    try:
        results.cases = msgspec.json.decode(process.measure(), type=list[CaseResult])
    finally:
        process.close()
    for case in results.cases:
        case.model = found.name
    return results
