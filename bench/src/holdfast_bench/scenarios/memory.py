"""Memory and disk space that a server keeps per token of agents' contexts, with and without a
common prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.load import Answer, errors_of, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_ANSWER_TOKENS = 8
_TAIL_TOKENS = 24  # private tokens of each agent after the common prefix
_SETTLING_SECONDS = 1.0


def _cases(scale: Scale) -> Sequence[Case]:
    agents, context = {"quick": (2, 1000), "normal": (6, 2000), "full": (12, 4000)}[scale]
    own = f"{agents} agents of {context} tokens"
    return [
        Case(
            name=name, settings={"agents": agents, "context_tokens": whole, "common_tokens": common}
        )
        for name, whole, common in (
            (f"{agents} agents on one prefix of {context}", context + _TAIL_TOKENS, context),
            (own, context, 0),
            (f"{own}, three quarters common", context, context * 3 // 4),
        )
    ]


async def _measure(trial: Trial) -> Sample:
    server = await trial.stage.restart(trial.contender)
    before = trial.text(trial.settings["context_tokens"], "before")
    await server.client.ask(user(before, max_tokens=_ANSWER_TOKENS))
    await asyncio.sleep(_SETTLING_SECONDS)
    memory, disk = server.use().resident_bytes, server.store_bytes()
    cached = await server.cached_bytes()
    sample, answers = Sample(), list[Answer]()
    async with server.sampled_memory() as seen:
        for text in _contexts(trial):
            answers.append(await server.client.ask(user(text, max_tokens=_ANSWER_TOKENS)))
            if _is_looked_at(len(answers), trial.settings["agents"]):
                await asyncio.sleep(_SETTLING_SECONDS)
                step = f"{len(answers)} agent{'s' if len(answers) > 1 else ''}"
                kept, on_disk = server.use().resident_bytes - memory, server.store_bytes() - disk
                sample.metrics[f"kept_bytes @ {step}"] = [float(kept)]
                sample.metrics[f"disk_bytes @ {step}"] = [float(on_disk)]
                if cached is not None and (now := await server.cached_bytes()) is not None:
                    sample.metrics[f"ram_bytes @ {step}"] = [float(now - cached)]
    sample.errors, sample.answers = errors_of(answers), [answer.text for answer in answers]
    tokens = sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
    if tokens:
        kept, on_disk = server.use().resident_bytes - memory, server.store_bytes() - disk
        sample.metrics |= {
            "kept_bytes_per_token": [kept / tokens],
            "disk_bytes": [float(on_disk)],
            "disk_bytes_per_token": [on_disk / tokens],
        }
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


SCENARIO = Scenario(
    name="memory",
    summary="memory and disk space per agent and token",
    model="qwen3-9m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=1,
)
