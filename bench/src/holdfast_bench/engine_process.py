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
_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "size": {"type": "number"},
        "kind": {"enum": ["file", "folder", "link"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "age", "size", "kind", "tags", "is_new"],
    "additionalProperties": False,
}
_ENDLESS_LIST = {"type": "array", "items": _OBJECT, "minItems": 10_000}


def _measure(job: EngineJob) -> list[CaseResult]:
    prepare_blas(job.threads)  # before the first import of MLX
    importlib.import_module("holdfast.worker.loop.device").use_device("auto")
    load = importlib.import_module("holdfast.worker.engine.load")
    probe = importlib.import_module("holdfast.worker.engine.probe")
    loaded = load.load_model(
        Path(job.folder), ModelSettings(), progress=lambda stage, fraction: None
    )
    chosen = probe.choose_layout(loaded.model, vocab_size=loaded.vocab_size)
    if job.kind == "kv":
        return [case for streams in job.streams for case in _kv(job, loaded, chosen, streams)]
    measure = _constrained if job.kind == "constrained" else _over_bare
    return [measure(job, loaded, chosen, streams) for streams in job.streams]


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


def _constrained(job: EngineJob, loaded: Any, runner: Any, streams: int) -> CaseResult:
    """Streams that write JSON of a schema without end, against the same streams unconstrained; both
    at temperature 1.
    """
    steps = importlib.import_module("holdfast_bench.engine_steps")
    engine_module = importlib.import_module("holdfast.worker.engine.engine")
    constraints = importlib.import_module("holdfast.worker.engine.constraints")
    grammars = importlib.import_module("holdfast.worker.engine.constraints").Grammars(
        Path(job.folder), vocab_size=loaded.vocab_size
    )
    grammar = importlib.import_module("llguidance").LLMatcher.grammar_from_json_schema(
        msgspec.json.encode(_ENDLESS_LIST).decode()
    )
    limits = constraints.Constraints(grammars, vocab_size=loaded.vocab_size)
    engine = engine_module.Engine(runner, vocab_size=loaded.vocab_size, constraints=limits)
    prompts = _prompts(job, loaded, streams)
    steppers = {
        name: steps.EngineSteps(
            engine,
            steps.requests_of(
                prompts,
                max_tokens=_most_tokens(job),
                name=name,
                temperature=1.0,
                grammar=grammar_or_none,
            ),
            pipelined=engine.runs_ahead,
        )
        for name, grammar_or_none in (("plain", ""), ("constrained", grammar))
    }
    case: CaseResult
    case, tokens = steps.alternate(_streams(streams), steppers, rounds=job.rounds, steps=job.steps)
    case.settings = _settings(job, loaded, runner, streams)
    microseconds = limits.figures.mask_seconds / max(1, limits.figures.masks) * 1e6
    case.notes.append(
        f"A mask took {microseconds:.0f} µs to fill, on average over {limits.figures.masks}."
    )
    tokenizer = importlib.import_module("holdfast.front.prompt.tokenize").load_tokenizer(
        Path(job.folder)
    )
    text = tokenizer.decode(tokens["constrained"][0], skip_special_tokens=False)
    case.notes.append(f"The first constrained stream wrote, among other things: {text[:400]!r}")
    return case


def _kv(job: EngineJob, loaded: Any, runner: Any, streams: int) -> list[CaseResult]:
    """Native, 8-bit and 4-bit keys and values: one stream decodes with the C kernel and without it,
    and reads on; several streams decode behind one prefix, in a copy for each or held once.
    """
    steps = importlib.import_module("holdfast_bench.engine_steps")
    live = importlib.import_module("holdfast.worker.kv.live")
    engine = importlib.import_module("holdfast.worker.engine.engine").Engine(
        runner, vocab_size=loaded.vocab_size
    )
    costs = {"native": engine.measure_costs()}
    runner.learn_form(costs["native"].form)
    importlib.import_module("holdfast.worker.engine.layouts").choose_sharing(runner)
    most_tokens = _most_tokens(job)
    reading_tokens = (job.rounds + 8) * steps.CHUNK_TOKENS
    source = random.Random(streams)
    prompt = [
        source.randrange(300, loaded.vocab_size) for _ in range(job.context_tokens + reading_tokens)
    ]
    decoding: dict[str, Any] = {}
    reading: dict[str, Any] = {}
    for kv_bits in ("native", "8", "4"):
        costs[kv_bits] = engine.measure_costs(kv_bits)
        state = steps.parked(engine, prompt[: job.context_tokens], kv_bits=kv_bits)
        uses = ("shared",) if streams == 1 else ("copied", "shared")
        for use in uses:
            label = kv_bits if streams == 1 else f"{kv_bits}, {use}"
            base = live.LiveBase(state=state, tokens=job.context_tokens, use=use)
            rows = [prompt[: job.context_tokens + 1]] * streams
            requests = steps.requests_of(rows, max_tokens=2 * most_tokens, name=label)
            decoding[label] = steps.EngineSteps(
                engine, requests, pipelined=False, kv_bits=kv_bits, base=base
            )
        if streams == 1:
            (request,) = steps.requests_of([prompt], max_tokens=1, name=f"read {kv_bits}")
            reading[kv_bits] = steps.ReadingSteps(engine, request, kv_bits=kv_bits, base=base)
    contenders = decoding
    if streams == 1:
        without = {
            f"{label}, no kernel": steps.WithoutKernel(decoding[label]) for label in decoding
        }
        contenders = decoding | without
    name = f"{_streams(streams)} behind {job.context_tokens} tokens"
    cases = [steps.alternate(name, contenders, rounds=job.rounds, steps=job.steps)[0]]
    if reading:
        name = f"a chunk behind {job.context_tokens} tokens"
        case, _ = steps.alternate(name, reading, rounds=job.rounds, steps=1, noise_rounds=1)
        cases.append(case)
    profile = importlib.import_module("holdfast_bench.engine_profile")
    for each in cases[0].contenders:
        if each.label in decoding:
            share = profile.attention_share(
                loaded.model, decoding[each.label], steps=_PROFILE_STEPS
            )
            _add_attention(each.rounds[-1], share)
    for case in cases:
        case.settings = _settings(job, loaded, runner, streams)
        case.settings |= {
            f"bytes_per_token_{label}": each.bytes_per_token for label, each in costs.items()
        }
    return cases


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
