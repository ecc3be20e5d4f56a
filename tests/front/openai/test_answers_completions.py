from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from holdfast.front.openai.answers import TextCompletion, completion_logprobs
from holdfast.front.output import TextDelta, TokenText
from holdfast.front.request import GenerationRequest
from tests.fakes.http_clients import (
    COMPLETIONS,
    NOTHING_DRAFTED,
    client_of,
    completion_body,
    events_of,
)
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway, answer, token


async def answered(gateway: ScriptedGateway, **fields: Any) -> Any:
    async with client_of(gateway) as client:
        response = await client.post(COMPLETIONS, json=completion_body(**fields))
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        msgspec.json.decode(response.content, type=TextCompletion)
        return response.json()
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    for event in events:
        msgspec.json.decode(json.dumps(event).encode(), type=TextCompletion)
    return events


async def test_a_whole_completion_has_the_golden_shape() -> None:
    got = await answered(ScriptedGateway(script=answer("Hel", "lo")))
    assert got.pop("id").startswith("cmpl-")
    assert got.pop("created") > 0
    assert got.pop("system_fingerprint")
    assert got == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 2,
            "total_tokens": PROMPT_TOKENS + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {**NOTHING_DRAFTED, "reasoning_tokens": 0},
        },
    }


async def test_a_streamed_completion_has_the_golden_events() -> None:
    events = await answered(
        ScriptedGateway(script=answer("Hel", "lo")),
        stream=True,
        stream_options={"include_usage": True},
    )
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "lo", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert events[-1]["usage"]["total_tokens"] == PROMPT_TOKENS + 2


def by_prompt(request: GenerationRequest) -> Any:
    assert isinstance(request.prompt, str)
    text = request.prompt
    return [*answer(text + "0", cached_tokens=1), *answer(text + "1", index=1, cached_tokens=5)]


async def test_choices_of_several_prompts_are_numbered_consecutively() -> None:
    got = await answered(ScriptedGateway(script=by_prompt), prompt=["a", "b"], n=2)
    assert [choice["text"] for choice in got["choices"]] == ["a0", "a1", "b0", "b1"]
    assert got["usage"]["prompt_tokens"] == 2 * PROMPT_TOKENS
    assert got["usage"]["completion_tokens"] == 4
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    events = await answered(ScriptedGateway(script=by_prompt), prompt=["a", "b"], n=2, stream=True)
    texts: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_logprobs_have_the_completions_shape() -> None:
    tokens = (
        token("Hel", -0.25, rivals=(("Hel", -0.25), ("Yo", -2.0))),
        token("lo", -3.0, offset=3, rivals=(("la", -0.1),)),
    )
    script = [
        TextDelta(index=0, text="Hello", token_ids=(1, 2), logprobs=tokens),
        answer("a", "b")[-1],
    ]
    expected = {
        "text_offset": [0, 3],
        "token_logprobs": [-0.25, -3.0],
        "tokens": ["Hel", "lo"],
        "top_logprobs": [{"Hel": -0.25, "Yo": -2.0}, {"la": -0.1, "lo": -3.0}],
    }
    assert (await answered(ScriptedGateway(script=script), logprobs=2))["choices"][0][
        "logprobs"
    ] == expected
    assert (await answered(ScriptedGateway(script=script), logprobs=2, stream=True))[0]["choices"][
        0
    ]["logprobs"] == expected


def test_the_first_token_of_an_echoed_prompt_lacks_a_logprob() -> None:
    shape = completion_logprobs([token("The", math.nan), token(" end", -1.0, offset=3)])
    assert shape.token_logprobs == [None, -1.0]
    assert shape.top_logprobs == [None, {" end": -1.0}]


def test_a_partial_character_is_shown_as_bytes() -> None:
    shape = completion_logprobs([TokenText(text="\ufffd", raw=b"\xe2\x98", logprob=-1.0)])
    assert shape.tokens == ["bytes:\\xe2\\x98"]


def test_of_two_tokens_with_equal_text_the_likelier_is_shown() -> None:
    shape = completion_logprobs([token("a", -0.1, rivals=(("a", -0.1), ("b", -1.0), ("b", -2.0)))])
    assert shape.top_logprobs == [{"a": -0.1, "b": -1.0}]
