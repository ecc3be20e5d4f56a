"""The application as a whole: any JSON gets an answer in OpenAI's form, and the official client
works.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import GenerationFailed
from holdfast.front.anthropic.messages import MessagesRequest
from holdfast.front.application import create_application
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    chat_body,
    client_of,
    completion_body,
    message_body,
    served,
)
from tests.fakes.ollama_bodies import WEATHER, directory_of
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    answer,
    scripted_services,
)
from tests.fakes.server_process import python_output

# fields of the requests of all protocols, and keys within them
FIELDS = (
    "model name messages prompt input stream stream_options max_tokens n temperature top_p top_k "
    "min_p seed stop logprobs top_logprobs echo logit_bias best_of suffix tools tool_choice "
    "response_format user presence_penalty repetition_penalty metadata chat_template_kwargs "
    "enable_thinking continue_final_message format options think keep_alive raw system template "
    "context images truncate shift dimensions holdfast container"
).split()
KEYS = (
    "role content type text include_usage images tool_calls tool_name thinking function name "
    "arguments num_predict temperature top_k seed stop repeat_last_n num_ctx explain signature id "
    "tool_use_id input cache_control"
).split()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "tool", "text", "json", "tool_use", "tool_result", "5m"])
    | st.sampled_from([WEATHER, {"type": "ephemeral"}, "\ud83d"])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
# turns that are valid as far as possible, so that faults deeper in them are reached
parts = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            "text thinking tool_use tool_result tool_reference document x".split()
        )
    },
    optional={
        **dict.fromkeys("text thinking signature id name tool_use_id".split(), st.text(max_size=3)),
        "content": st.text(max_size=3) | st.lists(st.just({"type": "text", "text": "t"}) | scalars),
        "input": st.dictionaries(st.text(max_size=2), scalars, max_size=2) | st.integers(),
        "cache_control": st.sampled_from([None, {"type": "ephemeral", "ttl": "9h"}, 1]),
    },
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "x"]),
            "content": st.none() | st.text(max_size=3) | st.lists(parts, max_size=3),
        }
    ),
    max_size=4,
)
fields = st.sampled_from([*FIELDS, *MessagesRequest.model_fields]) | st.text(max_size=8)
bodies = st.dictionaries(fields, json_values, max_size=6)
OF_OLLAMA = {"model": MODEL, "messages": HELLO, "prompt": "hi", "input": "hi"}
VALID: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETIONS: completion_body(),
    MESSAGES: message_body(),
    f"{MESSAGES}/count_tokens": message_body(),
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/api/chat": OF_OLLAMA,
    "/api/generate": OF_OLLAMA,
    "/api/embed": OF_OLLAMA,
    "/api/embeddings": OF_OLLAMA,
    "/api/show": OF_OLLAMA,
    "/api/pull": OF_OLLAMA,
}
APP = create_application(
    scripted_services(ScriptedGateway(script=answer("x")), directory=directory_of())
)


def is_error(path: str, body: Any) -> bool:
    if path.startswith("/api/"):
        return list(body) == ["error", "advice"]
    if path.startswith(MESSAGES):
        return body["type"] == "error" and set(body["error"]) == {"type", "message", "advice"}
    return set(body["error"]) == {"message", "type", "param", "code", "advice"}


async def assert_answered(path: str, body: Any) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://localhost"
    ) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404, 422), response.text
    if response.status_code != 200:
        assert is_error(path, response.json()), response.text
    elif path.startswith("/api/"):
        assert all(isinstance(json.loads(line), dict) for line in response.text.splitlines())


@settings(max_examples=80)
@given(path=st.sampled_from([*VALID]), body=bodies | json_values, valid=st.booleans())
async def test_arbitrary_json_causes_no_internal_error(path: str, body: Any, valid: bool) -> None:
    await assert_answered(
        path, {**VALID[path], **body} if valid and isinstance(body, dict) else body
    )


@settings(max_examples=60)
@given(turns=turns)
async def test_arbitrary_turns_cause_no_internal_error(turns: list[Any]) -> None:
    for path in (CHAT, MESSAGES, f"{MESSAGES}/count_tokens", "/v1/responses", "/api/chat"):
        field = "input" if path == "/v1/responses" else "messages"
        await assert_answered(path, {**VALID[path], field: turns})


@given(content=st.binary(max_size=200))
async def test_arbitrary_bytes_cause_no_internal_error(content: bytes) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://localhost"
    ) as client:
        response = await client.post(CHAT, content=content)
    assert response.status_code == 400


TALK: Any = HELLO


def client_at(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, **options)


async def test_the_official_client_chats() -> None:
    async with (
        served(ScriptedGateway(script=answer("Hel", "lo ☃"))) as url,
        client_at(url) as client,
    ):
        got = await client.chat.completions.create(model=MODEL, messages=TALK)
        assert got.choices[0].message.content == "Hello ☃"
        assert got.usage is not None
        assert got.usage.prompt_tokens == PROMPT_TOKENS
        stream: Any = await client.chat.completions.create(
            model=MODEL,
            messages=TALK,
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


def test_models_of_requests_are_built_when_first_used() -> None:
    code = (
        "import holdfast.front.run.web; from holdfast.front.responses.create import ResponseRequest"
        " as R; before = R.__pydantic_complete__; R.model_validate({'model': 'm', 'input': 'x'});"
        " print(before, R.__pydantic_complete__)"
    )
    assert python_output(code) == "False True"
