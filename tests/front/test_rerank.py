from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import LimitsSettings
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway

RERANK = "/v1/rerank"
DOCUMENTS: list[Any] = ["short", {"text": "the longest of them"}, "a bit longer"]


async def asked(gateway: ScriptedGateway, path: str = RERANK, **body: Any) -> Any:
    async with client_of(gateway, limits=LimitsSettings(max_inputs=3)) as client:
        return await client.post(path, json={"query": "what?", "documents": DOCUMENTS, **body})


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
async def test_documents_are_returned_by_relevance_with_their_indices(path: str) -> None:
    gateway = ScriptedGateway()
    body = (await asked(gateway, path)).json()
    assert [result["index"] for result in body["results"]] == [1, 2, 0]
    assert [result["document"]["text"] for result in body["results"]] == [
        "the longest of them",
        "a bit longer",
        "short",
    ]
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx(
        [0.19, 0.12, 0.05]
    )
    assert (body["model"], body["method"], body["usage"]["total_tokens"]) == (
        MODEL,
        "likelihood",
        3 * PROMPT_TOKENS,
    )
    (request,) = gateway.ranked
    assert (request.query, request.documents) == (
        "what?",
        ("short", "the longest of them", "a bit longer"),
    )


async def test_only_the_top_documents_are_returned_on_request() -> None:
    results = (await asked(ScriptedGateway(), top_n=1, return_documents=False)).json()["results"]
    assert [(result["index"], "document" in result) for result in results] == [(1, False)]


async def test_equal_documents_keep_their_order() -> None:
    results = (await asked(ScriptedGateway(), documents=["aa", "bb", "cc"])).json()["results"]
    assert [result["index"] for result in results] == [0, 1, 2]


async def test_an_unknown_model_is_a_404() -> None:
    assert (await asked(ScriptedGateway(), model="nobody")).status_code == 404
