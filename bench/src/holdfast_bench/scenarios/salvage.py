"""A long prompt is cut off at 70 % of its reading, by the client or by a kill, and comes again: how
much was for nothing?
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast_bench.load import Client, user
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial, errors_of

_CUT_AT = 0.7


def _cases(scale: Scale) -> Sequence[Case]:
    tokens = {"quick": 2000, "normal": 6000, "full": 12000}[scale]
    return [
        Case(
            name=f"{how} at 70 % of {tokens} tokens",
            settings={"prompt_tokens": tokens, "how": how},
            rounds=2,
        )
        for how in ("aborted", "killed")
    ]


async def _measure(trial: Trial) -> Sample:
    client, tokens = await trial.client(), trial.settings["prompt_tokens"]
    cold = await client.ask(user(trial.text(tokens, "cold"), max_tokens=1))
    text = trial.text(tokens, "cut off")
    if not await _cut_off(client, trial, text, after_seconds=_CUT_AT * cold.first_seconds):
        return Sample(
            errors=[
                "the prompt was read to its end before it could be cut off: the machine is too "
                "unsteady"
            ]
        )
    if trial.settings["how"] == "killed":
        server = await trial.stage.restart(trial.contender, kill=True)
        if server is None:
            return Sample(errors=["a server that was not started from here cannot be killed"])
        client = server.client
    again = await client.ask(user(text, max_tokens=1))
    sample = Sample(errors=errors_of([cold, again]), answers=[cold.text, again.text])
    if not sample.errors:
        sample.metrics = {
            "first_token_seconds @ cold": [cold.first_seconds],
            "first_token_seconds @ repeated": [again.first_seconds],
            "share_of_cold": [again.first_seconds / cold.first_seconds],
            "cached_share": [again.cached_tokens / again.prompt_tokens]
            if again.prompt_tokens
            else [],
        }
    return sample


async def _cut_off(client: Client, trial: Trial, text: str, *, after_seconds: float) -> bool:
    """Whether it was still being read when it was cut off."""
    call = client.call(user(text, max_tokens=1))
    running = asyncio.create_task(call.run())
    await asyncio.sleep(after_seconds)
    was_reading = not running.done()
    if trial.settings["how"] == "killed":
        trial.stage.drop(trial.contender, kill=True)  # the call sees its connection break
    call.abort()
    await running
    return was_reading


SCENARIO = Scenario(
    name="salvage",
    summary="a prompt aborted or a server killed at 70 % of the reading, then repeated",
    model="qwen3-9m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=2,
)
