"""A growing session: a long first prompt, then many short turns.

Disk space must grow with tokens, not with turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.load import Answer, Ask, Message, cached_share, errors_of
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_ANSWER_TOKENS = 16
_TURN_TOKENS = 100
_SETTLING_SECONDS = 0.5  # until blocks are written
_LOOKS = 10  # number of measurements of the folder


def _cases(scale: Scale) -> Sequence[Case]:
    context, turns = {"quick": (2000, 10), "normal": (20_000, 20), "full": (100_000, 50)}[scale]
    settings = {"context_tokens": context, "turns": turns}
    return [Case(name=f"{context} tokens, then {turns} turns", settings=settings, rounds=1)]


async def _measure(trial: Trial) -> Sample:
    sample, settings = Sample(), trial.settings
    server = await trial.stage.server(trial.contender)
    before = server.store_bytes()
    messages: list[Message] = [
        {"role": "user", "content": trial.text(settings["context_tokens"], "beginning")}
    ]
    for turn in range(settings["turns"] + 1):
        answer = await server.client.ask(Ask(messages=tuple(messages), max_tokens=_ANSWER_TOKENS))
        sample.errors += errors_of([answer])
        if not answer.is_good:
            return sample
        if turn % max(1, settings["turns"] // _LOOKS) == 0:
            await asyncio.sleep(_SETTLING_SECONDS)
            _record_sample(sample, answer, turn=turn, disk_bytes=server.store_bytes() - before)
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": trial.text(_TURN_TOKENS, f"turn {turn}")},
        ]
    return sample


def _record_sample(sample: Sample, answer: Answer, *, turn: int, disk_bytes: int) -> None:
    tokens = answer.prompt_tokens + answer.completion_tokens
    sample.metrics |= {
        f"context_tokens @ turn {turn}": [float(tokens)],
        f"disk_bytes @ turn {turn}": [float(disk_bytes)],
        f"disk_bytes_per_token @ turn {turn}": [disk_bytes / tokens],
        f"first_token_seconds @ turn {turn}": [answer.first_seconds],
        f"cached_share @ turn {turn}": cached_share([answer]),
    }


SCENARIO = Scenario(
    name="growth",
    summary="disk space of a long session over many turns",
    model="qwen3-long",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=1,
)
