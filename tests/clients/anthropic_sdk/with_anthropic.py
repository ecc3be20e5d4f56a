"""Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic
from conversations import (
    SUM_QUESTION,
    WEATHER_QUESTION,
    WEATHER_TOOL,
    Server,
    called,
    run,
    summed,
    thought,
    told,
)
from pydantic import BaseModel

_DEFINED = WEATHER_TOOL["function"]
TOOL = {
    "name": _DEFINED["name"],
    "description": _DEFINED["description"],
    "input_schema": _DEFINED["parameters"],
}


class Report(BaseModel):
    city: str
    degrees: int


def client_of(server: Server) -> Anthropic:
    return Anthropic(base_url=server.root, api_key=server.api_key, max_retries=0)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def options_of(server: Server, **options: Any) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": 300, "extra_body": {"temperature": 0}, **options}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def thought_of(message: Any) -> Any:
    (block,) = [block for block in message.content if block.type == "thinking"]
    return block


def _then(first: Any) -> list[dict[str, Any]]:
    """The turns that follow a message with a call: the message itself, and the result."""
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": called(call.name, call.input),
    }
    return [{"role": "assistant", "content": first.content}, user([result])]


def tool_loop(server: Server) -> None:
    client, messages, options = (
        client_of(server),
        [user(WEATHER_QUESTION)],
        options_of(server, tools=[TOOL]),
    )
    first = client.messages.create(messages=messages, **options)
    assert first.stop_reason == "tool_use"
    last = client.messages.create(messages=messages + _then(first), **options)
    assert last.stop_reason == "end_turn"
    told(text_of(last))
    assert last.usage.cache_read_input_tokens > 0


def tool_loop_streamed(server: Server) -> None:
    client, messages, options = (
        client_of(server),
        [user(WEATHER_QUESTION)],
        options_of(server, tools=[TOOL]),
    )
    with client.messages.stream(messages=messages, **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert "input_json" in kinds
    with client.messages.stream(messages=messages + _then(first), **options) as stream:
        told("".join(stream.text_stream))


def tool_runner(server: Server) -> None:
    from anthropic import beta_tool

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        return called("get_weather", {"city": city})

    runner = client_of(server).beta.messages.tool_runner(
        messages=[user(WEATHER_QUESTION)], tools=[get_weather], **options_of(server)
    )
    told(text_of(runner.until_done()))


def thinking(server: Server) -> None:
    client, options = client_of(server), options_of(server, max_tokens=2000)
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(messages=[user(SUM_QUESTION)], **options)
    summed(text_of(answer))
    thought(thought_of(answer).thinking)
    assert thought_of(answer).signature
    turns = [
        user(SUM_QUESTION),
        {"role": "assistant", "content": answer.content},
        user("What is 12 + 30?"),
    ]
    summed(text_of(client.messages.create(messages=turns, **options)))


def thinking_streamed(server: Server) -> None:
    thoughts = ""
    with client_of(server).messages.stream(
        messages=[user(SUM_QUESTION)], thinking={"type": "adaptive"}, **options_of(server)
    ) as stream:
        for event in stream:
            thoughts += event.thinking if event.type == "thinking" else ""
        answer = stream.get_final_message()
    summed(text_of(answer))
    thought(thoughts)
    assert thought_of(answer).thinking == thoughts
    assert thought_of(answer).signature


def thinking_switched_off(server: Server) -> None:
    answer = client_of(server).messages.create(
        messages=[user(SUM_QUESTION)], thinking={"type": "disabled"}, **options_of(server)
    )
    assert [block.type for block in answer.content] == ["text"]


def structure(server: Server) -> None:
    answer = client_of(server).messages.parse(
        messages=[user("Write JSON.")], output_format=Report, **options_of(server)
    )
    assert isinstance(answer.parsed_output, Report)


def forced_call(server: Server) -> None:
    answer = client_of(server).messages.create(
        messages=[user("hi")],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        **options_of(server),
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert set(call.input) == {"city"}


def counted_tokens(server: Server) -> None:
    client, given = client_of(server), {"messages": [user(WEATHER_QUESTION)], "tools": [TOOL]}
    counted = client.messages.count_tokens(model=server.model, **given).input_tokens
    usage = client.messages.create(**given, **options_of(server, max_tokens=1)).usage
    assert (
        counted
        == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def stop_sequence(server: Server) -> None:
    answer = client_of(server).messages.create(
        messages=[user(SUM_QUESTION)],
        stop_sequences=[" answer"],
        thinking={"type": "disabled"},
        **options_of(server),
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " answer")


def prefill(server: Server) -> None:
    turns = [user("Write JSON."), {"role": "assistant", "content": '{"city": "'}]
    answer = client_of(server).messages.create(messages=turns, **options_of(server, max_tokens=20))
    assert not text_of(answer).startswith("{"), json.dumps(text_of(answer))


def models(server: Server) -> None:
    found = [model.id for model in client_of(server).models.list()]
    assert server.model in found
    assert client_of(server).models.retrieve(server.model).type == "model"


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        tool_runner,
        thinking,
        thinking_streamed,
        thinking_switched_off,
        structure,
        forced_call,
        counted_tokens,
        stop_sequence,
        prefill,
        models,
        packages=("anthropic",),
    )
