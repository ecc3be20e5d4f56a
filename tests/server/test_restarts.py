"""Four lives of a server with one store: prompts, sessions and responses survive disconnects, a
kill of everything, a kill of the front alone, and a stop.

The tests build on each other. A life is over when the next one begins.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from holdfast.config import ResponsesSettings
from holdfast.front.records.responses import RecordKey, ResponseFile
from tests.fakes.server_process import ServerProcess, until

TEXT = (
    "The lighthouse keeper wrote every ship into his book, with its name, its flag and the weather "
    "of that day. " * 12
)
INSTRUCTIONS = "You keep the book of a lighthouse. " * 12
LONG: dict[str, Any] = {
    "input": "hello",
    "max_output_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
SESSION = {"X-Holdfast-Tenant": "t", "X-Session-ID": "long"}


class Life:
    """A server from its start to its end."""

    def __init__(self, model_folder: Path, store: Path) -> None:
        arguments = ("--name", "demo", "--store", str(store))
        self.server = ServerProcess(
            str(model_folder), *arguments, "--set", "server.shutdown_seconds=0"
        )
        self.server.wait_ready()
        self.worker = psutil.Process(self.server.model()["pid"])
        self.client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    def complete(self, prompt: str = TEXT, headers: dict[str, str] | None = None) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "holdfast": {"explain": True},
        }
        response = httpx.post(
            f"{self.server.url}/v1/completions", json=body, headers=headers, timeout=60
        )
        assert response.status_code == 200, response.text
        return response.json()

    def respond(self, text: str, **fields: Any) -> Response:
        given = {
            "model": "demo",
            "instructions": INSTRUCTIONS,
            "max_output_tokens": 24,
            "temperature": 0.0,
            **fields,
        }
        response: Response = self.client.responses.create(input=text, **given)
        return response

    def kill(self, *processes: psutil.Process | ServerProcess) -> None:
        """kill -9 these; returns when front and worker have ended."""
        for each in processes:
            os.kill(
                each.process.pid if isinstance(each, ServerProcess) else each.pid, signal.SIGKILL
            )
        self.server.process.wait()
        until(lambda: has_ended(self.worker), "the end of the worker")
        self.client.close()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def life(model_folder: Path, store: Path) -> Iterator[Life]:
    """Lives as long as tests need it and is ended by them."""
    begun = Life(model_folder, store)
    try:
        yield begun
    finally:
        begun.client.close()
        if begun.server.process.poll() is None:
            begun.server.process.kill()
            begun.server.process.wait()


@dataclass(frozen=True, kw_only=True)
class Known:
    """The first life's answers, and a response that was running when it was killed."""

    completion: Any
    first: Response
    second: Response
    conversation: str
    lost: str


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts") / "store"


@pytest.fixture(scope="module")
def known(model_folder: Path, store: Path) -> Known:
    """The first life, which is killed as a whole."""
    with life(model_folder, store) as one:
        completion = one.complete()
        assert (cached(completion), completion["holdfast"]["reason"]) == (0, "nothing_stored")
        one.complete(headers=SESSION)
        pinned = {"pinned": True, "ttl_seconds": None}
        url = f"{one.server.url}/v1/sessions/long"
        assert httpx.patch(url, json=pinned, headers=SESSION, timeout=60).status_code == 200
        first = one.respond("hello")
        second = one.respond("What is 2+2?", previous_response_id=first.id)
        hello: Any = {"type": "message", "role": "user", "content": "hello"}
        conversation = one.client.conversations.create(items=[hello])
        one.respond("What is 3+3?", conversation=conversation.id)
        until(lambda: is_all_on_disk(one.server), "what was read is on disk")
        lost = running_response(one.client)
        one.kill(one.server, one.worker)
    return Known(
        completion=completion,
        first=first,
        second=second,
        conversation=conversation.id,
        lost=lost,
    )


@pytest.fixture(scope="module")
def second_life(known: Known, model_folder: Path, store: Path) -> Iterator[Life]:
    with life(model_folder, store) as second:
        yield second


