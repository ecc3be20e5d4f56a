"""Runs the engine's micro-benchmark in another process, so that the caller does not import MLX."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from holdfast.errors import HoldfastError
from holdfast_bench.machine import commit, holdfast_version, machine, now
from holdfast_bench.models import ensure_model
from holdfast_bench.results import CaseResult, Results

_LONGEST_SECONDS = 1200.0


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process measures."""

    folder: str
    streams: tuple[int, ...]
    context_tokens: int
    rounds: int
    steps: int
    threads: int


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
        streams=streams,
        context_tokens=context_tokens,
        rounds=rounds,
        steps=steps,
        threads=threads,
    )
    results = Results(
        kind="engine",
        made_at=now(),
        version=holdfast_version(),
        commit=commit(),
        command=command,
        machine=machine(),
    )
    process = [sys.executable, "-m", "holdfast_bench.engine_process"]
    try:
        done = subprocess.run(
            process,
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HoldfastError(
            f"the engine was not measured within {_LONGEST_SECONDS:.0f} s"
        ) from None
    if done.returncode != 0:
        raise HoldfastError(
            f"measuring the engine failed: {done.stderr.decode(errors='replace').strip()[-800:]}"
        )
    results.cases = msgspec.json.decode(done.stdout, type=list[CaseResult])
    for case in results.cases:
        case.model = found.name
    return results
