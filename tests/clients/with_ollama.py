"""Ollama's own client."""

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
from ollama import Client
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


def client_of(server: Server) -> Client:
    return Client(host=server.root)


def options_of(server: Server, **options: Any) -> dict[str, Any]:
    return {"model": server.model, "options": {"temperature": 0, "num_predict": 300}, **options}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _then(message: Any) -> list[Any]:
    (call,) = message.tool_calls
    name, arguments = call.function.name, call.function.arguments
    return [message, {"role": "tool", "tool_name": name, "content": called(name, dict(arguments))}]


def tool_loop(server: Server) -> None:
    client, messages, options = (
        client_of(server),
        [user(WEATHER_QUESTION)],
        options_of(server, tools=[WEATHER_TOOL]),
    )
    first = client.chat(messages=messages, **options)
    assert first.done
    told(client.chat(messages=messages + _then(first.message), **options).message.content)


def tool_loop_streamed(server: Server) -> None:
    client, messages, options = (
        client_of(server),
        [user(WEATHER_QUESTION)],
        options_of(server, tools=[WEATHER_TOOL]),
    )
    parts = list(client.chat(messages=messages, stream=True, **options))
    (message,) = [part.message for part in parts if part.message.tool_calls]
    assert parts[-1].done_reason == "stop"
    told(
        "".join(
            part.message.content or ""
            for part in client.chat(messages=messages + _then(message), stream=True, **options)
        )
    )


def function_as_tool(server: Server) -> None:
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        return called("get_weather", {"city": city})

    first = client_of(server).chat(
        messages=[user(WEATHER_QUESTION)], **options_of(server, tools=[get_weather])
    )
    assert _then(first.message)


def thinking(server: Server) -> None:
    for think in (True, None):
        answer = client_of(server).chat(
            messages=[user(SUM_QUESTION)], think=think, **options_of(server)
        )
        summed(answer.message.content)
        thought(answer.message.thinking)


def thinking_streamed(server: Server) -> None:
    parts = list(
        client_of(server).chat(
            messages=[user(SUM_QUESTION)], stream=True, think=True, **options_of(server)
        )
    )
    summed("".join(part.message.content or "" for part in parts))
    thought("".join(part.message.thinking or "" for part in parts))
    assert parts[-1].eval_count > 0
    assert parts[-1].prompt_eval_count > 0


def thinking_switched_off(server: Server) -> None:
    answer = client_of(server).chat(
        messages=[user(SUM_QUESTION)], think=False, **options_of(server)
    )
    assert not answer.message.thinking


def structure(server: Server) -> None:
    for think in (True, False, None):
        answer = client_of(server).chat(
            messages=[user("Write JSON.")],
            format=Report.model_json_schema(),
            think=think,
            **options_of(server),
        )
        Report.model_validate_json(answer.message.content)


def structure_streamed(server: Server) -> None:
    for think in (True, False, None):
        parts = client_of(server).chat(
            messages=[user("Write JSON.")],
            format=Report.model_json_schema(),
            think=think,
            stream=True,
            **options_of(server),
        )
        Report.model_validate_json("".join(part.message.content or "" for part in parts))


def json_mode(server: Server) -> None:
    answer = client_of(server).chat(
        messages=[user("Write JSON.")], format="json", think=False, **options_of(server)
    )
    assert isinstance(json.loads(answer.message.content), dict)


def generate(server: Server) -> None:
    client = client_of(server)
    whole = client.generate(prompt=SUM_QUESTION, **options_of(server))
    summed(whole.response)
    parts = list(client.generate(prompt=SUM_QUESTION, stream=True, **options_of(server)))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert (
        client.generate(
            prompt="Once upon", raw=True, **options_of(server, options={"num_predict": 3})
        ).done_reason
        == "length"
    )


def models(server: Server) -> None:
    client = client_of(server)
    names = [model.model for model in client.list().models]
    assert f"{server.model}:latest" in names or server.model in names, names
    shown = client.show(server.model)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert client.ps().models
    assert client.pull(server.model).status == "success"
    assert list(client.pull(server.model, stream=True))[-1].status == "success"
    assert client.chat(
        messages=[user("hello")], **options_of(server, model=f"{server.model}:latest")
    ).done


def embeddings(server: Server) -> None:
    client = client_of(server)
    one, other = client.embed(model=server.model, input=["hello", "weather"]).embeddings
    assert len(one) == len(other) > 0
    assert abs(sum(value * value for value in one) - 1) < 1e-3
    assert len(client.embed(model=server.model, input="hello", dimensions=8).embeddings[0]) == 8


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        function_as_tool,
        thinking,
        thinking_streamed,
        thinking_switched_off,
        structure,
        structure_streamed,
        json_mode,
        generate,
        models,
        embeddings,
        packages=("ollama",),
    )
