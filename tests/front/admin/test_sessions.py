"""Session endpoints: their parameters, commands, answers and refusals."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.config import LimitsSettings, ServerSettings
from holdfast.errors import SessionFailure, SessionRefused
from holdfast.front.admin.sessions import OPERATIONS
from holdfast.front.prompt.limits import tenant_of
from holdfast.wire.sessions import SESSION_OPERATIONS, OperationName, SessionCommand
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, SESSION, ScriptedGateway, ScriptedSessions

SESSIONS = "/v1/sessions"
OBJECT = {
    "id": "s",
    "object": "session",
    "model": MODEL,
    "created_at": 1_700_000_000.0,
    "last_used_at": 1_700_000_100.5,
    "expires_at": None,
    "pinned": True,
    "pin_state": "kept",
    "requests": 3,
    "branches": 2,
    "tokens": 120,
    "kept_tokens": 100,
    "ram_tokens": 60,
    "disk_tokens": 40,
    "live_tokens": 50,
    "kept_bytes": 4096,
    "metadata": {"agent": "one"},
    "forked_from": None,
}


async def ask(
    method: str,
    path: str,
    *,
    sessions: ScriptedSessions | None = None,
    server: ServerSettings | None = None,
    **more: Any,
) -> tuple[httpx.Response, list[tuple[str, SessionCommand]]]:
    gateway = sessions or ScriptedSessions()
    async with client_of(
        ScriptedGateway(),
        sessions=gateway,
        server=server,
        limits=LimitsSettings(max_import_bytes=2048),
    ) as client:
        return await client.request(method, path, **more), gateway.asked


def without_call_id(command: SessionCommand) -> dict[str, Any]:
    assert command.call_id
    fields = {name: getattr(command, name) for name in type(command).__struct_fields__}
    return {name: value for name, value in fields.items() if name != "call_id"}


@pytest.mark.parametrize(("method", "path", "body", "command"), [
    ("POST", "", {"id": "a b"}, SessionCommand(operation="open", tenant="", session_id="a b")),
    ("POST", "", {"id": "a", "ttl_seconds": None, "pinned": True, "metadata": {"k": "v"}},
     SessionCommand(operation="open", tenant="", session_id="a", ttl_seconds=None, pinned=True, metadata={"k": "v"})),
    ("POST", "", {"id": "a", "ttl_seconds": 1.5}, SessionCommand(operation="open", tenant="", session_id="a", ttl_seconds=1.5)),
    ("GET", "/a%20b", None, SessionCommand(operation="get", tenant="", session_id="a b")),
    ("PATCH", "/a", {"pinned": False}, SessionCommand(operation="update", tenant="", session_id="a", pinned=False)),
    ("PATCH", "/a", {"ttl_seconds": None}, SessionCommand(operation="update", tenant="", session_id="a", ttl_seconds=None)),
    ("PATCH", "/a", {"metadata": {}}, SessionCommand(operation="update", tenant="", session_id="a", metadata={})),
    ("PATCH", "/a", {}, SessionCommand(operation="update", tenant="", session_id="a")),
    ("POST", "/a/fork", {"id": "b", "pinned": True},
     SessionCommand(operation="fork", tenant="", session_id="a", new_session_id="b", pinned=True)),
])  # fmt: skip
async def test_requests_become_commands_and_answers_become_sessions(
    method: str, path: str, body: object, command: SessionCommand
) -> None:
    response, [(model, asked)] = await ask(method, SESSIONS + path, json=body)
    assert (response.status_code, response.json()) == (200, OBJECT)
    assert model == MODEL
    assert without_call_id(asked) == {
        name: getattr(command, name) for name in without_call_id(asked)
    }


@pytest.mark.parametrize("path", ["", "/a/fork"])
async def test_a_missing_name_is_generated_even_without_a_body(path: str) -> None:
    names = set()
    for more in ({}, {"json": {}}):
        _, [(_, command)] = await ask("POST", SESSIONS + path, **more)
        names.add(command.new_session_id or command.session_id)
    assert len(names) == 2
    assert all(name.startswith("sess_") for name in names)


async def test_the_requested_number_of_sessions_is_listed() -> None:
    found = tuple(msgspec.structs.replace(SESSION, session_id=name) for name in "abc")
    for limit, names, has_more in (
        ("", "abc", False),
        ("?limit=3", "abc", False),
        ("?limit=2", "ab", True),
    ):
        response, [(_, command)] = await ask(
            "GET", SESSIONS + limit, sessions=ScriptedSessions(found=found)
        )
        answer = response.json()
        assert command.operation == "list"
        assert ([session["id"] for session in answer["data"]], answer["has_more"]) == (
            list(names),
            has_more,
        )


@pytest.mark.parametrize(
    ("query", "forget"),
    [("", False), ("?forget=true", True), ("?forget=1", True), ("?forget=false", False)],
)
async def test_closing_is_confirmed_and_forgets_only_on_request(query: str, forget: bool) -> None:
    response, [(_, command)] = await ask("DELETE", f"{SESSIONS}/a{query}")
    assert response.json() == {"id": "a", "object": "session.deleted", "deleted": True}
    assert command.operation == "close"
    assert command.forget is forget


async def test_model_and_tenant_come_from_the_request() -> None:
    headers = {"X-Holdfast-Tenant": "t", "Authorization": "Bearer k"}
    server = ServerSettings(api_key="k")
    (_, [(_, command)]) = await ask(
        "GET", f"{SESSIONS}/a?cache_salt=s", headers=headers, server=server
    )
    assert command.tenant == tenant_of(api_key="k", name="t", cache_salt="s")
    for method, path, body in (
        ("GET", "?model=other", None),
        ("POST", "", {"model": "other"}),
        ("GET", "/a?model=other", None),
    ):
        _, [(model, _)] = await ask(method, SESSIONS + path, json=body)
        assert model == "other"


@pytest.mark.parametrize(("method", "path", "body", "field"), [
    ("POST", "", {"id": "a/b"}, "id"),
    ("POST", "", {"id": ""}, "id"),
    ("POST", "", {"ttl_seconds": 0}, "ttl_seconds"),
    ("POST", "", {"ttl_seconds": "1"}, "ttl_seconds"),
    ("POST", "", {"metadata": {"k": 1}}, "metadata.k"),
    ("POST", "", {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ("POST", "", {"pined": True}, "pined"),
    ("PATCH", "/a", {"pinned": None}, "pinned"),
    ("POST", "/a/fork", {"id": "x" * 257}, "id"),
    ("GET", "?limit=0", None, "limit"),
    ("GET", "?limit=many", None, "limit"),
    ("DELETE", "/a?forget=maybe", None, "forget"),
    ("POST", "/import?id=a/b", None, "id"),
])  # fmt: skip
async def test_invalid_requests_are_refused_by_field(
    method: str, path: str, body: object, field: str
) -> None:
    response, asked = await ask(method, SESSIONS + path, json=body)
    assert (response.status_code, response.json()["error"]["param"], asked) == (400, field, [])


@pytest.mark.parametrize(("failure", "status", "code"), [
    (SessionFailure.NOT_FOUND, 404, "session_not_found"),
    (SessionFailure.EXISTS, 409, "session_exists"),
    (SessionFailure.NOT_KEPT, 409, "session_not_kept"),
    (SessionFailure.OVER_QUOTA, 409, "session_over_quota"),
    (SessionFailure.NO_ROOM, 507, "session_no_room"),
    (SessionFailure.TOO_MANY, 409, "too_many_sessions"),
    (SessionFailure.INVALID, 400, "invalid_value"),
    (SessionFailure.BUSY, 503, "session_transfers_busy"),
    (SessionFailure.OFF, 409, "sessions_off"),
    (SessionFailure.BAD_FILE, 400, "session_file_damaged"),
    (SessionFailure.OTHER_MODEL, 400, "session_of_another_model"),
    (SessionFailure.FAILED, 500, "session_failed"),
])  # fmt: skip
async def test_every_refusal_has_a_status_and_a_code(
    failure: SessionFailure, status: int, code: str
) -> None:
    gateway = ScriptedSessions(refusal=SessionRefused(failure, "because"))
    response, _ = await ask("GET", f"{SESSIONS}/a", sessions=gateway)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (status, code, "because")


def test_every_failure_has_a_status() -> None:
    marks = test_every_refusal_has_a_status_and_a_code.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(SessionFailure)


async def test_an_exported_session_is_a_private_file_deleted_afterwards() -> None:
    gateway = ScriptedSessions(exported=b"x" * 3_000_000)
    response, [(_, command)] = await ask("GET", f"{SESSIONS}/a%22b/export", sessions=gateway)
    assert response.content == gateway.exported
    assert response.headers["content-type"] == "application/octet-stream"
    assert int(response.headers["content-length"]) == len(gateway.exported)
    assert response.headers["content-disposition"] == 'attachment; filename="a_b.holdfast-session"'
    assert command.operation == "export"
    assert not Path(command.path).parent.exists()


async def test_an_imported_file_is_complete_and_deleted_afterwards() -> None:
    gateway = ScriptedSessions()
    response, [(_, command)] = await ask(
        "POST", f"{SESSIONS}/import?id=new", sessions=gateway, content=b"abc" * 500
    )
    assert response.json() == OBJECT
    assert gateway.imported == b"abc" * 500
    assert command.operation == "import"
    assert command.session_id == "new"
    assert not Path(command.path).parent.exists()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_file_that_is_too_large_is_refused_and_deleted(
    declared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def pieces() -> Any:
        for _ in range(3):
            yield b"x" * 1000

    content = b"x" * 3000 if declared else pieces()
    response, asked = await ask("POST", f"{SESSIONS}/import", content=content)
    assert (response.status_code, response.json()["error"]["code"], asked) == (
        413,
        "body_too_large",
        [],
    )
    assert list(tmp_path.iterdir()) == []


async def test_a_refused_file_is_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gateway = ScriptedSessions(refusal=SessionRefused(SessionFailure.BAD_FILE, "no"))
    response, _ = await ask("POST", f"{SESSIONS}/import", sessions=gateway, content=b"abc")
    assert response.status_code == 400
    assert list(tmp_path.iterdir()) == []


async def test_sessions_require_the_api_key() -> None:
    for method, path in (
        ("GET", ""),
        ("POST", ""),
        ("DELETE", "/a"),
        ("GET", "/a/export"),
        ("POST", "/import"),
    ):
        response, asked = await ask(method, SESSIONS + path, server=ServerSettings(api_key="k"))
        assert (response.status_code, asked) == (401, [])


@pytest.mark.parametrize("name", SESSION_OPERATIONS)
def test_every_operation_is_documented_with_its_parameters(name: OperationName) -> None:
    found = next(each for each in OPERATIONS if (each.method, each.path) == route(name))
    body = found.shape.get("requestBody", {}).get("content", {})
    fields = {
        field
        for content in body.values()
        if hasattr(content["schema"], "model_fields")
        for field in content["schema"].model_fields
    }
    taken = (
        fields
        | {each["name"] for each in found.shape.get("parameters", ())}
        | set(re.findall(r"{(\w+)}", found.path))
    )
    called = {"id": "new_session_id" if name == "fork" else "session_id"}
    of_all = {"model", "cache_salt"}
    assert {called.get(each, each) for each in taken - of_all} == set(
        SESSION_OPERATIONS[name].takes
    ) - {"path"}


def route(name: OperationName) -> tuple[str, str]:
    return SESSION_OPERATIONS[name].method, SESSIONS + SESSION_OPERATIONS[name].path
