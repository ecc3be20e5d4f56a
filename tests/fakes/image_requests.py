"""Conversations with images, in all protocols."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from tests.fakes.images import data_url, png
from tests.fakes.scripted_gateway import MODEL

CAT, DOG = png(1), png(2, size=(64, 64))
TOKENS = 6 + 2  # of the cat


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def openai(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}


def anthropic(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    return {"type": "image", "source": source}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


Body = dict[str, Any]
# a role, and one or several contents: texts, images, or parts in the protocol's form. The role
# "result" is for a call and its result
Turn = tuple[str, Any]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def _content(said: Any, image: Callable[[bytes], Any], kind: str = "text") -> Any:
    """A text unchanged, anything else as parts."""
    if isinstance(said, str):
        return said
    parts = said if isinstance(said, list) else [said]
    return [
        text(part, kind)
        if isinstance(part, str)
        else image(part)
        if isinstance(part, bytes)
        else part
        for part in parts
    ]


def in_chat(*turns: Turn) -> Body:
    messages: list[Body] = []
    for role, said in turns:
        content = _content(said, openai)
        if role == "result":
            messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": content})
        else:
            messages.append({"role": role, "content": content})
    return {"model": MODEL, "messages": messages}


def in_responses(*turns: Turn) -> Body:
    items: list[Body] = []
    for role, said in turns:
        content = _content(
            said, lambda data: {"type": "input_image", "image_url": data_url(data)}, "input_text"
        )
        if role == "result":
            call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            items += [call, {"type": "function_call_output", "call_id": "c", "output": content}]
        else:
            items.append({"role": role, "content": content})
    return {"model": MODEL, "input": items}


def in_messages(*turns: Turn) -> Body:
    messages: list[Body] = []
    for role, said in turns:
        content = _content(said, anthropic)
        if role == "result":
            use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            messages.append({"role": "assistant", "content": [use]})
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"role": role, "content": content})
    return {"model": MODEL, "max_tokens": 8, "messages": messages}


def in_ollama(*turns: Turn) -> Body:
    messages: list[Body] = []
    for role, said in turns:
        parts = said if isinstance(said, list) else [said]
        message: Body = {"content": "".join(each for each in parts if isinstance(each, str))}
        if images := [in_base64(each) for each in parts if isinstance(each, bytes)]:
            message["images"] = images
        if role == "result":
            calls = [{"function": {"name": "look", "arguments": {}}}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_name": "look", **message})
        else:
            messages.append({"role": role, **message})
    return {"model": MODEL, "messages": messages, "stream": False}


# the path, the body of a conversation, and the field of its turns
PROTOCOLS: dict[str, tuple[str, Callable[..., Body], str]] = {
    "chat": ("/v1/chat/completions", in_chat, "messages"),
    "responses": ("/v1/responses", in_responses, "input"),
    "messages": ("/v1/messages", in_messages, "messages"),
    "ollama": ("/api/chat", in_ollama, "messages"),
}
_NEW = ("user", ["What?", CAT])
_RESULT = (("user", "Look."), ("result", ["seen", CAT]))
_BY_URL = ("user", ["What?", {"type": "image_url", "image_url": data_url(CAT)}])
WHAT = "What?{image 0}"
SEEN = "<tool_response>\nseen{image 0}\n</tool_response>"
# the path, the body, and the prompt that the model sees
REQUESTS: dict[str, tuple[str, Body, str]] = {
    "OpenAI": ("/v1/chat/completions", in_chat(_NEW), WHAT),
    "OpenAI, the URL alone": ("/v1/chat/completions", in_chat(_BY_URL), WHAT),
    "OpenAI, a result": ("/v1/chat/completions", in_chat(*_RESULT), SEEN),
    "Responses": ("/v1/responses", in_responses(_NEW), WHAT),
    "Responses, a result": ("/v1/responses", in_responses(*_RESULT), SEEN),
    "Anthropic": ("/v1/messages", in_messages(_NEW), WHAT),
    "Anthropic, a result": ("/v1/messages", in_messages(*_RESULT), SEEN),
    "Ollama": ("/api/chat", in_ollama(_NEW), "{image 0}What?"),
    "Ollama, a result": ("/api/chat", in_ollama(*_RESULT), SEEN),
    "Ollama, a prompt": (
        "/api/generate",
        {"model": MODEL, "prompt": "What?", "images": [in_base64(CAT)]},
        "{image 0}What?",
    ),
}
NEW = [kind for kind in REQUESTS if "result" not in kind]  # with the image in a new message
