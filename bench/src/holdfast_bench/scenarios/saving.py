"""Gaps of eight streams while contexts are restored, and while new ones are stored.

Restored contexts are compared with the same number of short requests. The cost of writing is the ratio to a
server without a store (`--peer-command`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.comparison import percentile
from holdfast_bench.load import Answer, Client, cached_share, errors_of, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_STREAMS = 8
_STREAM_PROMPT_TOKENS = 64
_SHORT_TOKENS = 8
_LEAST_GAPS = 20


def _cases(scale: Scale) -> Sequence[Case]:
    contexts, context, tokens = {
        "quick": (4, 500, 96),
        "normal": (8, 2000, 192),
        "full": (16, 4000, 384),
    }[scale]
    settings = {"contexts": contexts, "context_tokens": context, "max_tokens": tokens}
    name = f"{_STREAMS} streams, {contexts} contexts of {context}"
    return [Case(name=name, settings=settings, rounds=4)]


async def _measure(trial: Trial) -> Sample:
    sample, count, tokens = Sample(), trial.settings["contexts"], trial.settings["context_tokens"]

    def texts(kind: str, tokens: int) -> list[str]:
        return [trial.text(tokens, f"{kind} {number}") for number in range(count)]

    stored = texts("stored", tokens)
    await _one_after_the_other(await trial.client(), stored, sample)
    client = (await trial.stage.restart(trial.contender)).client
    for name, company in (
        ("alone", []),
        ("short requests", texts("short", _SHORT_TOKENS)),
        ("restored contexts", stored),
        ("new contexts", texts("new", tokens)),
    ):
        await _decode_beside(trial, client, sample, name=name, company=company)
    short, restored = (
        sample.metrics.get(f"gap_p50_seconds @ {name}")
        for name in ("short requests", "restored contexts")
    )
    if short and restored:
        sample.metrics["restored_gap_ratio"] = [restored[0] / short[0]]
    return sample


async def _decode_beside(
    trial: Trial, client: Client, sample: Sample, *, name: str, company: Sequence[str]
) -> None:
    """Measure streams while other requests run."""
    prompts = [trial.text(_STREAM_PROMPT_TOKENS, f"{name} {number}") for number in range(_STREAMS)]
    asks = [user(prompt, max_tokens=trial.settings["max_tokens"]) for prompt in prompts]
    streams = asyncio.create_task(client.ask_all(asks))
    beside = asyncio.create_task(_one_after_the_other(client, company, sample))
    together, others = await streams, await beside
    sample.errors += errors_of(together.answers)
    gaps = [gap for answer in together.answers if answer.is_good for gap in answer.gaps()]
    if len(gaps) >= _LEAST_GAPS:
        sample.metrics[f"gap_p50_seconds @ {name}"] = [percentile(gaps, 50)]
        sample.metrics[f"gap_p99_seconds @ {name}"] = [percentile(gaps, 99)]
    sample.metrics[f"cached_share @ {name}"] = cached_share(others)


async def _one_after_the_other(
    client: Client, texts: Sequence[str], sample: Sample
) -> list[Answer]:
    answers = [await client.ask(user(text, max_tokens=1)) for text in texts]
    sample.errors += errors_of(answers)
    return answers


SCENARIO = Scenario(
    name="saving",
    summary="8 decoding streams beside restored contexts and new stored ones",
    model="qwen3-30m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=2,
)
