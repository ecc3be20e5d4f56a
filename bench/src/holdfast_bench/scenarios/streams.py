"""Concurrent streams with prompts of equal or ragged lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast_bench.comparison import percentile
from holdfast_bench.load import Together, errors_of, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_EQUAL_TOKENS = 256
# 50 to 1,500 tokens for 8 streams, repeated for more
_RAGGED_TOKENS = (50, 1500, 120, 800, 300, 1100, 75, 500)


def _cases(scale: Scale) -> Sequence[Case]:
    equal, ragged = {
        "quick": ((1, 4), (8,)),
        "normal": ((1, 8), (2, 8)),
        "full": ((1, 2, 4, 8, 16), (2, 4, 8, 16)),
    }[scale]
    lengths = {"equal": (_EQUAL_TOKENS,), "ragged": _RAGGED_TOKENS}
    return [
        Case(
            name=f"{count} {kind}",
            settings={
                "streams": count,
                "kind": kind,
                "prompt_tokens": list(itertools.islice(itertools.cycle(lengths[kind]), count)),
                "max_tokens": 128 if scale == "full" else 64,
            },
        )
        for kind, counts in (("equal", equal), ("ragged", ragged))
        for count in counts
    ]


async def _measure(trial: Trial) -> Sample:
    client, settings = await trial.client(), trial.settings
    asks = [
        user(trial.text(tokens, str(number)), max_tokens=settings["max_tokens"])
        for number, tokens in enumerate(settings["prompt_tokens"])
    ]
    together = await client.ask_all(asks)
    good = [answer for answer in together.answers if answer.is_good]
    texts = [answer.text for answer in together.answers]
    sample = Sample(errors=errors_of(together.answers), answers=texts)
    if len(good) < len(asks):
        return sample
    sample.gaps = [gap for answer in good for gap in answer.gaps()]
    sample.metrics = {
        "tokens_per_second": [together.completion_tokens / together.seconds],
        "decode_tokens_per_second": _decode_speed(together),
        "first_token_seconds": [answer.first_seconds for answer in good],
        "gap_p50_seconds": [percentile(sample.gaps, 50)] if sample.gaps else [],
        "gap_p99_seconds": [percentile(sample.gaps, 99)] if sample.gaps else [],
    }
    return sample


def _decode_speed(together: Together) -> list[float]:
    """Texts per second after the last stream has started. Each text counts as a token."""
    began = max(answer.first_seconds for answer in together.answers)
    later = sum(1 for answer in together.answers for at in answer.text_times if at > began)
    ended = max(answer.text_times[-1] for answer in together.answers if answer.text_times)
    return [later / (ended - began)] if ended > began else []


SCENARIO = Scenario(
    name="streams",
    summary="1 to 16 concurrent streams, equal and ragged prompts",
    model="qwen3-30m",
    cases=_cases,
    measure=_measure,
    rounds=4,
)
