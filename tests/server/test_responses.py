"""Responses through OpenAI's client, on the bundled model."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED = {"role": "user", "content": "What is the weather in Oslo?"}
SUM = {"role": "user", "content": "What is 17 + 25?"}


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def asked(client: openai.OpenAI, *items: Any, **options: Any) -> Any:
    return client.responses.create(
        model="demo", input=[*items], **{"temperature": 0, "store": False, **options}
    )


def back(response: Any) -> list[Any]:
    """The output as sent back by a client without a store."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def test_a_tool_call_is_answered_without_prefilling_anything_twice(
    client: openai.OpenAI,
) -> None:
    first = asked(client, ASKED, tools=[WEATHER])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "sunny, 21 degrees",
    }
    after = asked(client, ASKED, *back(first), result, tools=[WEATHER])
    assert "21 degrees" in after.output_text
    assert after.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_custom_tools_get_text_and_their_calls_stay_cached(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "tools": [{"type": "custom", "name": "note", "description": "Write a note"}]
    }
    first = asked(client, ASKED, **options, tool_choice={"type": "custom", "name": "note"})
    (call,) = first.output
    assert (call.type, call.name) == ("custom_tool_call", "note")
    assert not call.input.startswith("{")
    result = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "done"}],
    }
    after = asked(client, ASKED, *back(first), result, **options)
    assert after.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_a_schema_that_is_not_strict_is_followed_where_possible(
    client: openai.OpenAI,
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["OSLO", "ROME"]},
            "n": {"uniqueItems": True},
        },
    }
    open_ = WEATHER | {"parameters": schema | {"required": ["city"]}, "strict": None}
    held = asked(client, ASKED, tools=[open_], extra_body={"holdfast": {"explain": True}})
    assert json.loads(held.output[0].arguments)["city"] in ("OSLO", "ROME")
    assert held.holdfast["unenforced"] == ["get_weather/properties/n/uniqueItems"]
    (free,) = asked(client, ASKED, tools=[open_ | {"strict": False}]).output
    assert json.loads(free.arguments) == {"city": "Oslo"}


def test_a_stream_adds_up_to_the_whole_response(client: openai.OpenAI) -> None:
    one = asked(client, SUM)
    with client.responses.stream(model="demo", input=[SUM], temperature=0, store=False) as stream:
        kinds = [event.type for event in stream]
        got = stream.get_final_response()
    assert (got.output_text, got.usage.output_tokens) == (one.output_text, one.usage.output_tokens)
    assert (
        [item.type for item in got.output]
        == [item.type for item in one.output]
        == ["reasoning", "message"]
    )
    assert "17 + 25" in got.output[0].content[0].text
    assert 0 < got.usage.output_tokens_details.reasoning_tokens < got.usage.output_tokens
    assert kinds.count("response.reasoning_text.delta") > 1


def test_encrypted_and_plain_thoughts_cost_the_same(
    client: openai.OpenAI,
) -> None:
    options = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    first = asked(client, SUM, **options)
    thought = first.output[0]
    assert thought.summary[0].text
    assert thought.encrypted_content.isascii()
    assert thought.summary[0].text not in thought.encrypted_content
    again = {"role": "user", "content": "And 1 + 2?"}
    sealed = asked(client, SUM, *back(first), again)
    clear = asked(client, SUM, *back(asked(client, SUM)), again)
    assert sealed.usage.input_tokens == clear.usage.input_tokens
    assert sealed.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1


def test_a_format_is_followed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "store": False, "reasoning": {"effort": "none"}}
    parsed = client.responses.parse(input="Name a city.", text_format=City, **options)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.name in ("Oslo", "Rome")


def test_counted_input_tokens_are_those_of_the_response(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(
        model="demo", input=[ASKED], tools=[WEATHER], instructions="Be brief."
    )
    assert (
        counted.input_tokens
        == asked(client, ASKED, tools=[WEATHER], instructions="Be brief.").usage.input_tokens
    )


def test_an_unenforceable_strict_schema_is_refused_by_field(
    client: openai.OpenAI,
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    hosted, others = {"type": "web_search"}, {"type": "namespace", "name": "ns", "tools": [tool]}
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, ASKED, tools=[hosted, others])
    assert refused.value.param == "tools.1.tools.0.parameters"
    assert (
        asked(client, ASKED, tools=[hosted, tool | {"strict": None}], max_output_tokens=5).status
        == "incomplete"
    )


def test_a_compacted_conversation_is_continued(client: openai.OpenAI) -> None:
    first = asked(client, SUM)
    compacted = client.responses.compact(model="demo", input=[SUM, *back(first)])
    message, item = back(compacted)
    assert (message["role"], item["type"]) == ("user", "compaction")
    assert compacted.usage.input_tokens_details.cached_tokens > 0
    counted = client.responses.input_tokens.count(model="demo", input=[message, item, ASKED])
    without = client.responses.input_tokens.count(model="demo", input=[message, ASKED])
    assert counted.input_tokens > without.input_tokens
    assert asked(client, message, item, ASKED).status == "completed"
