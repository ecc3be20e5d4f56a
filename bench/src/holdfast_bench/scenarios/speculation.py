"""Speculative decoding: answers that repeat earlier text and others, one by one and eight together.

The questions suit the bundled model; they were chosen from its training tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast_bench.load import Answer, Ask, errors_of
from holdfast_bench.models import WIDE_DEMO
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_QUESTIONS = Path(__file__).with_name("speculation_questions.json")
_MAX_TOKENS = 200
_STREAMS = 8


def _cases(scale: Scale) -> Sequence[Case]:
    kinds = json.loads(_QUESTIONS.read_text())
    count = 4 if scale == "quick" else 8
    cases = [Case(name=kind, settings={"kinds": [kind], "questions": count}) for kind in kinds]
    together = {
        "8 streams": list(kinds),
        "8 streams of copies": ["copies"],
        "8 streams without copies": ["sums", "small talk"],
    }
    for name, names in together.items():
        settings = {"kinds": names, "questions": _STREAMS, "together": True}
        cases.append(Case(name=name, settings=settings))
    return cases


def _asks(trial: Trial, *, max_tokens: int) -> list[Ask]:
    """Questions of all kinds in turn. Each trial has its own tenant, so that no earlier answer
    helps.
    """
    kinds, count = trial.settings["kinds"], trial.settings["questions"]
    known = json.loads(_QUESTIONS.read_text())
    asks = []
    for number in range(count):
        of_kind: list[dict[str, Any]] = known[kinds[number % len(kinds)]]
        request = of_kind[number // len(kinds) if len(kinds) > 1 else number]
        more = {name: value for name, value in request.items() if name != "messages"}
        more["cache_salt"] = trial.seed
        asks.append(
            Ask(messages=tuple(request["messages"]), max_tokens=max_tokens, more_fields=more)
        )
    return asks


async def _measure(trial: Trial) -> Sample:
    client, settings = await trial.client(), trial.settings
    for ask in _asks(trial, max_tokens=1):  # prefill first: only decoding is measured
        await client.ask(ask)
    asks = _asks(trial, max_tokens=_MAX_TOKENS)
    if settings.get("together"):
        together = await client.ask_all(asks)
        answers, seconds = list(together.answers), together.seconds
    else:
        answers = [await client.ask(ask) for ask in asks]
        seconds = sum(answer.seconds for answer in answers)
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    if sample.errors:
        return sample
    tokens = sum(answer.completion_tokens for answer in answers)
    sample.metrics = {"tokens_per_second": [tokens / seconds]}
    if not settings.get("together"):
        sample.metrics["decode_tokens_per_second"] = _decode_speed(answers)
    return sample


def _decode_speed(answers: Sequence[Answer]) -> list[float]:
    """Decode speed; empty for tool calls, which lack text."""
    tokens = sum(answer.completion_tokens - 1 for answer in answers)
    seconds = sum(answer.seconds - answer.first_seconds for answer in answers)
    return [tokens / seconds] if seconds else []


SCENARIO = Scenario(
    name="speculation",
    summary="answers that repeat earlier text and others, with and without speculation",
    model="holdfast-demo",
    more_models=(WIDE_DEMO,),
    cases=_cases,
    measure=_measure,
    peers=("without-speculation",),
)
