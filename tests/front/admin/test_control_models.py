from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from holdfast.errors import InvalidRequest, ModelLoadError, ModelPinned, WorkerUnavailable
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedControl, ScriptedGateway

PLACE = f"/admin/models/{MODEL}"  # its name has a slash


@pytest.mark.parametrize("name", [MODEL, quote(MODEL, safe="")])
@pytest.mark.parametrize(
    ("action", "body", "done"),
    [
        ("load", None, ("load", MODEL)),
        ("unload", None, ("unload", MODEL)),
        ("pin", None, ("pin", MODEL, True)),
        ("pin", {"pinned": False}, ("pin", MODEL, False)),
    ],
)
async def test_a_model_is_loaded_unloaded_and_pinned(
    name: str, action: str, body: Any, done: tuple[object, ...]
) -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control) as client:
        answered = await client.post(f"/admin/models/{name}/{action}", json=body)
    assert (answered.status_code, answered.json()["id"], answered.json()["state"]) == (
        200,
        MODEL,
        "ready",
    )
    assert control.done == [done]


async def test_limits_of_a_model_are_changed() -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control) as client:
        both = await client.patch(PLACE, json={"max_running": 2, "step_tokens": 512})
        one = await client.patch(PLACE, json={"max_running": 3})
    assert both.json() == {"id": MODEL, "max_running": 2, "step_tokens": 512}
    assert one.json() == {"id": MODEL, "max_running": 3, "step_tokens": None}
    assert control.done == [("limits", MODEL, 2, 512), ("limits", MODEL, 3, None)]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("PATCH", "/admin/models/none", {"max_running": 2}, 404, "model"),
        ("PATCH", PLACE, {"max_running": 0}, 400, "max_running"),
        ("PATCH", PLACE, {"step_tokens": "8"}, 400, "step_tokens"),
        ("PATCH", PLACE, {"running": 8}, 400, "running"),
        ("POST", "/admin/models/none/load", None, 404, "model"),
        ("POST", f"{PLACE}/pin", {"pinned": "yes"}, 400, "pinned"),
        ("POST", f"{PLACE}/pin", {"pin": True}, 400, "pin"),
    ],
)
async def test_bad_input_names_the_field_and_does_nothing(
    method: str, path: str, body: Any, status: int, field: str
) -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control) as client:
        refused = await client.request(method, path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)
    assert control.done == []


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (WorkerUnavailable("no room"), 503),
        (ModelLoadError("broken"), 503),
        (ModelPinned("a"), 409),
        (InvalidRequest("too few"), 400),
    ],
)
async def test_impossible_operations_are_refused_with_a_reason(
    refusal: Exception, status: int
) -> None:
    async with client_of(ScriptedGateway(), control=ScriptedControl(refusal=refusal)) as client:
        refused = await client.post(f"{PLACE}/load")
    assert (refused.status_code, refused.json()["error"]["message"]) == (status, str(refusal))


@pytest.mark.parametrize(
    ("method", "path"),
    [("PATCH", PLACE), *(("POST", f"{PLACE}/{what}") for what in ("load", "unload", "pin"))],
)
async def test_it_takes_an_administrator(method: str, path: str) -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control) as client:
        refused = await client.request(
            method, path, headers={"x-forwarded-for": "192.0.2.1"}, json={}
        )
    assert (refused.status_code, control.done) == (403, [])
