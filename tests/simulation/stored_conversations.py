"""How agents use conversations of the Responses API, and checks of the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.actions import Turn
from tests.simulation.conversations import Message, as_read, sent
from tests.simulation.network import Broken
from tests.simulation.stored_responses import (
    Found,
    Stored,
    get,
    may_be_lost,
    may_return,
    text_of_item,
)

if TYPE_CHECKING:
    from tests.simulation.agents import Heard
    from tests.simulation.front import SimulatedFront
    from tests.simulation.simulation import Simulation

MOST_ADDED = 20  # items in one request
PAGE_ITEMS = 3


@dataclass(kw_only=True)
class StoredConversation(Stored):
    """A conversation with all its messages."""

    def answered(
        self,
        turn: Turn,
        messages: list[Message],
        read: list[Message],
        heard: Heard,
        front: SimulatedFront,
    ) -> None:
        """Note the end of a response that belongs to it."""
        self.turn, self.messages, self.read = turn, list(messages), read
        self.ended_at, self.front = heard.ended_at, front


def open_conversation(
    simulation: Simulation, turn: Turn, messages: list[Message]
) -> StoredConversation | None:
    """Create a conversation with these messages; None if that fails, with an excuse."""
    front = simulation.front
    items = sent(turn, messages)
    # the first request may have fewer, so that others follow
    first = turn.read_pieces
    rest = items[first:]
    parts = [rest[place : place + MOST_ADDED] for place in range(0, len(rest), MOST_ADDED)]
    conversation = StoredConversation(
        id="",
        turn=turn,
        messages=list(messages),
        read=as_read(turn, messages, sees_images=True),
        ended_at=simulation.world.now,
        front=front,
    )
    found = _own(simulation, conversation, method="POST", body={"items": items[:first]})
    if found is None:
        return None
    conversation.id = found.json["id"]
    for part in parts:
        more = {"method": "POST", "action": "/items", "body": {"items": part}}
        if _own(simulation, conversation, **more) is None:
            return None
    conversation.ended_at = simulation.world.now
    return conversation


def _own(simulation: Simulation, conversation: StoredConversation, **more: Any) -> Found | None:
    """Make a request as the conversation's owner. It must succeed; None if its failure is excused."""
    turn = conversation.turn
    try:
        found = _get(simulation, conversation, key=turn.key, tenant=turn.tenant, **more)
    except Broken:
        return None  # the server is down
    may_be_there = not conversation.is_deleted or may_return(simulation, conversation)
    if found.status == 200 and may_be_there:
        return found
    if simulation.keys.sender(turn.key) == "wrong" and found.status == 401:
        return None
    if conversation.is_deleted and found.status == 404:
        return None
    if found.status == 200 or not may_be_lost(simulation, conversation):
        simulation.violation(
            "conversations stay",
            f"{conversation.id} ({more}): {found.status} {found.content[:300]!r}",
        )
    return None


def _get(simulation: Simulation, conversation: StoredConversation, **more: Any) -> Found:
    return get(simulation, conversation.id, resource="conversations", **more)


