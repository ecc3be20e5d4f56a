"""Requests to workers that draft, and their answers without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.requests import SamplingParams
from tests.fakes.caching_worker import CachingWorker, greedy, random_prompt

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=5)


def requests(*, longer: int = 0, **more: Any) -> list[SequenceRequest]:
    """Requests of several lengths: two share a prefix, one samples, one wants log-probabilities.

    longer: more tokens for each answer.
    """
    shared = random_prompt(70)
    return [
        greedy("a", shared, max_tokens=18 + longer, **more),
        greedy("b", (*shared, 5, 6, 7), max_tokens=15 + longer, **more),
        greedy("c", random_prompt(9, "c"), max_tokens=12 + longer, want_logprobs=True, **more),
        SequenceRequest(
            request_id="d",
            prompt_token_ids=greedy("d", random_prompt(30, "d")).prompt_token_ids,
            max_tokens=16 + longer,
            sampling=SEEDED,
            **more,
        ),
    ]


def plain_answers(
    script: list[Sequence[Command]], *, name: str = "llama", **more: Any
) -> dict[str, list[int]]:
    inbox = CachingWorker(name, **more).serve(script)
    asked = [each for commands in script for each in commands if isinstance(each, SequenceRequest)]
    return {each.request_id: inbox.tokens(each.request_id) for each in asked}
