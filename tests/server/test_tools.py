"""Tools, thoughts and answer formats through OpenAI's client, on the bundled model, streamed and
whole.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]


def whole(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="demo", messages=messages, **{"temperature": 0, **options}
    )


def streamed(client: openai.OpenAI, messages: Any, **options: Any) -> dict[str, Any]:
    """The sum of a stream's chunks: message, finish reason and usage."""
    message: dict[str, Any] = {
        "content": "",
        "reasoning_content": "",
        "calls": [],
        "logprobs": [],
        "ends": [],
    }
    for chunk in whole(
        client, messages, stream=True, stream_options={"include_usage": True}, **options
    ):
        message["usage"] = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            message["ends"] += [choice.finish_reason] if choice.finish_reason else []
            message["logprobs"] += (
                [token.token for token in choice.logprobs.content] if choice.logprobs else []
            )
            for part in delta.tool_calls or []:
                if part.id:
                    assert part.index == len(message["calls"])
                    message["calls"].append([part.function.name, ""])
                message["calls"][part.index][1] += part.function.arguments or ""
    return message


def test_a_tool_call_and_its_result_are_exchanged(client: openai.OpenAI) -> None:
    choice = whole(client, ASKED, tools=[WEATHER]).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    after = whole(client, [*ASKED, choice.message, result], tools=[WEATHER])
    assert "21 degrees" in after.choices[0].message.content
    assert after.usage.prompt_tokens_details.cached_tokens > 100, "the first turn was read again"


def test_a_streamed_call_equals_a_whole_one(client: openai.OpenAI) -> None:
    got = streamed(client, ASKED, tools=[WEATHER], logprobs=True)
    one = whole(client, ASKED, tools=[WEATHER], logprobs=True)
    choice = one.choices[0]
    assert got["calls"] == [
        [call.function.name, call.function.arguments] for call in choice.message.tool_calls
    ]
    assert (got["content"], got["ends"]) == ("", ["tool_calls"])
    assert got["logprobs"] == [token.token for token in choice.logprobs.content]
    assert "".join(got["logprobs"]).startswith("<tool_call>")
    assert got["usage"].completion_tokens == one.usage.completion_tokens


def test_a_thought_is_separate_from_the_answer_and_counted(client: openai.OpenAI) -> None:
    one = whole(client, SUM)
    message = one.choices[0].message
    assert "42" in message.content
    assert "17 + 25" in message.reasoning_content
    assert message.reasoning == message.reasoning_content
    got = streamed(client, SUM)
    assert (got["content"], got["reasoning_content"]) == (
        message.content,
        message.reasoning_content,
    )
    assert 0 < one.usage.completion_tokens_details.reasoning_tokens < one.usage.completion_tokens
    assert got["usage"].completion_tokens == one.usage.completion_tokens


def test_a_thought_that_is_cut_leaves_no_content(client: openai.OpenAI) -> None:
    choice = whole(client, SUM, max_tokens=10).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning_content


@pytest.mark.parametrize(
    "off",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"think": False}},
        {"extra_body": {"thinking": {"type": "disabled"}}},
    ],
)
def test_thinking_can_be_disabled_in_many_ways(client: openai.OpenAI, off: dict[str, Any]) -> None:
    message = whole(client, SUM, **off).choices[0].message
    assert message.content
    assert not hasattr(message, "reasoning_content")


def test_stop_strings_apply_only_to_visible_text(
    client: openai.OpenAI,
) -> None:
    plain = whole(client, SUM).choices[0].message
    within = plain.reasoning_content.split()[1]
    assert within not in plain.content
    stopped = whole(client, SUM, stop=[within, "42"]).choices[0]
    assert (stopped.message.reasoning_content, stopped.finish_reason) == (
        plain.reasoning_content,
        "stop",
    )
    assert stopped.message.content == plain.content.partition("42")[0]
    assert (
        whole(client, ASKED, tools=[WEATHER], stop=["Oslo"]).choices[0].finish_reason
        == "tool_calls"
    )


def test_calls_of_several_choices_have_different_ids(
    client: openai.OpenAI,
) -> None:
    choices = whole(client, ASKED, tools=[WEATHER], n=3).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["get_weather"] * 3
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


def test_functions_in_the_request_give_a_function_call(client: openai.OpenAI) -> None:
    choice = whole(client, ASKED, functions=[WEATHER["function"]]).choices[0]
    assert (choice.finish_reason, choice.message.function_call.name) == (
        "function_call",
        "get_weather",
    )
    message = {
        "role": "assistant",
        "content": None,
        "function_call": choice.message.function_call.model_dump(),
    }
    result = {"role": "function", "name": "get_weather", "content": "sunny, 21 degrees"}
    after = whole(client, [*ASKED, message, result], functions=[WEATHER["function"]]).choices[0]
    assert "21 degrees" in after.message.content


def test_images_become_text_in_tool_results_only(
    client: openai.OpenAI,
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [image]},
    ]
    assert whole(client, [*ASKED, *turns], tools=[WEATHER]).choices[0].finish_reason in (
        "stop",
        "tool_calls",
    )
    with pytest.raises(openai.BadRequestError) as refused:
        whole(client, [{"role": "user", "content": [image]}])
    assert refused.value.param == "messages.0.content.0.image_url"
