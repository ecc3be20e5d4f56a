"""Responses that are kept, through the official client: continued, followed, cancelled, deleted;
after a kill and a stop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from holdfast.config import ResponsesSettings
from holdfast.store.responses import RecordKey, ResponseFile
from tests.fakes.server_process import ServerProcess, until

INSTRUCTIONS = (
    "You keep the book of a lighthouse: every ship, its name, its flag and the weather of the day. "
    * 6
)
LONG: dict[str, Any] = {
    "input": "hello",
    "max_output_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@contextmanager
def running(folder: Path) -> Iterator[tuple[ServerProcess, openai.OpenAI]]:
    server = ServerProcess(
        "--name", "demo", "--store", str(folder), "--set", "server.shutdown_seconds=0"
    )
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield server, client
    finally:
        server.stop()


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Response:
    given = {
        "model": "demo",
        "instructions": INSTRUCTIONS,
        "max_output_tokens": 24,
        "temperature": 0.0,
        **fields,
    }
    response: Response = client.responses.create(input=text, **given)
    return response


def new_tokens(response: Response) -> int:
    """How many tokens of the prompt were read for it."""
    assert response.usage is not None
    return response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens


def checked(stream: Any, *, until_delta: bool = False) -> list[Any]:
    """The events of a stream, each as the official client's types have it."""
    events = []
    for event in stream:
        EVENT.validate_python(event.model_dump(warnings="error"), strict=False)
        events.append(event)
        if until_delta and event.type == "response.output_text.delta":
            stream.close()
            break
    return events


def running_response(client: openai.OpenAI) -> str:
    """The id of one that is being made in the background."""
    response = client.responses.create(model="demo", background=True, **LONG)
    until(
        lambda: client.responses.retrieve(response.id).status == "in_progress",
        "the beginning of the response",
    )
    return response.id


def kill(server: ServerProcess) -> None:
    worker = server.model()["pid"]
    for killed in (server.process.pid, worker):
        os.kill(killed, signal.SIGKILL)
    server.process.wait()
    until(lambda: not psutil.pid_exists(worker), "the end of the worker")


def follow_and_cancel(client: openai.OpenAI) -> None:
    begun = checked(
        client.responses.create(model="demo", background=True, stream=True, **LONG),
        until_delta=True,
    )
    response_id = begun[0].response.id
    resumed = client.responses.retrieve(
        response_id, stream=True, starting_after=begun[-1].sequence_number
    )
    more = checked(resumed, until_delta=True)
    assert more[0].sequence_number == begun[-1].sequence_number + 1
    cancelled = client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    rest = checked(
        client.responses.retrieve(response_id, stream=True, starting_after=more[-1].sequence_number)
    )
    assert rest[-1].response.status == "cancelled"
    assert [item.type for item in client.responses.input_items.list(response_id)] == ["message"]
    client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_responses_outlive_their_client_their_server_and_a_crash(tmp_path: Path) -> None:
    with running(tmp_path) as (server, client):
        first = ask(client, "hello")
        second = ask(client, "What is 2+2?", previous_response_id=first.id)
        short = new_tokens(second)
        assert 0 < short < 30, "more was read than is new"
        whole = checked(ask(client, "hello", stream=True))
        kept = checked(client.responses.retrieve(whole[0].response.id, stream=True))
        assert [event.to_dict() for event in kept if event.type != "response.in_progress"] == [
            event.to_dict() for event in whole if event.type != "response.in_progress"
        ]
        conversation = client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "hello"}]
        )
        ask(client, "What is 3+3?", conversation=conversation.id)
        lost = running_response(client)
        kill(server)

    with running(tmp_path) as (_, client):
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        third = ask(client, "What is 2+2?", previous_response_id=second.id)
        assert 0 < new_tokens(third) <= short + 2, "what was read before the crash was read again"
        assert [
            item.type for item in client.conversations.items.list(conversation.id, order="asc")
        ] == ["message"] * 3
        ended = client.responses.retrieve(lost)
        assert (ended.status, ended.error and ended.error.code) == ("failed", "server_error")
        (last,) = checked(client.responses.retrieve(lost, stream=True))
        assert (last.type, last.response.status) == ("response.failed", "failed")
        follow_and_cancel(client)
        said = checked(
            client.responses.create(model="demo", background=True, stream=True, **LONG),
            until_delta=True,
        )
        stopped = said[0].response.id

    file = ResponseFile(tmp_path, ResponsesSettings())
    record = file.record(RecordKey("", stopped))
    file.close()
    assert (record.body["status"], record.is_lost) == ("failed", False), (
        "the stop was not written down"
    )
    assert record.output, "what was said until then was not kept"
