"""Pauses with a real engine and a real cache: the same tokens, and no request waits for the prefill
of a paused one.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from holdfast.wire.commands import Command, ControlAction, SequenceControl, SequenceRequest
from holdfast.wire.events import Finished
from holdfast.wire.requests import SamplingParams, TokenIds
from tests.fakes.caching_worker import CachingWorker, greedy, random_prompt
from tests.fakes.script_inbox import pause, resume
from tests.fakes.slow import slow

NOTHING: list[Command] = []
NAMES = ["llama", "gemma3_text", "qwen3_next"]


def seeded(name: str, tokens: tuple[int, ...], *, max_tokens: int) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(tokens),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=7),
    )


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("llama", 0),
        ("qwen3_next", 0),
        *slow(("gemma3_text", 0), *itertools.product(NAMES, range(1, 6))),
    ],
)
def test_paused_preempted_and_resumed_answers_are_the_same(
    name: str, seed: int, tmp_path: Path
) -> None:
    shared = random_prompt(70)
    asked = [
        make(
            f"{make.__name__} {index}",
            shared + random_prompt(10 * index + 1, str(index)),
            max_tokens=16,
        )
        for make in (greedy, seeded)
        for index in range(2)
    ]
    alone = {
        each.request_id: CachingWorker(name).serve([[each]]).tokens(each.request_id)
        for each in asked
    }
    dice = random.Random(seed)
    script: list[list[Command]] = [[each] for each in asked]
    for _ in range(40):
        action: ControlAction = dice.choice(["pause", "resume"])
        script.append([SequenceControl(action=action, request_id=dice.choice(asked).request_id)])
    script.append([resume(each.request_id) for each in asked])
    inbox = CachingWorker(name, tmp_path, budget_tokens=220).serve(script)
    assert {each.request_id: inbox.tokens(each.request_id) for each in asked} == alone


def test_no_request_waits_for_the_prefill_of_a_paused_one() -> None:
    long = random_prompt(600)
    first, second = greedy("first", long), greedy("second", (*long, 1, 2, 3))
    script = [[first], [second], NOTHING, [pause("first")], *[NOTHING] * 200, [resume("first")]]
    inbox = CachingWorker().serve(script)
    ends = [event.request_id for event in inbox.events if isinstance(event, Finished)]
    assert ends == ["second", "first"]
    assert inbox.tokens("first") == CachingWorker().serve([[first]]).tokens("first")
