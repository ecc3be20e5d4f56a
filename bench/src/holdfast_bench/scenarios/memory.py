"""Memory and disk space that a server keeps per token of agents' contexts, with and without a
common prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.answers import Answer
from holdfast_bench.load import user
from holdfast_bench.memory_use import cached_bytes, resident_bytes, sampled_memory
from holdfast_bench.results import Sample
from holdfast_bench.scenario import NOT_STARTED_HERE, Case, Scale, Scenario, Trial, errors_of

_ANSWER_TOKENS = 8
_TAIL_TOKENS = 24  # private tokens of each agent after the common prefix
_SETTLING_SECONDS = 1.0


def _cases(scale: Scale) -> Sequence[Case]:
    agents, context = {"quick": (2, 1000), "normal": (6, 2000), "full": (12, 4000)}[scale]
    on_one_prefix = Case(
        name=f"{agents} agents on one prefix of {context}",
        settings={
            "agents": agents,
            "context_tokens": context + _TAIL_TOKENS,
            "common_tokens": context,
        },
        rounds=1,
    )
    return [
        on_one_prefix,
        *(
            Case(
                name=f"{agents} agents of {context} tokens{', three quarters common' if shared else ''}",
                settings={
                    "agents": agents,
                    "context_tokens": context,
                    "common_tokens": context * 3 // 4 if shared else 0,
                },
                rounds=1,
            )
            for shared in (False, True)
        ),
    ]


async def _measure(trial: Trial) -> Sample:
    server = await trial.stage.restart(trial.contender)
    if server is None:
        return Sample(errors=[NOT_STARTED_HERE])
    await server.client.ask(
        user(trial.text(trial.settings["context_tokens"], "before"), max_tokens=_ANSWER_TOKENS)
    )
    await asyncio.sleep(_SETTLING_SECONDS)
    memory, disk = resident_bytes(server), server.store_bytes()
    cached = await cached_bytes(server)
    sample, answers = Sample(), list[Answer]()
    async with sampled_memory(server) as seen:
        for text in _contexts(trial):
            answers.append(await server.client.ask(user(text, max_tokens=_ANSWER_TOKENS)))
            if _is_looked_at(len(answers), trial.settings["agents"]):
                await asyncio.sleep(_SETTLING_SECONDS)
                step = f"{len(answers)} agent{'s' if len(answers) > 1 else ''}"
                sample.metrics[f"kept_bytes @ {step}"] = [float(resident_bytes(server) - memory)]
                sample.metrics[f"disk_bytes @ {step}"] = [float(server.store_bytes() - disk)]
                if cached is not None and (now := await cached_bytes(server)) is not None:
                    sample.metrics[f"ram_bytes @ {step}"] = [float(now - cached)]
    kept, on_disk = resident_bytes(server) - memory, server.store_bytes() - disk
    _add_totals(sample, answers, kept=kept, on_disk=on_disk)
    sample.metrics["peak_bytes"] = [float(max(seen))]
    return sample


def _is_looked_at(number: int, agents: int) -> bool:
    """Whether to measure after this agent: 1, 2, 4, 8 …, and the last."""
    return number == agents or number & (number - 1) == 0


def _contexts(trial: Trial) -> list[str]:
    common, whole = trial.settings["common_tokens"], trial.settings["context_tokens"]
    beginning = trial.text(common, "common") + " " if common else ""
    return [
        beginning + trial.text(whole - common, f"agent {number}")
        for number in range(trial.settings["agents"])
    ]


def _add_totals(sample: Sample, answers: Sequence[Answer], *, kept: int, on_disk: int) -> None:
    sample.errors, sample.answers = errors_of(answers), [answer.text for answer in answers]
    tokens = sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
    if tokens:
        sample.metrics |= {
            "kept_bytes_per_token": [kept / tokens],
            "disk_bytes": [float(on_disk)],
            "disk_bytes_per_token": [on_disk / tokens],
        }


SCENARIO = Scenario(
    name="memory",
    summary="memory and disk space per agent and token",
    model="qwen3-9m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=1,
    needs_start=True,
)
