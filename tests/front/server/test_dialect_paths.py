from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ServerSettings
from holdfast.front.application import DIALECTS
from holdfast.front.server.dialect import DialectTable
from tests.fakes.http_clients import CHAT, COMPLETIONS, chat_body, client_of, completion_body
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

TABLE = DialectTable(DIALECTS)
segments = st.lists(
    st.sampled_from(
        ["v1", "chat", "completions", "models", "health", "api", "a", "sessions", "..", "x y"]
    ),
    max_size=5,
)


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/v1/chat/completions/",
        "//v1//chat//completions",
        "/v1/v1/chat/completions",
        "/v1/v1/v1//chat/completions/",
    ],
)
async def test_a_conversation_is_answered_under_any_base_url(path: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json=chat_body())
        text = await client.post(path.replace("/chat", "", 1), json=completion_body())
    assert (response.status_code, text.status_code) == (200, 200)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/health",
        "/health/",
        "//health",
        "/v1/metrics",
        "/v1/openapi.json",
        "/sessions",
        f"/models/{MODEL}",
    ],
)
async def test_other_paths_are_too(path: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        assert (await client.get(path)).status_code == 200


async def test_extra_slashes_do_not_bypass_the_key() -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        statuses = [
            (await client.get(path)).status_code
            for path in ("//", "//v1//models", "/v1/models//", "/v1/v1/metrics")
        ]
    assert statuses == [200, 401, 401, 401]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/openai/v2/chat/completions", CHAT),
        ("/v2/completions", COMPLETIONS),
        ("/x/models", "/v1/models"),
    ],
)
async def test_an_unguessable_path_is_a_404_naming_the_right_one(path: str, named: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
    assert f"did you mean {named}?" in response.json()["error"]["message"]


async def test_any_other_unknown_path_lists_the_served_ones() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.get("/v1")
        wrong_method = await client.get(CHAT)
    assert CHAT in response.json()["error"]["message"]
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert "POST" in wrong_method.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/sessions", "GET, POST"),
        ("/v1/sessions/s", "DELETE, GET, PATCH"),
        ("/v1/sessions/", "GET, POST"),
    ],
)
async def test_a_wrong_method_is_told_the_allowed_ones(path: str, methods: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.put(path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)
    assert methods in response.json()["error"]["message"]


@given(parts=segments, doubled=st.booleans())
def test_a_served_path_is_a_fixed_point(parts: list[str], doubled: bool) -> None:
    path = ("//" if doubled else "/") + "/".join(parts)
    once = TABLE.served_path(path)
    assert TABLE.served_path(once) == once
    assert "//" not in once


@given(parts=segments)
def test_a_guessed_path_is_always_served(parts: list[str]) -> None:
    meant = TABLE.suggested_path("/" + "/".join(parts))
    assert meant is None or TABLE.served_path(meant) == meant
