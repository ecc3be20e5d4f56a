"""Gaps of a decoding stream while long prompts are prefilled, and the time to first token of these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from holdfast_bench.comparison import percentile
from holdfast_bench.load import Answer, Ask, Client, errors_of, read_answer, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

# more than is ever generated: the stream is closed after the long prompts
_STREAM_TOKENS = 6000
_STREAM_PROMPT_TOKENS = 64
_IDLE_TEXTS = 48  # texts before the long prompts
_LATER_SECONDS = 0.2
_POLL_SECONDS = 0.005


def _cases(scale: Scale) -> Sequence[Case]:
    one = {"quick": 2000, "normal": 8000, "full": 8000}[scale]
    cases = [Case(name=f"one prompt of {one}", settings={"prompts": [one]}, rounds=2)]
    if scale != "quick":
        cases.append(Case(name="three prompts of 2000", settings={"prompts": [2000] * 3}, rounds=2))
    return cases


async def _measure(trial: Trial) -> Sample:
    client = await trial.client()
    stream = client.call(
        user(trial.text(_STREAM_PROMPT_TOKENS, "stream"), max_tokens=_STREAM_TOKENS)
    )
    running = asyncio.create_task(stream.run())
    try:
        await _until_texts(stream.answer.pieces, running)
        sent_at = time.perf_counter()
        asks = [
            _long_prompt(trial, str(number), tokens)
            for number, tokens in enumerate(trial.settings["prompts"])
        ]
        long = await client.ask_all(asks)
        ended_at = time.perf_counter()
        await asyncio.sleep(_LATER_SECONDS)
    finally:
        stream.abort()
        await running
    decoded = read_answer(stream.answer)
    began_after = sent_at - stream.answer.sent_at
    sample = _sample(decoded, long.answers, begin=began_after, end=ended_at - stream.answer.sent_at)
    await _until_idle(client, trial)
    if not sample.errors:
        alone = await client.ask_all([_long_prompt(trial, "alone", trial.settings["prompts"][0])])
        sample.errors += errors_of(alone.answers)
        sample.metrics["alone_first_token_seconds"] = [each.first_seconds for each in alone.answers]
    return sample


def _long_prompt(trial: Trial, name: str, tokens: int) -> Ask:
    return user(trial.text(tokens, name), max_tokens=1)


def _sample(stream: Answer, long: Sequence[Answer], *, begin: float, end: float) -> Sample:
    sample = Sample(errors=errors_of(long), answers=[answer.text for answer in long])
    idle, stalled = stream.gaps(end=begin)[2:], stream.gaps(begin=begin, end=end)
    if stream.finish_reason:
        sample.errors.append("the stream ended before the long prompts were prefilled")
    if sample.errors or not idle or not stalled:
        return sample
    sample.gaps = stalled
    during = [at for at in stream.text_times if begin <= at <= end]
    sample.metrics = {
        "idle_gap_seconds": [percentile(idle, 50)],
        "stalled_gap_p50_seconds": [percentile(stalled, 50)],
        "stalled_gap_p99_seconds": [percentile(stalled, 99)],
        "stalled_gap_max_seconds": [max(stalled)],
        "stalled_tokens_per_second": [len(during) / (end - begin)],
        "long_first_token_seconds": [answer.first_seconds for answer in long],
    }
    return sample


async def _until_texts(pieces: Sequence[object], running: asyncio.Task[object]) -> None:
    """Wait until the stream has generated enough or has ended."""
    while len(pieces) < _IDLE_TEXTS and not running.done():
        await asyncio.sleep(_POLL_SECONDS)


async def _until_idle(client: Client, trial: Trial) -> None:
    """Wait until the server has noticed that the stream was closed."""
    for attempt in range(3):
        await client.ask(user(trial.text(16, f"idle {attempt}"), max_tokens=2))


SCENARIO = Scenario(
    name="stall",
    summary="gaps of a decoding stream during the prefill of long prompts",
    model="qwen3-9m",  # every token is a word, so gaps between texts are gaps between tokens
    cases=_cases,
    measure=_measure,
    rounds=3,
)
