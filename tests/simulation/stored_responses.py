"""How agents use stored responses, and checks of the results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.actions import Turn
from tests.simulation.conversations import Message, read_parts
from tests.simulation.network import Broken, Exchange
from tests.simulation.tools import items_of

if TYPE_CHECKING:
    from tests.simulation.front import SimulatedFront
    from tests.simulation.simulation import Simulation


class Lost(Broken):
    """A background response was cancelled or lost."""


class Refused(Broken):
    """The API key of a request is not valid any more."""


@dataclass(kw_only=True)
class Stored:
    """A stored response or conversation. turn: the latest one of its agent. messages: the agent's
    conversation, with the answer. read: the same, as the model has read it.
    """

    id: str
    turn: Turn
    messages: list[Message]
    read: list[Message]
    ended_at: float
    front: SimulatedFront
    is_deleted: bool = False


@dataclass(kw_only=True)
class StoredResponse(Stored):
    """A response that its agent has received to the end. events: all events, if the agent has
    received them.
    """

    text: str
    status: str
    events: list[dict[str, Any]]


@dataclass
class Found:
    """The answer to a request about a stored response."""

    status: int
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    def events(self) -> list[dict[str, Any]]:
        lines = self.content.split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]


def get(
    simulation: Simulation,
    response_id: str,
    *,
    key: str,
    tenant: str,
    method: str = "GET",
    action: str = "",
    query: str = "",
    resource: str = "responses",
    body: Mapping[str, Any] | None = None,
) -> Found:
    """Make a request about a stored response or conversation. Raises Broken, and Refused."""
    began = simulation.world.now
    salt = f"cache_salt={tenant}" if tenant else ""
    whose = f"/{response_id}" if response_id else ""
    path = f"/v1/{resource}{whose}{action}?{'&'.join(filter(None, (query, salt)))}"
    exchange = Exchange(
        simulation.front, method, path.rstrip("?"), body, headers=simulation.keys.headers(key)
    )
    content = exchange.whole(seconds=600.0)
    simulation.world.tell(f"{method} {path}: {exchange.status}")
    if key != "wrong" and simulation.keys.may_fail(key, since=began):
        if exchange.status == 401:
            raise Refused
        if not simulation.keys.may_pass(key, since=began):
            simulation.violation("tenants are apart", f"{path} with a removed key: {content!r}")
    return Found(exchange.status, content)


def look(simulation: Simulation, stored: StoredResponse, kind: str, *, number: int) -> None:
    """Read or delete a stored response, or try to as another caller. number: any number, which
    decides after which event the agent resumes reading.
    """
    try:
        match kind:
            case "read":
                _read(simulation, stored)
            case "events":
                _read_events(simulation, stored, number=number)
            case "foreign":
                _try_as_others(simulation, stored)
            case "delete":
                _delete(simulation, stored)
    except Broken:
        return  # the server is down


def _own(simulation: Simulation, stored: StoredResponse, **more: str) -> Found | None:
    """Make a request as the response's owner. It must succeed; None if its failure is excused."""
    turn = stored.turn
    found = get(simulation, stored.id, key=turn.key, tenant=turn.tenant, **more)
    if found.status == 200 and not (stored.is_deleted and not may_return(simulation, stored)):
        return found
    if stored.is_deleted and found.status == 404:
        return None
    if found.status == 200 or not may_be_lost(simulation, stored):
        simulation.violation(
            "stored responses stay", f"{stored.id} ({more}): {found.status} {found.content[:300]!r}"
        )
    return None


def _read(simulation: Simulation, stored: StoredResponse) -> None:
    found = _own(simulation, stored)
    if found is not None:
        check_same(simulation, stored, found.json)
    listed = _own(simulation, stored, action="/input_items", query="order=asc&limit=100")
    if listed is not None:
        items = listed.json["data"]
        sees_images = bool(simulation.machine.sees_images)
        texts = [text_of_item(item, sees_images=sees_images) for item in items]
        read = [item for each in stored.read[:-1] for item in items_of(each)]
        right = [text_of_item(item, sees_images=sees_images) for item in read][-len(texts) :]
        shown = [each for each, text in zip(right, texts, strict=False) if text is not None]
        if [text for text in texts if text is not None] != shown or not texts:
            simulation.violation("stored responses stay", f"{stored.id} has the input {texts}")


