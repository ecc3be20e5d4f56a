"""Prefill: one long prompt, one generated token."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_bench.contenders import AS_INSTALLED
from holdfast_bench.load import errors_of, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial


def _cases(scale: Scale) -> Sequence[Case]:
    sizes = {"quick": (512,), "normal": (512, 2000), "full": (512, 2000, 8000)}[scale]
    return [Case(name=f"{size} tokens", settings={"prompt_tokens": size}) for size in sizes]


async def _measure(trial: Trial) -> Sample:
    client = await trial.client()
    answer = await client.ask(user(trial.text(trial.settings["prompt_tokens"]), max_tokens=1))
    sample = Sample(errors=errors_of([answer]), answers=[answer.text])
    if answer.is_good:
        sample.metrics["first_token_seconds"] = [answer.first_seconds]
        if answer.prompt_tokens:
            speed = answer.prompt_tokens / answer.first_seconds
            sample.metrics["prompt_tokens_per_second"] = [speed]
    return sample


SCENARIO = Scenario(
    name="prefill",
    summary="prefill: tokens per second of a long prompt",
    model="qwen3-30m",
    cases=_cases,
    measure=_measure,
    peers=("mlx_lm", AS_INSTALLED),
    rounds=3,
)