def _texts(simulation: Simulation, conversation: StoredConversation) -> list[str] | None:
    """The texts of all items, read in pages; None if they cannot be read, with an excuse."""
    texts: list[str] = []
    after = ""
    while True:
        query = f"order=asc&limit={PAGE_ITEMS}" + (f"&after={after}" if after else "")
        found = _own(simulation, conversation, action="/items", query=query)
        if found is None:
            return None
        page = found.json
        texts += [text_of_item(item, sees_images=True) or "" for item in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            return texts


def is_changed(simulation: Simulation, conversation: StoredConversation) -> bool:
    """Whether a fault has changed or deleted a conversation. Asks the server."""
    if conversation.is_deleted:
        return False
    texts = _texts(simulation, conversation)
    right = [each["content"] for each in conversation.read]
    if texts is not None and texts != right and not may_be_lost(simulation, conversation):
        simulation.violation(
            "conversations stay", f"{conversation.id} has {texts} instead of {right}"
        )
    return texts != right


def abandon(simulation: Simulation, conversation: StoredConversation, new: str) -> None:
    """The agent does not know whether its last request was answered: the conversation has both the
    new message and an answer, or neither.
    """
    if conversation.is_deleted or may_be_lost(simulation, conversation):
        return
    texts = _texts(simulation, conversation)
    right = [each["content"] for each in conversation.read]
    if texts is not None and texts != right and texts[:-1] != [*right, new]:
        simulation.violation(
            "conversations stay", f"{conversation.id} has {texts} after {right} and {new!r}"
        )


def look_at_conversation(
    simulation: Simulation, conversation: StoredConversation, kind: str
) -> None:
    """Read, shorten or delete a conversation, or try to as another caller."""
    match kind:
        case "read":
            _read(simulation, conversation)
        case "events":
            _delete_last(simulation, conversation)
        case "foreign":
            _try_as_others(simulation, conversation)
        case "delete" if not conversation.is_deleted:
            if _own(simulation, conversation, method="DELETE") is not None:
                conversation.is_deleted = True
                _own(simulation, conversation)
                _own(simulation, conversation, action="/items")


def _read(simulation: Simulation, conversation: StoredConversation) -> None:
    found = _own(simulation, conversation)
    if found is not None and found.json["id"] != conversation.id:
        simulation.violation("conversations stay", f"{conversation.id} is {found.json}")
    is_changed(simulation, conversation)
    listed = _own(simulation, conversation, action="/items", query="limit=1")
    if listed is not None and listed.json["data"]:
        (item,) = listed.json["data"]
        found = _own(simulation, conversation, action=f"/items/{item['id']}")
        if found is not None and found.json != item:
            simulation.violation("conversations stay", f"{found.json} is not {item}")


def _delete_last(simulation: Simulation, conversation: StoredConversation) -> None:
    """Delete the last message and its answer."""
    listed = _own(simulation, conversation, action="/items", query="limit=2")
    for item in listed.json["data"] if listed is not None else ():
        deleted = _own(simulation, conversation, method="DELETE", action=f"/items/{item['id']}")
        if deleted is not None:
            del conversation.messages[-1], conversation.read[-1]
    is_changed(simulation, conversation)


def _try_as_others(simulation: Simulation, conversation: StoredConversation) -> None:
    key, tenant = conversation.turn.key, conversation.turn.tenant
    others = [(key, "foreign"), *((each, tenant) for each in ("", "alice", "bob", "wrong"))]
    asks = {"items": [{"role": "user", "content": "foreign"}]}
    for other in others:
        sender = simulation.keys.sender(other[0])
        if (sender, other[1]) == (simulation.keys.sender(key), tenant):
            continue
        more = {"key": other[0], "tenant": other[1]}
        try:
            tried = [
                _get(simulation, conversation, **more),
                _get(simulation, conversation, action="/items", **more),
                _get(simulation, conversation, action="/items", method="POST", body=asks, **more),
                _get(simulation, conversation, method="DELETE", **more),
                _continued(simulation, conversation, **more),
            ]
        except Broken:
            return  # the server is down
        right = 401 if sender == "wrong" else 404
        for place, found in enumerate(tried):
            if found.status not in (right, 503):
                simulation.violation(
                    "tenants are apart",
                    f"try {place} of {other} at {conversation.id}: {found.status} {found.content!r}",
                )
    is_changed(simulation, conversation)


def _continued(
    simulation: Simulation, conversation: StoredConversation, *, key: str, tenant: str
) -> Found:
    """Try to let a response continue the conversation."""
    body = {
        "model": conversation.turn.model,
        "input": "foreign",
        "conversation": conversation.id,
        "max_output_tokens": 1,
        "store": False,
        "cache_salt": tenant or None,
    }
    return get(simulation, "", key=key, tenant="", method="POST", body=body)
