"""The process that measures the engine: a job as JSON on stdin, cases as JSON on stdout.

Imports MLX.
"""

from __future__ import annotations

import importlib
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import ModelSettings
from holdfast.worker.cpu.blas import current_blas, prepare_blas
from holdfast_bench.engine_run import EngineJob
from holdfast_bench.quality import agreement
from holdfast_bench.results import Agreement, CaseResult, Sample

_SPARE_TOKENS = 64
_PROFILE_STEPS = 8


def _measure(job: EngineJob) -> list[CaseResult]:
    prepare_blas(job.threads)  # before the first import of MLX
    importlib.import_module("holdfast.worker.loop.device").use_device("auto")
    load = importlib.import_module("holdfast.worker.engine.load")
    probe = importlib.import_module("holdfast.worker.engine.probe")
    loaded = load.load_model(
        Path(job.folder), ModelSettings(), progress=lambda stage, fraction: None
    )
    chosen = probe.choose_layout(loaded.model, vocab_size=loaded.vocab_size)
    return [_over_bare(job, loaded, chosen, streams) for streams in job.streams]


def _over_bare(job: EngineJob, loaded: Any, runner: Any, streams: int) -> CaseResult:
    steps = importlib.import_module("holdfast_bench.engine_steps")
    engine_module = importlib.import_module("holdfast.worker.engine.engine")
    prompts = _prompts(job, loaded, streams)
    engine = engine_module.Engine(runner, vocab_size=loaded.vocab_size)
    ours = steps.EngineSteps(engine, steps.requests_of(prompts, max_tokens=_most_tokens(job)))
    bare = steps.BareForward(loaded.model, prompts, pipelined=False)
    steppers = {
        "engine": ours,
        "bare": bare,
        "bare, pipelined": steps.BareForward(loaded.model, prompts, pipelined=True),
    }
    case: CaseResult
    case, tokens = steps.alternate(_streams(streams), steppers, rounds=job.rounds, steps=job.steps)
    for each in case.contenders[1:]:
        each.agreement = _agreement(tokens["engine"], tokens[each.label])
    case.settings = _settings(job, loaded, runner, streams)
    _add_profile(case, loaded, ours, bare)
    ours.close()
    return case


def _prompts(job: EngineJob, loaded: Any, streams: int) -> list[list[int]]:
    source = random.Random(streams)
    return [
        [source.randrange(300, loaded.vocab_size) for _ in range(job.context_tokens)]
        for _ in range(streams)
    ]


def _most_tokens(job: EngineJob) -> int:
    return (job.rounds + 6) * job.steps + 4 * _PROFILE_STEPS + _SPARE_TOKENS


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _settings(job: EngineJob, loaded: Any, runner: Any, streams: int) -> dict[str, Any]:
    return {
        "streams": streams,
        "context_tokens": job.context_tokens,
        "steps_per_round": job.steps,
        "layout": runner.name,
        "parameters": loaded.parameters,
        "compute_dtype": str(loaded.compute_dtype).removeprefix("mlx.core."),
        "blas": str(current_blas()),
    }


def _add_profile(case: CaseResult, loaded: Any, ours: Any, bare: Any) -> None:
    profile = importlib.import_module("holdfast_bench.engine_profile")
    parts = profile.parts_of(ours, count=_PROFILE_STEPS)
    parts["drawing_seconds"] = profile.drawing_seconds(
        rows=case.settings["streams"], vocab_size=loaded.vocab_size
    )
    step = statistics.median(case.contenders[0].pooled("step_seconds"))
    engine_sample = case.contenders[0].rounds[-1]
    engine_sample.metrics |= parts
    engine_sample.metrics["layout_share"] = [statistics.median(parts["layout_seconds"]) / step]
    engine_sample.metrics["drawing_share"] = [statistics.median(parts["drawing_seconds"]) / step]
    for sample, stepper in ((engine_sample, ours), (case.contenders[1].rounds[-1], bare)):
        _add_attention(sample, profile.attention_share(loaded.model, stepper, steps=_PROFILE_STEPS))


def _add_attention(sample: Sample, share: float | None) -> None:
    if share is not None:
        sample.metrics["attention_share"] = [share]


def _agreement(expected: list[list[int]], got: list[list[int]]) -> Agreement | None:
    def as_text(rows: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]

    return agreement(as_text(expected), as_text(got), cut=str.split)


if __name__ == "__main__":
    cases = _measure(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineJob))
    sys.stdout.buffer.write(msgspec.json.encode(cases))
    sys.stdout.buffer.flush()
    sys.modules["mlx.core"].clear_streams()
