"""A thought ended while it is streamed, through OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.server_process import ServerProcess, running_server, until


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server("--name", "demo") as server:
        yield server


@pytest.mark.slow
def test_a_client_can_end_a_thought_while_streaming(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    marks = [
        httpx.post(
            f"{server.url}/tokenize", json={"prompt": mark, "add_special_tokens": False}, timeout=60
        ).json()["tokens"]
        for mark in ("</think>", "<|im_end|>")
    ]
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        temperature=0,
        max_tokens=400,
        stream=True,
        stream_options={"include_usage": True},
        reasoning_effort="high",
        # the model never ends its thought on its own
        logit_bias={str(token_id): -100 for mark in marks for token_id in mark},
    )
    chunks = iter(stream)
    first = next(
        chunk for chunk in chunks if getattr(chunk.choices[0].delta, "reasoning_content", None)
    )
    body: dict[str, Any] = {"id": first.id, "action": "reasoning_end", "model": "demo"}
    assert client.post("/chat/completions/control", body=body, cast_to=object) == {"success": True}
    rest = list(chunks)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in rest), (
        "behind the thought the answer begins"
    )
    assert rest[-1].usage is not None
    details: Any = rest[-1].usage.completion_tokens_details
    assert details.reasoning_ended_by == "request"
    assert details.reasoning_tokens < 300
    until(
        lambda: "thought ended by request" in server.log(), "the line of the request is in the log"
    )
    late = client.post("/chat/completions/control", body=body, cast_to=object)
    assert late == {"success": False, "message": "no answer with this id is being generated"}
