from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from holdfast.config import ServerSettings
from holdfast.front.application import create_application
from holdfast.front.telemetry.history import Cell
from holdfast.front.telemetry.history_file import HistoryFile
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, scripted_services

PATH = "/admin/performance"


async def test_an_answer_is_in_the_history_with_its_metrics() -> None:
    async with client_of(ScriptedGateway()) as client:
        answered = await client.post(CHAT, json=chat_body(stream=True))
        assert answered.status_code == 200
        shown = (await client.get(PATH, params={"range": "15m"})).json()
        scraped = (await client.get("/metrics")).text
    counted = dict(line.rsplit(" ", 1) for line in scraped.splitlines() if line[0] != "#")

    def metric(name: str) -> float:
        return float(counted[f'holdfast_{name}{{model="{MODEL}"}}'])

    total = shown["total"]
    assert total["answers"] == 1
    assert total["prompt_tokens"] == metric("request_prompt_tokens_total")
    assert total["generated_tokens"] == metric("request_completion_tokens_total")
    assert total["cached_tokens"] == metric("request_cached_tokens_total")
    assert total["first_token"]["count"] == metric("first_token_seconds_count")
    assert total["gap"]["count"] == metric("inter_token_seconds_count")
    assert [each["model"] for each in shown["models"]] == [MODEL]
    (point,) = shown["points"]
    assert point["figures"] == total


async def test_names_of_models_that_are_not_served_never_count() -> None:
    """Otherwise, any client could push out the history of real models."""
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    documents = {"query": "hi", "documents": ["a"]}
    bodies = {
        CHAT: messages,
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": messages,
        "/api/chat": {"messages": messages["messages"]},
        "/api/generate": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
        "/v1/rerank": documents,
    }
    services = scripted_services(ScriptedGateway())
    transport = httpx.ASGITransport(create_application(services), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8321") as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
        for number, (path, body) in enumerate(bodies.items()):
            answered = await client.post(path, json={"model": f"none-{number}", **body})
            assert answered.status_code == 404, (path, answered.text)
    assert services.telemetry.metrics.history.models == {MODEL}


async def test_without_an_answer_everything_is_empty() -> None:
    async with client_of(ScriptedGateway()) as client:
        shown = (await client.get(PATH)).json()
    assert (shown["range"], shown["model"], shown["models"], shown["points"]) == (
        "1h",
        None,
        [],
        [],
    )
    assert shown["total"]["first_token"] is None


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"range": "2h"}, 400, "must be one of 15m, 1h, 6h, 24h, 7d"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": MODEL, "range": "7d"}, 200, MODEL),
        ({"model": ""}, 200, ""),
    ],
)
async def test_the_query_is_checked(query: dict[str, str], status: int, words: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        answered = await client.get(PATH, params=query)
    assert answered.status_code == status
    assert words in answered.text


@pytest.mark.parametrize("path", [PATH, "/admin/logs", "/admin/logs/events"])
async def test_only_administrators_see_what_others_did(path: str) -> None:
    server = ServerSettings(api_key="sesame")
    async with client_of(ScriptedGateway(), server=server) as client:
        assert (await client.get(path)).status_code == 401
    async with client_of(ScriptedGateway(), address="192.168.1.9") as client:
        refused = await client.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")


async def test_the_history_is_saved_when_the_server_stops(tmp_path: Path) -> None:
    services = scripted_services(ScriptedGateway())
    path = tmp_path / "server-1.history"
    file = HistoryFile(services.telemetry.metrics.history, path)
    file.open()
    app = create_application(
        replace(services, telemetry=replace(services.telemetry, history_file=file))
    )
    async with app.router.lifespan_context(app):
        services.telemetry.metrics.history.add("m", Cell(answers=1))
        assert not path.exists()
    assert path.exists()


def test_cells_contain_neither_names_nor_texts() -> None:
    assert set(Cell.__struct_fields__) == {
        "answers",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "phases",
        "speed",
    }
