"""Requests with an image, in all protocols."""

from __future__ import annotations

import base64
from typing import Any

from tests.fakes.images import data_url, png
from tests.fakes.scripted_gateway import MODEL
from tests.fakes.seeing import chat, said

CAT, DOG = png(1), png(2, size=(64, 64))
TOKENS = 6 + 2  # of the cat


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def openai(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}


def in_responses(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data)}


def anthropic(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    return {"type": "image", "source": source}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
WHAT = "What?{image 0}"
SEEN = "<tool_response>\nseen{image 0}\n</tool_response>"
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "OpenAI": ("/v1/chat/completions", chat("What?", openai(CAT)), WHAT),
    "OpenAI, the URL alone": (
        "/v1/chat/completions",
        chat("What?", {"type": "image_url", "image_url": data_url(CAT)}),
        WHAT,
    ),
    "OpenAI, a result": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                said("Look."),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                said("seen", openai(CAT), role="tool", tool_call_id="call_1"),
            ],
        },
        SEEN,
    ),
    "Responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": [text("What?", "input_text"), in_responses(CAT)]}
            ],
        },
        WHAT,
    ),
    "Responses, a result": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [text("seen", "input_text"), in_responses(CAT)],
                },
            ],
        },
        SEEN,
    ),
    "Anthropic": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": [text("What?"), anthropic(CAT)]}],
        },
        WHAT,
    ),
    "Anthropic, a result": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [text("seen"), anthropic(CAT)],
                        }
                    ],
                },
            ],
        },
        SEEN,
    ),
    "Ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What?", "images": [in_base64(CAT)]}],
        },
        "{image 0}What?",
    ),
    "Ollama, a result": (
        "/api/chat",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
                },
                {
                    "role": "tool",
                    "tool_name": "look",
                    "content": "seen",
                    "images": [in_base64(CAT)],
                },
            ],
        },
        SEEN,
    ),
    "Ollama, a prompt": (
        "/api/generate",
        {"model": MODEL, "prompt": "What?", "images": [in_base64(CAT)]},
        "{image 0}What?",
    ),
}


NEW = [kind for kind in REQUESTS if "result" not in kind]  # with the image in a new message
