"""Compares restoring a context after a restart with the minimum: reading and copying its bytes, and
one forward pass.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast_bench.contenders import Contender, holdfast
from holdfast_bench.load import user
from holdfast_bench.machine import commit, holdfast_version, machine, now
from holdfast_bench.measuring_process import MeasuringProcess
from holdfast_bench.models import BenchModel, ensure_model
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample
from holdfast_bench.scenario import Stage
from holdfast_bench.servers import ServerStarter


class LeastJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the other process: prefill a context and keep its KV in a file."""

    folder: str
    context_tokens: int
    file: str
    threads: int


class LeastTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times to restore from that file."""

    read_seconds: float
    copy_seconds: float
    forward_seconds: float
    kv_bytes: int

    @property
    def total_seconds(self) -> float:
        """The sum of all steps."""
        return self.read_seconds + self.copy_seconds + self.forward_seconds


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
    results = Results(
        made_at=now(),
        version=holdfast_version(),
        commit=commit(),
        command=command,
        machine=machine(),
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        starter = ServerStarter(folder, found, threads=threads, request_seconds=request_seconds)
        stage = Stage(starter, PromptMaker(found.folder))
        try:
            for context in contexts:
                job = LeastJob(
                    folder=str(found.folder),
                    context_tokens=context,
                    file=str(folder / "kv"),
                    threads=threads,
                )
                with MeasuringProcess("holdfast_bench.restore_process", job) as least:
                    results.cases.append(
                        await _case(stage, found, least, context=context, rounds=rounds)
                    )
                say(f"restore / {context} tokens: {results.cases[-1].seconds:.0f} s")
        finally:
            stage.close()
    return results


async def _case(
    stage: Stage, model: BenchModel, least: MeasuringProcess, *, context: int, rounds: int
) -> CaseResult:
    began = time.perf_counter()
    subject = holdfast().storing()
    server, ideal = ContenderResult(label=subject.label), ContenderResult(label="least")
    text = stage.prompts.text(context, seed=f"restore {context}")
    cold, cold_answer = await _first_token(stage, subject, text)
    noise: list[float] = []
    for number in range(rounds + 2):
        await stage.restart(subject)
        seconds, answer = await _first_token(stage, subject, text)
        if answer != cold_answer:
            raise HoldfastError("a restored context gave another answer than the cold one")
        if number < 2:  # noise
            noise.append(seconds)
            least.measure()
            continue
        times = msgspec.json.decode(least.measure(), type=LeastTimes)
        server.rounds.append(
            Sample(
                metrics={"first_token_seconds": [seconds], "cold_over_restored": [cold / seconds]}
            )
        )
        ideal.rounds.append(
            Sample(
                metrics={
                    "first_token_seconds": [times.total_seconds],
                    "read_seconds": [times.read_seconds],
                    "copy_seconds": [times.copy_seconds],
                    "forward_seconds": [times.forward_seconds],
                    "kv_bytes": [float(times.kv_bytes)],
                }
            )
        )
    server.rounds[0].metrics["first_token_seconds @ cold"] = [cold]
    stage.drop(subject)
    return CaseResult(
        scenario="restore",
        case=f"{context} tokens",
        model=model.name,
        settings={"context_tokens": context},
        contenders=[server, ideal],
        noise={"first_token_seconds": [noise[1] / noise[0]]},
        seconds=time.perf_counter() - began,
    )


async def _first_token(stage: Stage, subject: Contender, text: str) -> tuple[float, str]:
    running = await stage.server(subject)
    answer = await running.client.ask(user(text, max_tokens=8))
    if not answer.is_good:
        raise HoldfastError(f"the server did not answer: {answer.error}")
    return answer.first_seconds, answer.text
