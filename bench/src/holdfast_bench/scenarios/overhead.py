"""The cost of a request besides the model: one token, and 64 tokens, one request after the other."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_bench.figures import percentile
from holdfast_bench.load import user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial, errors_of

_PROMPT_TOKENS = 24


def _cases(scale: Scale) -> Sequence[Case]:
    requests = {"quick": 5, "normal": 15, "full": 30}[scale]
    return (
        Case(name="1 token", settings={"max_tokens": 1, "requests": requests, "streamed": False}),
        Case(
            name="1 token, streamed",
            settings={"max_tokens": 1, "requests": requests, "streamed": True},
        ),
        Case(
            name="64 tokens",
            settings={"max_tokens": 64, "requests": max(3, requests // 5), "streamed": True},
        ),
    )


async def _measure(trial: Trial) -> Sample:
    client, settings = await trial.client(), trial.settings
    answers = []
    for number in range(settings["requests"]):
        text = trial.text(_PROMPT_TOKENS, str(number))
        answers.append(
            await client.ask(
                user(text, max_tokens=settings["max_tokens"], streamed=settings["streamed"])
            )
        )
    good = [answer for answer in answers if answer.is_good]
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    sample.metrics["request_seconds"] = [answer.seconds for answer in good]
    if settings["streamed"]:
        sample.metrics["first_token_seconds"] = [answer.first_seconds for answer in good]
    if settings["max_tokens"] > 1:
        sample.metrics["tokens_per_second"] = [
            answer.completion_tokens / answer.seconds for answer in good
        ]
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
    as_installed_too=True,
)
