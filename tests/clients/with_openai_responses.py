"""OpenAI's own client and its Responses: stateless and stored, with tools of both kinds."""

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
from openai import NotFoundError, OpenAI
from pydantic import BaseModel

TOOL = {"type": "function", "strict": False, **WEATHER_TOOL["function"]}
ENCRYPTED = ["reasoning.encrypted_content"]


class Report(BaseModel):
    city: str
    degrees: int


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)


def result_of(call: Any) -> dict[str, Any]:
    return {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": called(call.name, call.arguments),
    }


def of_type(answer: Any, kind: str) -> Any:
    (item,) = [item for item in answer.output if item.type == kind]
    return item


def tool_loop(server: Server) -> None:
    client, given = client_of(server), [{"role": "user", "content": WEATHER_QUESTION}]
    options: dict[str, Any] = {
        "model": server.model,
        "temperature": 0,
        "tools": [TOOL],
        "store": False,
        "include": ENCRYPTED,
    }
    first = client.responses.create(input=given, **options)
    assert first.status == "completed"
    last = client.responses.create(
        input=[*given, *first.output, result_of(of_type(first, "function_call"))], **options
    )
    told(last.output_text)
    assert last.usage.input_tokens_details.cached_tokens > 0


def tool_loop_streamed(server: Server) -> None:
    client, given = client_of(server), [{"role": "user", "content": WEATHER_QUESTION}]
    options: dict[str, Any] = {
        "model": server.model,
        "temperature": 0,
        "tools": [TOOL],
        "store": False,
        "include": ENCRYPTED,
    }
    with client.responses.stream(input=given, **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.output_item.done"} <= kinds
    again = [*given, *first.output, result_of(of_type(first, "function_call"))]
    with client.responses.stream(input=again, **options) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    told(text)


def stored_tool_loop(server: Server) -> None:
    client = client_of(server)
    options: dict[str, Any] = {"model": server.model, "temperature": 0, "tools": [TOOL]}
    first = client.responses.create(input=WEATHER_QUESTION, **options)
    result = result_of(of_type(first, "function_call"))
    last = client.responses.create(input=[result], previous_response_id=first.id, **options)
    told(last.output_text)
    assert client.responses.retrieve(last.id).output_text == last.output_text
    kinds = {item.type for item in client.responses.input_items.list(last.id)}
    assert "function_call_output" in kinds
    client.responses.delete(last.id)
    try:
        client.responses.retrieve(last.id)
    except NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


def conversation(server: Server) -> None:
    client = client_of(server)
    talk = client.conversations.create()
    client.responses.create(
        model=server.model, temperature=0, input="hello", conversation=talk.id, max_output_tokens=50
    )
    texts = [item for item in client.conversations.items.list(talk.id) if item.type == "message"]
    assert [item.role for item in texts] in (["assistant", "user"], ["user", "assistant"])
    client.conversations.delete(talk.id)


def resumed_stream(server: Server) -> None:
    client = client_of(server)
    stream = client.responses.create(
        model=server.model, temperature=0, input=SUM_QUESTION, stream=True, background=True
    )
    first = [event for event, _ in zip(stream, range(3), strict=False)]
    stream.close()
    rest = client.responses.retrieve(
        first[0].response.id, stream=True, starting_after=first[-1].sequence_number
    )
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    summed(events[-1].response.output_text)


def thinking(server: Server) -> None:
    answer = client_of(server).responses.create(
        model=server.model, temperature=0, input=SUM_QUESTION, store=False
    )
    summed(answer.output_text)
    item = of_type(answer, "reasoning")
    thought("".join(part.text for part in item.content or item.summary))
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def thinking_streamed(server: Server) -> None:
    text = reasoning = ""
    options: dict[str, Any] = {"reasoning": {"effort": "medium", "summary": "auto"}, "store": False}
    with client_of(server).responses.stream(
        model=server.model, temperature=0, input=SUM_QUESTION, **options
    ) as stream:
        for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
            kinds = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
            reasoning += event.delta if event.type in kinds else ""
    summed(text)
    thought(reasoning)


def thinking_switched_off(server: Server) -> None:
    answer = client_of(server).responses.create(
        model=server.model,
        temperature=0,
        input=SUM_QUESTION,
        reasoning={"effort": "none"},
        store=False,
    )
    assert not [item for item in answer.output if item.type == "reasoning"]


def structure(server: Server) -> None:
    answer = client_of(server).responses.parse(
        model=server.model,
        temperature=0,
        max_output_tokens=200,
        input="Write JSON.",
        text_format=Report,
        store=False,
    )
    assert isinstance(answer.output_parsed, Report)


def forced_call(server: Server) -> None:
    answer = client_of(server).responses.create(
        model=server.model,
        temperature=0,
        input="hi",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=200,
        store=False,
    )
    assert set(json.loads(of_type(answer, "function_call").arguments)) == {"city"}


def custom_call(server: Server) -> None:
    tool = {"type": "custom", "name": "note", "description": "Write a note"}
    answer = client_of(server).responses.create(
        model=server.model,
        temperature=0,
        input="hi",
        tools=[tool],
        tool_choice={"type": "custom", "name": "note"},
        max_output_tokens=60,
        store=False,
    )
    kinds = {item.type for item in answer.output}
    assert "custom_tool_call" in kinds or answer.status == "incomplete", kinds


def input_tokens(server: Server) -> None:
    client = client_of(server)
    counted = client.responses.input_tokens.count(
        model=server.model, input=WEATHER_QUESTION, tools=[TOOL]
    )
    answer = client.responses.create(
        model=server.model,
        input=WEATHER_QUESTION,
        tools=[TOOL],
        max_output_tokens=1,
        store=False,
        temperature=0,
    )
    assert counted.input_tokens == answer.usage.input_tokens


if __name__ == "__main__":
    run(
        tool_loop,
        tool_loop_streamed,
        stored_tool_loop,
        conversation,
        resumed_stream,
        thinking,
        thinking_streamed,
        thinking_switched_off,
        structure,
        forced_call,
        custom_call,
        input_tokens,
        packages=("openai",),
    )