@pytest.fixture(scope="module")
def third_life(second_life: Life, model_folder: Path, store: Path) -> Iterator[Life]:
    """Begins when the front of the second one is killed during an answer."""
    body = {
        "prompt": f"Another book. {TEXT}",
        "max_tokens": 3000,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    url = f"{second_life.server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        next(response.iter_lines())
        second_life.kill(second_life.server)
    with life(model_folder, store) as third:
        yield third


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def new_tokens(response: Response) -> int:
    """The number of prompt tokens prefilled for it."""
    assert response.usage is not None
    return response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens


def is_all_on_disk(server: ServerProcess) -> bool:
    blocks = server.model()["memory"]["store"]["blocks"]
    return blocks > 0 and server.metric("holdfast_store_queued_blocks") == 0


def running_response(client: openai.OpenAI) -> str:
    """The id of a running background response."""
    response = client.responses.create(model="demo", background=True, **LONG)
    until(
        lambda: client.responses.retrieve(response.id).status == "in_progress",
        "the beginning of the response",
    )
    return response.id


def checked(stream: Any, *, until_delta: bool = False) -> list[Any]:
    """The events of a stream, as types of the official client."""
    events = []
    for event in stream:
        EVENT.validate_python(event.model_dump(warnings="error"), strict=False)
        events.append(event)
        if until_delta and event.type == "response.output_text.delta":
            stream.close()
            break
    return events


def test_after_a_kill_the_prompt_is_restored_from_disk(known: Known, second_life: Life) -> None:
    after, again = second_life.complete(), second_life.complete()
    read = after["usage"]["prompt_tokens"] - 1
    assert after["choices"] == known.completion["choices"]
    assert (cached(after), after["holdfast"]["reason"]) == (read, "complete")
    assert (after["holdfast"]["ram_tokens"], after["holdfast"]["disk_tokens"]) == (0, read)
    assert after["holdfast"]["seconds"]["restore"] > 0
    assert (again["holdfast"]["ram_tokens"], again["holdfast"]["disk_tokens"]) == (read, 0)


def test_responses_and_conversations_survive_a_kill(known: Known, second_life: Life) -> None:
    client = second_life.client
    assert 0 < new_tokens(known.second) < 30, "more was read than is new"
    assert client.responses.retrieve(known.first.id).to_dict() == known.first.to_dict()
    third = second_life.respond("What is 2+2?", previous_response_id=known.second.id)
    assert 0 < new_tokens(third) <= new_tokens(known.second) + 2, (
        "what was read before the crash was read again"
    )
    items = client.conversations.items.list(known.conversation, order="asc")
    assert [item.type for item in items] == ["message"] * 3
    ended = client.responses.retrieve(known.lost)
    assert (ended.status, ended.error and ended.error.code) == ("failed", "server_error")
    (last,) = checked(client.responses.retrieve(known.lost, stream=True))
    assert (last.type, last.response.status) == ("response.failed", "failed")


def test_a_response_outlives_its_stream(
    second_life: Life,
) -> None:
    client = second_life.client
    whole = checked(second_life.respond("hello", stream=True))
    kept = checked(client.responses.retrieve(whole[0].response.id, stream=True))
    assert [event.to_dict() for event in kept if event.type != "response.in_progress"] == [
        event.to_dict() for event in whole if event.type != "response.in_progress"
    ]
    begun = checked(
        client.responses.create(model="demo", background=True, stream=True, **LONG),
        until_delta=True,
    )
    response_id, place = begun[0].response.id, begun[-1].sequence_number
    resumed = client.responses.retrieve(response_id, stream=True, starting_after=place)
    more = checked(resumed, until_delta=True)
    assert more[0].sequence_number == place + 1
    assert client.responses.cancel(response_id).status == "cancelled"
    place = more[-1].sequence_number
    rest = checked(client.responses.retrieve(response_id, stream=True, starting_after=place))
    assert rest[-1].response.status == "cancelled"
    assert [item.type for item in client.responses.input_items.list(response_id)] == ["message"]
    client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_a_worker_whose_front_was_killed_saves_and_exits(third_life: Life) -> None:
    after = third_life.complete(f"Another book. {TEXT}")
    assert cached(after) == after["usage"]["prompt_tokens"] - 1, (
        "the last block of the prompt was full with the answer only"
    )


def test_a_session_survives_two_restarts(third_life: Life) -> None:
    url = f"{third_life.server.url}/v1/sessions/long"
    found = httpx.get(url, headers=SESSION, timeout=60).json()
    told = (found["pinned"], found["pin_state"], found["expires_at"], found["requests"])
    assert told == (True, "kept", None, 1)
    assert found["kept_tokens"] == found["disk_tokens"] == found["tokens"] > 200


def test_a_stop_saves_cut_answers_and_their_prompts(
    third_life: Life, model_folder: Path, store: Path
) -> None:
    said = checked(
        third_life.client.responses.create(model="demo", background=True, stream=True, **LONG),
        until_delta=True,
    )
    prompt = f"A third book. {TEXT}"
    third_life.complete(prompt)
    assert third_life.server.stop() == 0, third_life.server.log()
    assert has_ended(third_life.worker)

    file = ResponseFile(store, ResponsesSettings())
    record = file.record(RecordKey("", said[0].response.id))
    file.close()
    assert (record.body["status"], record.is_lost) == ("failed", False), (
        "the stop was not written down"
    )
    assert record.output, "what was said until then was not kept"

    with life(model_folder, store) as fourth:
        after = fourth.complete(prompt)
        assert cached(after) == after["usage"]["prompt_tokens"] - 1
        assert fourth.server.stop() == 0, fourth.server.log()
