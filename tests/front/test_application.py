"""The application as a whole: any JSON gets an answer in OpenAI's form, and the official client
works.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import GenerationFailed
from holdfast.front.application import create_application
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    HELLO,
    chat_body,
    client_of,
    completion_body,
    served,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    answer,
    scripted_services,
)

FIELDS = (
    "model messages prompt stream stream_options max_tokens n temperature top_p top_k min_p seed "
    "stop logprobs top_logprobs echo "
    "logit_bias best_of suffix tools tool_choice response_format user presence_penalty "
    "repetition_penalty metadata "
    "chat_template_kwargs enable_thinking continue_final_message"
).split()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "text"])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), json_values, max_size=6)
MESSAGES: Any = HELLO
GATEWAY = ScriptedGateway(script=answer("x"))
APP = create_application(scripted_services(GATEWAY))


@given(path=st.sampled_from([CHAT, COMPLETIONS]), body=bodies | json_values, valid=st.booleans())
async def test_arbitrary_json_causes_no_internal_error(path: str, body: Any, valid: bool) -> None:
    if valid and isinstance(body, dict):
        body = {**(chat_body() if path == CHAT else completion_body()), **body}
    content = json.dumps(body).encode()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://localhost"
    ) as client:
        response = await client.post(path, content=content)
    assert response.status_code in (200, 400, 404, 422), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code", "advice"}


@given(content=st.binary(max_size=200))
async def test_arbitrary_bytes_cause_no_internal_error(content: bytes) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://localhost"
    ) as client:
        response = await client.post(CHAT, content=content)
    assert response.status_code == 400


def client_at(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, **options)


async def test_the_official_client_chats() -> None:
    async with (
        served(ScriptedGateway(script=answer("Hel", "lo ☃"))) as url,
        client_at(url) as client,
    ):
        got = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert got.choices[0].message.content == "Hello ☃"
        assert got.usage is not None
        assert got.usage.prompt_tokens == PROMPT_TOKENS
        stream: Any = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello ☃"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 2


async def test_the_official_client_completes_and_lists_models() -> None:
    async with served(ScriptedGateway(script=answer("Hel", "lo"))) as url, client_at(url) as client:
        got = await client.completions.create(
            model=MODEL, prompt=["a", "b"], extra_body={"top_k": 5}
        )
        assert [choice.text for choice in got.choices] == ["Hello", "Hello"]
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_official_client_understands_the_errors() -> None:
    async with served(ScriptedGateway()) as url, client_at(url) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")


async def test_the_official_client_raises_on_an_error_within_a_stream() -> None:
    gateway = ScriptedGateway(script=[*answer("Hel")[:1], GenerationFailed("the worker died")])

    async def read(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        async for _ in stream:
            pass

    async with served(gateway) as url, client_at(url) as client:
        with pytest.raises(openai.APIError, match="the worker died"):
            await read(client)


async def test_many_requests_share_one_connection() -> None:
    async with (
        served(ScriptedGateway()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for body in (chat_body(), chat_body(stream=True), {"bad": 1}, chat_body()):
            await client.post(CHAT, json=body)
        response = await client.get("/health", headers={"connection": "close"})
    assert response.status_code == 200


async def test_a_refused_large_upload_still_gets_its_answer() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(
            CHAT, content=b"x" * 10, headers={"content-length": "99999999999"}
        )
    assert response.status_code == 413
