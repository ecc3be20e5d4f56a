"""The cost of a request besides the model: one token, and 64 tokens, one request after the other."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_bench.comparison import percentile
from holdfast_bench.contenders import AS_INSTALLED
from holdfast_bench.load import errors_of, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_PROMPT_TOKENS = 24


def _cases(scale: Scale) -> Sequence[Case]:
    requests = {"quick": 5, "normal": 15, "full": 30}[scale]
    return [
        Case(name=name, settings={"max_tokens": tokens, "requests": count, "streamed": streamed})
        for name, tokens, count, streamed in (
            ("1 token", 1, requests, False),
            ("1 token, streamed", 1, requests, True),
            ("64 tokens", 64, max(3, requests // 5), True),
        )
    ]


async def _measure(trial: Trial) -> Sample:
    client, settings = await trial.client(), trial.settings
    max_tokens, streamed = settings["max_tokens"], settings["streamed"]
    answers = []
    for number in range(settings["requests"]):
        text = trial.text(_PROMPT_TOKENS, str(number))
        answers.append(await client.ask(user(text, max_tokens=max_tokens, streamed=streamed)))
    good = [answer for answer in answers if answer.is_good]
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    sample.metrics["request_seconds"] = [answer.seconds for answer in good]
    if streamed:
        sample.metrics["first_token_seconds"] = [answer.first_seconds for answer in good]
    if max_tokens > 1:
        speeds = [answer.completion_tokens / answer.seconds for answer in good]
        sample.metrics["tokens_per_second"] = speeds
        sample.gaps = [gap for answer in good for gap in answer.gaps()]
        if sample.gaps:
            sample.metrics["gap_p50_seconds"] = [percentile(sample.gaps, 50)]
    return sample


SCENARIO = Scenario(
    name="overhead",
    summary="short requests one after another: 1 token, 64 tokens",
    model="holdfast-demo-endless",
    cases=_cases,
    measure=_measure,
    peers=("mlx_lm", AS_INSTALLED),
)
