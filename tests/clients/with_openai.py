"""OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

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
from openai import OpenAI
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool_loop(server: Server) -> None:
    client, messages = client_of(server), [user(WEATHER_QUESTION)]
    options: dict[str, Any] = {"model": server.model, "temperature": 0, "tools": [WEATHER_TOOL]}
    first = client.chat.completions.create(messages=messages, **options).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    result = called(call.function.name, call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = client.chat.completions.create(messages=messages, **options).choices[0]
    assert last.finish_reason == "stop"
    told(last.message.content)


def tool_loop_streamed(server: Server) -> None:
    client, messages = client_of(server), [user(WEATHER_QUESTION)]
    options: dict[str, Any] = {"model": server.model, "temperature": 0, "tools": [WEATHER_TOOL]}
    with client.chat.completions.stream(messages=messages, **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = first.message.tool_calls
    result = called(call.function.name, call.function.arguments)
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    with client.chat.completions.stream(messages=messages, **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    told(text)


def thinking(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, temperature=0, messages=[user(SUM_QUESTION)]
    )
    message = answer.choices[0].message
    summed(message.content)
    thought(message.reasoning_content)
    assert message.reasoning == message.reasoning_content
    assert (
        0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    )


def thinking_streamed(server: Server) -> None:
    chunks = client_of(server).chat.completions.create(
        model=server.model,
        temperature=0,
        messages=[user(SUM_QUESTION)],
        stream=True,
        stream_options={"include_usage": True},
    )
    text = reasoning = ""
    for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    summed(text)
    thought(reasoning)
    assert chunk.usage.completion_tokens_details.reasoning_tokens > 0


def thinking_switched_off(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, temperature=0, messages=[user(SUM_QUESTION)], reasoning_effort="none"
    )
    assert not getattr(answer.choices[0].message, "reasoning_content", None)


def structure(server: Server) -> None:
    answer = client_of(server).chat.completions.parse(
        model=server.model,
        temperature=0,
        max_tokens=200,
        messages=[user("Write JSON.")],
        response_format=Report,
    )
    assert isinstance(answer.choices[0].message.parsed, Report)


def json_object(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        temperature=0,
        max_tokens=300,
        messages=[user("Write JSON.")],
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def forced_call(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model,
        temperature=0,
        messages=[user("hi")],
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=200,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        thinking,
        thinking_streamed,
        thinking_switched_off,
        structure,
        json_object,
        forced_call,
        packages=("openai",),
    )
