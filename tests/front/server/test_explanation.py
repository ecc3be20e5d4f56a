from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.front.openai.answer import ChatCompletion, TextCompletion
from holdfast.front.output import ChoiceFinished, DivergentTexts, TextDelta
from holdfast.front.server.explanation import explain_choice, explanation_of
from holdfast.wire.events import CacheOutcome, CacheReport, Divergence, FinishReason, Timings
from tests.fakes.http_clients import CHAT, COMPLETIONS, chat_body, client_of, events_of
from tests.fakes.scripted_gateway import ScriptedGateway

DIVERGED = CacheReport(
    outcome=CacheOutcome.DIVERGED,
    ram_tokens=2,
    moved_tokens=1,
    disk_tokens=3,
    read_ahead_tokens=2,
    divergence=Divergence(position=5, stored_token_id=7, prompt_token_id=8),
    lookup_seconds=0.25,
    restore_seconds=0.5,
    waited_seconds=0.75,
)


def end(memory: CacheReport = DIVERGED, *, index: int = 0) -> ChoiceFinished:
    return ChoiceFinished(
        index=index,
        reason=FinishReason.STOP,
        prompt_tokens=7,
        completion_tokens=1,
        timings=Timings(queue_seconds=1.0, prefill_seconds=2.0),
        cache_report=memory,
        divergent=DivergentTexts(before="It is ", stored="noon", prompt="dusk")
        if memory.divergence
        else None,
    )


def script() -> list[Any]:
    return [TextDelta(index=0, text="a"), end()]


def check(explained: Any) -> None:
    seconds = explained.pop("seconds")
    assert explained == {
        "index": 0,
        "prompt_tokens": 7,
        "ram_tokens": 2,
        "moved_tokens": 1,
        "shared_tokens": 0,
        "disk_tokens": 3,
        "read_tokens": 2,
        "read_ahead_tokens": 2,
        "put_back_tokens": 0,
        "dropped_tokens": 0,
        "unused_tokens": 0,
        "reason": "diverged",
        "explanation": "The prompt differs from the cached prompt at token 5, after 'It is ': "
        "cached 'noon', now 'dusk'. "
        "2 tokens were prefilled for this turn in advance, while the server was idle.",
        "difference": {
            "position": 5,
            "before": "It is ",
            "stored": {"id": 7, "text": "noon"},
            "prompt": {"id": 8, "text": "dusk"},
        },
    }
    assert seconds.pop("first_text") >= seconds.pop("accept") >= 0
    assert seconds == {
        "queue": 1.0,
        "lookup": 0.25,
        "waited_for_another": 0.75,
        "restore": 0.5,
        "prefill": 2.0,
    }


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [(CHAT, chat_body(), ChatCompletion), (COMPLETIONS, {"prompt": "a"}, TextCompletion)],
)
async def test_a_whole_answer_has_it_next_to_the_usage(
    path: str, body: dict[str, Any], shape: type
) -> None:
    async with client_of(ScriptedGateway(script=script())) as client:
        response = await client.post(path, json={**body, "holdfast": {"explain": True}})
    msgspec.json.decode(response.content, type=shape, strict=True)
    check(response.json()["holdfast"])


@pytest.mark.parametrize("shows_usage", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [(CHAT, chat_body(), ChatCompletion), (COMPLETIONS, {"prompt": "a"}, TextCompletion)],
)
async def test_a_stream_has_it_in_its_last_chunk(
    path: str, body: dict[str, Any], shape: type, shows_usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if shows_usage else {}
    async with client_of(ScriptedGateway(script=script())) as client:
        response = await client.post(
            path, json={**body, "stream": True, "holdfast": {"explain": True}, **options}
        )
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    for event in events:
        msgspec.json.decode(json.dumps(event).encode(), type=shape, strict=True)
    assert all("holdfast" not in event for event in events[:-1])
    assert events[-1]["choices"] == []
    assert ("usage" in events[-1]) == shows_usage
    check(events[-1]["holdfast"])


def test_further_choices_follow_in_order() -> None:
    choices = [
        explain_choice(end(index=index), accept_seconds=0.0, first_text_seconds=None)
        for index in (2, 0, 1)
    ]
    explained = explanation_of(choices)
    assert explained is not None
    assert explained.index == 0
    assert [choice.index for choice in explained.further_choices] == [1, 2]
    assert explanation_of([]) is None


@pytest.mark.parametrize("outcome", CacheOutcome)
def test_every_outcome_has_a_distinct_explanation(outcome: CacheOutcome) -> None:
    def words(memory: CacheReport) -> str:
        return explain_choice(end(memory), accept_seconds=0.0, first_text_seconds=None).explanation

    divergence = DIVERGED.divergence if outcome is CacheOutcome.DIVERGED else None
    report = CacheReport(outcome=outcome, unused_tokens=1234, divergence=divergence)
    others = {
        words(msgspec.structs.replace(report, outcome=other))
        for other in CacheOutcome
        if other is not outcome
    }
    assert words(report).endswith(".")
    assert words(report) not in others
    assert ("differs" in words(report)) == (outcome is CacheOutcome.DIVERGED)
    if outcome in (CacheOutcome.EVICTED, CacheOutcome.NO_BOUNDARY):
        assert "1,234 more tokens" in words(report)
    assert "another request" in words(msgspec.structs.replace(report, waited_for_another=True))


async def test_unenforced_grammars_are_named() -> None:
    places = ("tools.0.function.parameters.properties.x.format",)
    async with client_of(ScriptedGateway(unenforced=places)) as client:
        explained = await client.post(CHAT, json=chat_body(holdfast={"explain": True}))
        plain = await client.post(CHAT, json=chat_body())
    assert explained.json()["holdfast"]["unenforced"] == [*places]
    assert "holdfast" not in plain.json()
