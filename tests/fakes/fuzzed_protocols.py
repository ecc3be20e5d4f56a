"""The protocols whose requests are fuzzed, with the expected responses."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import CreateEmbeddingResponse
from openai.types.conversations import Conversation
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from holdfast.front.application import DIALECTS
from holdfast.front.openai.answer import ChatCompletion, ErrorBody, TextCompletion
from tests.fakes import request_shapes
from tests.fakes.fuzzed_shapes import ChatFuzzer, ShapeFuzzer
from tests.fakes.http_clients import events_of
from tests.fakes.request_shapes import Shapes

_NO_OBJECT = ("invalid_json", "invalid_type")  # codes of refusals that cannot name a field
_UNREADABLE = re.compile(r"JSON|body|empty|Content-Type")
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Fuzzer(Protocol):
    """Draws requests."""

    def request(self) -> tuple[str, bytes]: ...


Answer = Callable[[httpx.Response], None]


@dataclass(frozen=True, kw_only=True)
class FuzzedProtocol:
    """One row of the table."""

    name: str
    shapes: Shapes
    bound: tuple[str, ...] = ()
    answered: Answer  # raises if an answer with status 200 does not have the protocol's form
    # whether a body is a refusal in the protocol's form that names a field
    refused: Callable[[Any, Collection[str]], bool]
    statuses: Collection[int] = (400, 404, 413, 422)
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        missing = self.shapes.keys() - {
            operation.path for dialect in DIALECTS for operation in dialect.operations
        }
        assert not missing, f"nothing is served at {sorted(missing)}"

    def fuzzer(self, seed: int, *, model: str) -> Fuzzer:
        """Its generator of requests; chats have a separate one."""
        if not self.shapes:
            return ChatFuzzer(seed, model=model)
        return ShapeFuzzer(seed, self.shapes, model=model, bound=self.bound)

    def check(self, response: httpx.Response, body: bytes) -> None:
        """The answer has a documented status and form."""
        told = (
            f"{response.status_code} {response.text[:600]} for {response.request.url.path} "
            f"{body[:2000]!r}"
        )
        if response.status_code == 200:
            try:
                self.answered(response)
            except Exception as problem:
                raise AssertionError(f"{told}: {problem}") from problem
            return
        assert response.status_code in self.statuses, told
        assert "no path" not in response.text, told
        assert self.refused(
            json.loads(response.content),
            names_in(body) | names_in(repr(self.shapes).replace("'", '"').encode()),
        ), told


def names_in(body: bytes) -> set[str]:
    """All names of members at any level."""
    return set(re.findall(r'"((?:[^"\\]|\\.)*)" *:', body.decode("utf-8", "replace")))


def _openai_refusal(body: Any, _: Collection[str]) -> bool:
    error = msgspec.convert(body, ErrorBody).error
    return bool(error.param) or error.code in _NO_OBJECT


def _anthropic_refusal(body: Any, names: Collection[str]) -> bool:
    assert body["type"] == "error"
    assert body["error"]["type"] in (
        "invalid_request_error",
        "not_found_error",
        "request_too_large",
    )
    return _names_one(body["error"]["message"], names)


def _ollama_refusal(body: Any, names: Collection[str]) -> bool:
    assert [*body] == ["error", "advice"]
    # thinking, tools: its own words
    return _names_one(body["error"], names) or "does not support" in body["error"]


def _names_one(message: str, names: Collection[str]) -> bool:
    told = {part for path in re.findall(r"`([^`]*)`", message) for part in path.split(".")}
    return bool(_UNREADABLE.search(message)) or bool(told & set(names)) or "model" in message


def _streams(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def _openai_answer(whole: type[msgspec.Struct]) -> Answer:
    def answered(response: httpx.Response) -> None:
        if not _streams(response):
            msgspec.json.decode(response.content, type=whole)
            return
        *events, last = events_of(response.text)
        assert last == "[DONE]"
        for event in events:
            msgspec.json.decode(json.dumps(event).encode("utf-8", "surrogatepass"), type=whole)

    return answered


def _typed_events(text: str) -> list[dict[str, Any]]:
    found = [
        (lines[0], lines[-1])
        for lines in (event.splitlines() for event in text.split("\n\n"))
        if lines and lines[0][0] != ":"
    ]
    events = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in found]
    return events


def _messages_answer(response: httpx.Response) -> None:
    if response.request.url.path.endswith("count_tokens"):
        MessageTokensCount.model_validate_json(response.content)
    elif _streams(response):
        events = _typed_events(response.text)
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        for event in events:
            if event["type"] != "ping":
                _MESSAGE_EVENT.validate_python(event)
    else:
        Message.model_validate_json(response.content)


def _responses_answer(response: httpx.Response) -> None:
    path = response.request.url.path
    if path.endswith("input_tokens"):
        InputTokenCountResponse.model_validate_json(response.content)
    elif path.endswith("conversations"):
        Conversation.model_validate_json(response.content)
    elif _streams(response):
        events = _typed_events(response.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        for event in events:
            _RESPONSE_EVENT.validate_python(
                {**event, "response": _unechoed(event["response"])}
                if "response" in event
                else event
            )
    else:
        body = _unechoed(json.loads(response.content))
        assert Response.model_validate(body).status in (
            "completed",
            "incomplete",
            "queued",
            "in_progress",
        )


def _unechoed(body: dict[str, Any]) -> dict[str, Any]:
    """A response without repeated request fields, which may be more lenient than the client's
    types.
    """
    return {**body, "tools": [], "text": None, "tool_choice": "auto"}


def _embeddings_answer(response: httpx.Response) -> None:
    body = json.loads(response.content)
    for each in body["data"]:
        if isinstance(each["embedding"], str):
            each["embedding"] = struct.unpack(
                f"<{len(base64.b64decode(each['embedding'])) // 4}f",
                base64.b64decode(each["embedding"]),
            )
    CreateEmbeddingResponse.model_validate(body)


def _ollama_answer(response: httpx.Response) -> None:
    if response.headers["content-type"].startswith("application/x-ndjson"):
        *lines, last = [json.loads(line) for line in response.text.splitlines()]
        assert not any(line.get("done") for line in lines)
        assert last.get("done") or last.get("status") == "success"
    else:
        body = json.loads(response.content)
        assert body.get("done") is True or {"embeddings", "embedding", "details", "status"} & set(
            body
        )


def _with_keys(**keys_of: str) -> Answer:
    def answered(response: httpx.Response) -> None:
        path = response.request.url.path.strip("/").replace("-", "_").replace("/", "_")
        assert set(keys_of[path].split()) <= set(json.loads(response.content))

    return answered


PROTOCOLS = (
    FuzzedProtocol(
        name="chat", shapes={}, answered=_openai_answer(ChatCompletion), refused=_openai_refusal
    ),
    FuzzedProtocol(
        name="completions",
        shapes=request_shapes.COMPLETIONS,
        bound=("max_tokens",),
        answered=_openai_answer(TextCompletion),
        refused=_openai_refusal,
    ),
    FuzzedProtocol(
        name="messages",
        shapes=request_shapes.MESSAGES,
        bound=("max_tokens",),
        answered=_messages_answer,
        refused=_anthropic_refusal,
        headers=(("anthropic-version", "2023-06-01"),),
    ),
    FuzzedProtocol(
        name="responses",
        shapes=request_shapes.RESPONSES,
        bound=("max_output_tokens",),
        answered=_responses_answer,
        refused=_openai_refusal,
    ),
    FuzzedProtocol(
        name="ollama",
        shapes=request_shapes.OLLAMA,
        bound=("options", "num_predict"),
        answered=_ollama_answer,
        refused=_ollama_refusal,
        statuses=(400, 404, 409, 413, 422),  # a pinned model is not unloaded
    ),
    FuzzedProtocol(
        name="embeddings",
        shapes=request_shapes.EMBEDDINGS,
        answered=_embeddings_answer,
        refused=_openai_refusal,
    ),
    FuzzedProtocol(
        name="rerank",
        shapes=request_shapes.RERANK,
        answered=_with_keys(v1_rerank="results model"),
        refused=_openai_refusal,
    ),
    FuzzedProtocol(
        name="tokens",
        shapes=request_shapes.TOKENS,
        answered=_with_keys(tokenize="tokens", detokenize="content", apply_template="prompt"),
        refused=_openai_refusal,
    ),
)
