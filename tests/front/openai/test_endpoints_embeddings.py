from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway

EMBEDDINGS = "/v1/embeddings"


async def asked(
    gateway: ScriptedGateway, *, limits: LimitsSettings | None = None, **body: Any
) -> Any:
    async with client_of(gateway, limits=limits) as client:
        return await client.post(EMBEDDINGS, json={"model": MODEL, **body})


@pytest.mark.parametrize(
    ("given", "inputs", "is_list"),
    [
        ("a text", ("a text",), False),
        (["a", "b"], ("a", "b"), True),
        ([1, 2], ((1, 2),), False),
        ([[1], [2, 3]], ((1,), (2, 3)), True),
    ],
    ids=str,
)
async def test_all_kinds_of_input_are_embedded(
    given: Any, inputs: tuple[Any, ...], is_list: bool
) -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, input=given)
    (request,) = gateway.embedded
    assert (request.inputs, request.is_list, request.pooling, request.dimensions) == (
        inputs,
        is_list,
        None,
        None,
    )
    body = response.json()
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [(each["object"], each["index"]) for each in body["data"]] == [
        ("embedding", index) for index in range(len(inputs))
    ]
    assert body["data"][-1]["embedding"] == pytest.approx([0.6, 0.8, len(inputs) - 1])
    tokens = PROMPT_TOKENS * len(inputs)
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_base64_encodes_the_same_numbers() -> None:
    (entry,) = (await asked(ScriptedGateway(), input="a", encoding_format="base64")).json()["data"]
    assert array("f", base64.b64decode(entry["embedding"])).tolist() == pytest.approx([0.6, 0.8, 0])


async def test_embedding_options_reach_the_default_model_with_the_tenant() -> None:
    gateway = ScriptedGateway()
    asked_for = {
        "pooling": "last",
        "dimensions": 2,
        "truncate_prompt_tokens": -1,
        "cache_salt": "pepper",
        "user": "me",
    }
    async with client_of(gateway) as client:
        await client.post(EMBEDDINGS, json={"input": "a", **asked_for})
    (request,) = gateway.embedded
    assert (request.model, request.pooling, request.dimensions, request.truncates) == (
        MODEL,
        "last",
        2,
        True,
    )
    assert request.tenant


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (
            PromptTooLong(prompt_tokens=9, context_tokens=8, field="input.3"),
            400,
            "context_length_exceeded",
        ),
        (QueueFull(queued=9, limit=9, retry_after_seconds=3), 503, "queue_full"),
        (GenerationFailed("not a number"), 500, "generation_failed"),
    ],
    ids=str,
)
async def test_later_failures_have_their_own_status(
    refusal: Exception, status: int, code: str
) -> None:
    response = await asked(ScriptedGateway(refusal=refusal), input=["a"] * 4)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if status == 400:
        assert response.json()["error"]["param"] == "input.3"


async def test_an_unknown_model_is_a_404() -> None:
    assert (await asked(ScriptedGateway(), input="a", model="nobody")).status_code == 404


async def test_vectors_are_counted_by_the_metrics() -> None:
    async with client_of(ScriptedGateway()) as client:
        await client.post(EMBEDDINGS, json={"input": ["a", "b"]})
        told = (await client.get("/metrics")).text
    model = f'model="{MODEL}"'
    for line in (
        f'holdfast_requests_total{{{model},reason="stop"}} 2.0',
        f"holdfast_request_prompt_tokens_total{{{model}}} {2 * PROMPT_TOKENS}.0",
        f'holdfast_http_requests_total{{method="POST",path="{EMBEDDINGS}",status="200"}} 1.0',
    ):
        assert line in told
