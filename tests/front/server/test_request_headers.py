from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ServerSettings
from holdfast.front.prompt.limits import tenant_of
from holdfast.front.request import GenerationRequest
from tests.fakes.http_clients import CHAT, COMPLETIONS, HELLO, chat_body, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, answer

texts = st.text(max_size=5)


@given(one=st.tuples(texts, texts, texts), other=st.tuples(texts, texts, texts))
def test_tenants_are_equal_only_if_key_name_and_salt_are(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    first, second = (
        tenant_of(api_key=key, name=name, cache_salt=salt) for key, name, salt in (one, other)
    )
    assert (first == second) == (one == other)


def test_the_anonymous_tenant_is_empty_and_secrets_are_hidden() -> None:
    assert tenant_of(api_key="", name="", cache_salt="") == ""
    assert "secret" not in tenant_of(api_key="secret", name="secret", cache_salt="secret")


async def requests(
    headers: dict[str, str],
    *,
    path: str = CHAT,
    server: ServerSettings | None = None,
    **fields: Any,
) -> list[GenerationRequest]:
    gateway = ScriptedGateway(script=answer("a"))
    body = chat_body(**fields) if path == CHAT else {"prompt": "a", **fields}
    async with client_of(gateway, server=server or ServerSettings()) as client:
        assert (await client.post(path, json=body, headers=headers)).status_code == 200
    return gateway.requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_tenant_depends_on_header_salt_and_required_key(path: str) -> None:
    needs_key = ServerSettings(api_key="k")
    key = {"authorization": "Bearer k"}
    asked = [
        await requests({}, path=path),
        await requests({"X-Holdfast-Tenant": "t"}, path=path),
        await requests({}, path=path, cache_salt="t"),
        await requests(key, path=path, server=needs_key),
        await requests({**key, "x-holdfast-tenant": "t"}, path=path, server=needs_key),
    ]
    tenants = [request.tenant for (request,) in asked]
    assert tenants[0] == ""
    assert len(set(tenants)) == len(tenants)
    (unneeded,) = await requests({"authorization": "Bearer anything"}, path=path)
    assert unneeded.tenant == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "hello"}),
        ("/tokenize", {"model": MODEL, "messages": HELLO}),
        ("/apply-template", {"model": MODEL, "messages": HELLO}),
    ],
)
async def test_requests_that_only_count_have_a_tenant_too(path: str, body: dict[str, Any]) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        for tenant in ("t", "u"):
            assert (
                await client.post(path, json=body, headers={"X-Holdfast-Tenant": tenant})
            ).status_code == 200
        assert (await client.post(path, json={**body, "cache_salt": "s"})).status_code == 200
    assert len({"", *(request.tenant for request in gateway.requests)}) == 4


@pytest.mark.parametrize("salt", ["", 3])
async def test_an_empty_salt_is_refused(salt: object) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(cache_salt=salt))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


async def test_an_unknown_holdfast_option_is_refused() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(holdfast={"explian": True}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "holdfast.explian")


@pytest.mark.parametrize(
    ("headers", "options", "explains"),
    [
        ({}, {}, False),
        ({}, {"explain": True}, True),
        ({"X-Holdfast-Explain": "1"}, {}, True),
        ({"X-Holdfast-Explain": "True"}, {"explain": False}, True),
        ({"X-Holdfast-Explain": "0"}, {}, False),
    ],
)
async def test_body_or_header_request_an_explanation(
    headers: dict[str, str], options: dict[str, bool], explains: bool
) -> None:
    async with client_of(ScriptedGateway(script=answer("a"))) as client:
        response = await client.post(CHAT, json=chat_body(holdfast=options), headers=headers)
    assert ("holdfast" in response.json()) == explains


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_session_is_named_by_header_field_or_cache_key(path: str) -> None:
    header = {"X-Session-ID": "from header"}
    asked = [
        await requests(header, path=path, session_id="from field", prompt_cache_key="from key"),
        await requests({}, path=path, session_id="from field", prompt_cache_key="from key"),
        await requests({}, path=path, prompt_cache_key="from key"),
        await requests({}, path=path),
        await requests({}, path=path, prompt_cache_key=""),
    ]
    assert [request.session_id for (request,) in asked] == [
        "from header",
        "from field",
        "from key",
        "",
        "",
    ]


async def test_any_cache_key_is_accepted_and_different_ones_differ() -> None:
    odd = [await requests({}, prompt_cache_key=key) for key in ("a/b", "a/c", "x" * 300, "\n")]
    assert len({request.session_id for (request,) in odd}) == len(odd)


@pytest.mark.parametrize(("headers", "fields", "field"), [
    ({"X-Session-ID": "a/b"}, {}, "X-Session-ID"),
    ({"X-Session-ID": ""}, {}, "X-Session-ID"),
    ({}, {"session_id": "x" * 257}, "session_id"),
    ({}, {"session_id": "a\nb"}, "session_id"),
])  # fmt: skip
async def test_an_invalid_session_is_refused_by_name(
    headers: dict[str, str], fields: dict[str, str], field: str
) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(**fields), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
