"""Connections that break during an answer, with the official clients: the repeated request gets the
answer, which is generated once.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.fakes.scripted_model import calls, write_scripted
from tests.fakes.server_process import (
    ServerProcess,
    running_server,
    slow_steps,
    steps_at_full_speed,
    until,
)

TEXT = "I look at all notes first. " + "one two three four five six seven " * 6 + "and that is all."
ARGUMENTS = {"path": "notes/harbour.txt", "lines": [str(number) for number in range(20)]}
SCRIPT = calls(("write_file", ARGUMENTS), text=TEXT)
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "string"}},
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Write it down."}]
TOOL: list[Any] = [{"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}}]

GREEDY: dict[str, Any] = {"temperature": 0}  # so that the same request may get the lost answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = Path(tmp_path_factory.mktemp("scripted"))
    write_scripted(folder, [SCRIPT] * 2)
    arguments = (str(folder), "--name", "scripted", "--set", "server.unattended_seconds=0")
    # an answer is not sent to its end before the test cuts it, however busy the machine is
    with running_server(*arguments, environ=slow_steps()) as server:
        yield server


class Chat:
    """OpenAI's chat."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def begun(self, name: str) -> Any:
        return self.client.chat.completions.create(
            model="scripted",
            messages=ASKED,
            tools=TOOL,
            stream=True,
            stream_options={"include_usage": True},
            user=name,
            **GREEDY,
        )

    def streamed(self, name: str) -> tuple[str, Any]:
        chunks = list(self.begun(name))
        said = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        arguments = [call.function.arguments for delta in said for call in delta.tool_calls or ()]
        return "".join(delta.content or "" for delta in said), json.loads("".join(arguments))

    def whole(self, name: str) -> tuple[str, Any]:
        answer = self.client.chat.completions.create(
            model="scripted", messages=ASKED, tools=TOOL, user=name, **GREEDY
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls or ()
        return message.content or "", json.loads(call.function.arguments)


class Responses:
    """OpenAI's Responses."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        self.given = {
            **GREEDY,
            "model": "scripted",
            "input": ASKED,
            "tools": [{"type": "function", **TOOL[0]["function"], "strict": False}],
        }

    def begun(self, name: str) -> Any:
        return self.client.responses.create(**self.given, stream=True, user=name)

    def streamed(self, name: str) -> tuple[str, Any]:
        *_, last = self.begun(name)
        return self._said(last.response)

    def whole(self, name: str) -> tuple[str, Any]:
        return self._said(self.client.responses.create(**self.given, user=name))

    def _said(self, response: Any) -> tuple[str, Any]:
        (call,) = [item for item in response.output if item.type == "function_call"]
        return response.output_text, json.loads(call.arguments)


class Messages:
    """Anthropic's Messages."""

    def __init__(self, url: str) -> None:
        self.client = anthropic.Anthropic(base_url=url, api_key="none")
        tool: Any = {"name": "write_file", "input_schema": SCHEMA}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        self.given: dict[str, Any] = {
            "extra_body": GREEDY,
            "model": "scripted",
            "max_tokens": 8000,
            "messages": ASKED,
            "tools": [tool],
            "thinking": thinking,
        }

    def begun(self, name: str) -> Any:
        return self.client.messages.create(**self.given, stream=True, metadata={"user_id": name})

    def streamed(self, name: str) -> tuple[str, Any]:
        texts, arguments = [], []
        for event in self.begun(name):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                texts.append(event.delta.text)
            elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                arguments.append(event.delta.partial_json)
        return "".join(texts), json.loads("".join(arguments))

    def whole(self, name: str) -> tuple[str, Any]:
        return self._said(self.client.messages.create(**self.given, metadata={"user_id": name}))

    def _said(self, message: Any) -> tuple[str, Any]:
        (call,) = [block for block in message.content if block.type == "tool_use"]
        return "".join(block.text for block in message.content if block.type == "text"), call.input


class OllamaChat:
    """Ollama's chat."""

    def __init__(self, url: str) -> None:
        self.client = ollama.Client(host=url)

    def begun(self, name: str) -> Any:
        return self.client.chat(
            "scripted", ASKED, tools=TOOL, stream=True, options={"stop": [name], **GREEDY}
        )

    def streamed(self, name: str) -> tuple[str, Any]:
        said = [part.message for part in self.begun(name)]
        (call,) = [call for message in said for call in message.tool_calls or ()]
        return "".join(message.content or "" for message in said), call.function.arguments

    def whole(self, name: str) -> tuple[str, Any]:
        message = self.client.chat(
            "scripted", ASKED, tools=TOOL, options={"stop": [name], **GREEDY}
        ).message
        (call,) = message.tool_calls or ()
        return message.content or "", call.function.arguments


CLIENTS = (Chat, Responses, Messages, OllamaChat)


def rests(server: ServerProcess) -> bool:
    model = server.model()
    return (model["running"], model["queued"]) == (0, 0)


def drawn(server: ServerProcess, answered: Callable[[], tuple[str, Any]]) -> float:
    """The number of tokens in the script's answer."""
    before = server.metric("holdfast_worker_generated_tokens_total")
    text, arguments = answered()
    assert (text.strip(), arguments) == (TEXT, ARGUMENTS)
    until(lambda: rests(server), "the answer has ended in the worker")
    return server.metric("holdfast_worker_generated_tokens_total") - before


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_broken_stream_is_replayed_to_the_repeated_request(
    server: ServerProcess, kind: Any
) -> None:
    client = kind(server.url)
    with steps_at_full_speed():
        usual = drawn(server, lambda: client.streamed("undisturbed"))

    def disturbed() -> tuple[str, Any]:
        stream = client.begun("disturbed")
        for _ in range(5):
            next(iter(stream))
        stream.close()
        told: tuple[str, Any] = client.streamed("disturbed")
        return told

    assert drawn(server, disturbed) == usual
    assert "rejoined" in server.log()


@contextmanager
def breaking_proxy(server: ServerProcess) -> Iterator[str]:
    """The URL of a proxy whose first connection breaks as soon as the answer begins."""
    host, port = server.url.removeprefix("http://").split(":")
    before = server.metric("holdfast_worker_generated_tokens_total")
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        is_first = True
        while not ended.is_set():
            if not select.select([listener], [], [], 0.05)[0]:
                continue
            near, _ = listener.accept()
            threading.Thread(target=carry, args=(near, is_first), daemon=True).start()
            is_first = False

    def carry(near: socket.socket, breaks: bool) -> None:
        with near, socket.create_connection((host, int(port))) as far:
            while not (breaks and server.metric("holdfast_worker_generated_tokens_total") > before):
                for source in select.select([near, far], [], [], 0.001 if breaks else 0.05)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    (far if source is near else near).sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,), daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            serving.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_repeated_request_gets_the_broken_answer_without_new_sampling(
    server: ServerProcess, kind: Any
) -> None:
    """OpenAI's and Anthropic's clients repeat the request themselves; Ollama's leaves that to its
    caller.
    """
    with steps_at_full_speed():
        usual = drawn(server, lambda: kind(server.url).whole("whole and undisturbed"))
    with breaking_proxy(server) as url:
        client = kind(url)

        def disturbed() -> tuple[str, Any]:
            told: tuple[str, Any]
            if kind is OllamaChat:
                with pytest.raises((httpx.TransportError, ConnectionError)):
                    client.whole("whole and disturbed")
            told = client.whole("whole and disturbed")
            return told

        assert drawn(server, disturbed) == usual
