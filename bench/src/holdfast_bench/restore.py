"""Compares restoring a context after a restart with the minimum: reading and copying its bytes, and
one forward pass.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast_bench.contenders import holdfast
from holdfast_bench.load import user
from holdfast_bench.machine import machine, new_results
from holdfast_bench.measuring_process import Job, MeasuringProcess
from holdfast_bench.models import ensure_model
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample
from holdfast_bench.scenario import Stage
from holdfast_bench.servers import ServerStarter

_NOISE_ROUNDS = 2
_SUBJECT = holdfast().storing()


class LeastJob(Job, frozen=True, kw_only=True):
    """The job of the other process: prefill a context and keep its KV in a file."""

    context_tokens: int
    file: str


class LeastTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times to restore from that file."""

    read_seconds: float
    copy_seconds: float
    forward_seconds: float
    kv_bytes: float


async def restore_results(
    model: str,
    *,
    contexts: Sequence[int],
    rounds: int,
    threads: int,
    request_seconds: float,
    command: str,
    say: Callable[[str], None],
) -> Results:
    """Measure restarts of the server and the minimum in turn. Raises HoldfastError."""
    found = ensure_model(model)
    results = new_results(command)
    results.machine = machine()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        starter = ServerStarter(
            folder=Path(name), model=found, threads=threads, request_seconds=request_seconds
        )
        with contextlib.closing(Stage(starter, PromptMaker(found.folder))) as stage:
            for context in contexts:
                case = await _case(stage, threads, context=context, rounds=rounds)
                results.cases.append(case)
                say(f"restore / {context} tokens: {case.seconds:.0f} s")
    return results


async def _case(stage: Stage, threads: int, *, context: int, rounds: int) -> CaseResult:
    began = time.perf_counter()
    model, text = stage.starter.model, stage.prompts.text(context, seed=f"restore {context}")
    job = LeastJob(
        folder=str(model.folder),
        threads=threads,
        context_tokens=context,
        file=str(stage.starter.folder / "kv"),
    )
    with contextlib.closing(MeasuringProcess("restore_process", job)) as least:
        cold, cold_answer = await _first_token(stage, text)
        server, ideal = list[Sample](), list[Sample]()
        for _ in range(_NOISE_ROUNDS + rounds):
            await stage.restart(_SUBJECT)
            seconds, answer = await _first_token(stage, text)
            if answer != cold_answer:
                raise HoldfastError("a restored context gave another answer than the cold one")
            times = msgspec.json.decode(least.measure(), type=dict[str, float])
            total = sum(value for name, value in times.items() if name.endswith("_seconds"))
            figures = {"first_token_seconds": seconds, "cold_over_restored": cold / seconds}
            for samples, found in (
                (server, figures),
                (ideal, {"first_token_seconds": total, **times}),
            ):
                samples.append(Sample(metrics={name: [value] for name, value in found.items()}))
    stage.drop(_SUBJECT)
    one, other = (each.metrics["first_token_seconds"][0] for each in server[:_NOISE_ROUNDS])
    server[_NOISE_ROUNDS].metrics["first_token_seconds @ cold"] = [cold]
    return CaseResult(
        scenario="restore",
        case=f"{context} tokens",
        model=model.name,
        settings={"context_tokens": context},
        contenders=[
            ContenderResult(label=label, rounds=samples[_NOISE_ROUNDS:])
            for label, samples in ((_SUBJECT.label, server), ("least", ideal))
        ],
        noise={"first_token_seconds": [other / one]},
        seconds=time.perf_counter() - began,
    )


async def _first_token(stage: Stage, text: str) -> tuple[float, str]:
    running = await stage.server(_SUBJECT)
    answer = await running.client.ask(user(text, max_tokens=8))
    if not answer.is_good:
        raise HoldfastError(f"the server did not answer: {answer.error}")
    return answer.first_seconds, answer.text