def text_of_item(item: Mapping[str, Any], *, sees_images: bool) -> str | None:
    """The text of an item as the model reads it; of a call, its name and arguments; None for a summary,
    which is encrypted.
    """
    if item.get("type") == "compaction":
        return None
    content = item.get("content", item.get("output"))
    if content is None:
        return _text_of_call(item)
    return content if isinstance(content, str) else read_parts(content, sees_images=sees_images)


def _text_of_call(item: Mapping[str, Any]) -> str:
    return f"{item['name']} {item['arguments']}"


def check_same(simulation: Simulation, stored: StoredResponse, body: Mapping[str, Any]) -> None:
    """The stored response is the one that its client has received."""
    status, text = body["status"], text_of(body)
    calls = [_text_of_call(item) for item in body["output"] if item["type"] == "function_call"]
    if status == "failed" and may_be_lost(simulation, stored):
        return
    if (status, text) != (stored.status, stored.text):
        simulation.violation(
            "stored responses stay",
            f"{stored.id} is {status} {text!r} instead of {stored.status} {stored.text!r}",
        )
    right = [f"{each.name} {each.arguments}" for each in stored.read[-1].get("calls", ())]
    if calls != right:
        simulation.violation("stored responses stay", f"{stored.id} has calls {calls}, not {right}")


def text_of(body: Mapping[str, Any]) -> str:
    """The text of a response."""
    parts = [part for item in body["output"] for part in item.get("content") or ()]
    return "".join(part.get("text") or "" for part in parts)


def _read_events(simulation: Simulation, stored: StoredResponse, *, number: int) -> None:
    heard = stored.events
    after = number % len(heard) if heard else -1
    query = "stream=true" + (f"&starting_after={after}" if after >= 0 else "")
    found = _own(simulation, stored, query=query)
    if found is None:
        return
    events = found.events()
    is_failed = events and events[-1]["type"] == "response.failed"
    if is_failed and may_be_lost(simulation, stored):
        return
    texts = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    # a status that was repeated to keep the connection alive is not stored
    repeated = [
        each["sequence_number"] for each in heard if each["type"] == "response.in_progress"
    ][1:]
    if heard and events != [
        each
        for each in heard
        if each["sequence_number"] > after and each["sequence_number"] not in repeated
    ]:
        simulation.violation(
            "stored responses stay",
            f"the events of {stored.id} after {after} are {events[:3]} … {events[-1:]}",
        )
    if not heard and "".join(texts) != stored.text:
        simulation.violation("stored responses stay", f"the events of {stored.id} are {texts}")


def _try_as_others(simulation: Simulation, stored: StoredResponse) -> None:
    key, tenant = stored.turn.key, stored.turn.tenant
    others = [(key, "foreign")]
    others += [(each, tenant) for each in ("", "alice", "bob", "wrong")]
    for other in others:
        sender = simulation.keys.sender(other[0])
        if (sender, other[1]) == (simulation.keys.sender(key), tenant):
            continue
        for method, action in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            found = get(
                simulation,
                stored.id,
                key=other[0],
                tenant=other[1],
                method=method,
                action=action,
            )
            right = 401 if sender == "wrong" else 404
            if found.status not in (right, 503):
                simulation.violation(
                    "tenants are apart",
                    f"{method} {stored.id}{action} of {other}: {found.status} {found.content!r}",
                )
    _read(simulation, stored)


def _delete(simulation: Simulation, stored: StoredResponse) -> None:
    if stored.is_deleted:
        _own(simulation, stored)
        return
    if _own(simulation, stored, method="DELETE") is not None:
        stored.is_deleted = True
        _own(simulation, stored)


def is_lost(simulation: Simulation, stored: StoredResponse) -> bool:
    """Whether the store has lost a response or its end, and may have. Asks the server."""
    if stored.is_deleted or not may_be_lost(simulation, stored):
        return False
    try:
        found = get(simulation, stored.id, key=stored.turn.key, tenant=stored.turn.tenant)
    except Broken:
        return True
    return found.status != 200 or found.json["status"] != stored.status


def may_be_lost(simulation: Simulation, stored: Stored) -> bool:
    """Whether a stored response or conversation may be gone, failed or unreachable."""
    excuses = simulation.checks.excuses
    if stored.is_deleted or "failing" in simulation.options or excuses.disk_has_failed():
        return True
    if not simulation.options["has_store"] and simulation.front is not stored.front:
        return True
    # the server must not die before it has written the end
    return not simulation.front.is_running or excuses.server_died_near(stored.ended_at)


def may_return(simulation: Simulation, stored: Stored) -> bool:
    """Whether a deleted response or conversation may reappear: a power cut may undo the deletion."""
    return simulation.checks.excuses.disk_has_failed()
