"""Parts that no model here reads are an error if new, otherwise a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidRequest
from holdfast.front.request import ChatPrompt
from holdfast.library.llm import chat_request
from tests.fakes.image_requests import CAT, openai
from tests.fakes.images import data_url
from tests.fakes.scripted_gateway import MODEL
from tests.fakes.seeing import SeeingFront, seeing_front

Body = dict[str, Any]
PDF = "data:application/pdf;base64,AAAA"
SOUND = {"data": "AAAA", "format": "wav"}
UNKNOWN = {"type": "hologram", "hologram": {"data": "AAAA"}}
DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def in_chat(*turns: tuple[str, Any]) -> Body:
    """Chat completions: turns with a text or a part, and "result" for a call and its result."""
    messages: list[Body] = []
    for role, said in turns:
        content = [said] if isinstance(said, dict) else said
        if role == "result":
            messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": "c", "content": content})
        else:
            messages.append({"role": role, "content": content})
    return {"model": MODEL, "messages": messages}


def in_responses(*turns: tuple[str, Any]) -> Body:
    """Responses, with the same turns."""
    items: list[Body] = []
    for role, said in turns:
        content = [said] if isinstance(said, dict) else said
        if role == "result":
            call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            items += [call, {"type": "function_call_output", "call_id": "c", "output": content}]
        else:
            items.append({"role": role, "content": content})
    return {"model": MODEL, "input": items}


def in_messages(*turns: tuple[str, Any]) -> Body:
    """Messages, with the same turns."""
    messages: list[Body] = []
    for role, said in turns:
        content = [said] if isinstance(said, dict) else said
        if role == "result":
            use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            messages.append({"role": "assistant", "content": [use]})
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"role": role, "content": content})
    return {"model": MODEL, "max_tokens": 8, "messages": messages}


PROTOCOLS: dict[str, tuple[str, Any, str]] = {
    "chat": ("/v1/chat/completions", in_chat, "messages"),
    "responses": ("/v1/responses", in_responses, "input"),
    "messages": ("/v1/messages", in_messages, "messages"),
}
PARTS: dict[tuple[str, str], tuple[Body, str]] = {  # the part, and its name in the note
    ("chat", "PDF"): ({"type": "file", "file": {"file_data": PDF}}, "application/pdf"),
    ("chat", "audio"): ({"type": "input_audio", "input_audio": SOUND}, "input_audio"),
    ("chat", "unknown"): (UNKNOWN, "hologram"),
    ("responses", "PDF"): ({"type": "input_file", "file_data": PDF}, "application/pdf"),
    ("responses", "uploaded"): ({"type": "input_file", "file_id": "file-1"}, "input_file"),
    ("responses", "audio"): ({"type": "input_audio", "input_audio": SOUND}, "input_audio"),
    ("responses", "unknown"): (UNKNOWN, "hologram"),
    ("messages", "PDF"): (DOCUMENT, "application/pdf"),
    ("messages", "uploaded"): ({"type": "container_upload", "file_id": "f"}, "container_upload"),
    ("messages", "audio"): ({"type": "audio", "source": SOUND}, "audio"),
    ("messages", "unknown"): (UNKNOWN, "hologram"),
}
OLD: dict[str, Any] = {  # conversations with an earlier part
    "answered": lambda part: [("user", part), ("assistant", "hm"), ("user", "and?")],
    "refused, and then a text": lambda part: [("user", part), ("user", "and?")],
    "before a call": lambda part: [("user", part), ("result", "seen")],
    "result": lambda part: [("user", "look"), ("result", part)],
    "in an answer": lambda part: [("user", "look"), ("assistant", part), ("user", "and?")],
    "in an answered system message": lambda part: [
        ("system", part),
        ("user", "look"),
        ("assistant", "hm"),
        ("user", "and?"),
    ],
}


async def shown_next(front: SeeingFront, path: str, body: Body) -> str:
    answer = await front.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return front.shown()


@pytest.mark.parametrize("place", OLD)
@pytest.mark.parametrize(("protocol", "kind"), PARTS)
async def test_an_unreadable_old_part_becomes_the_same_note_each_turn(
    protocol: str, kind: str, place: str, tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    part, what = PARTS[protocol, kind]
    front = seeing_front(tmp_path / "images")
    turns = OLD[place](part)
    shown = await shown_next(front, path, body_of(*turns))
    assert f"[{what} left out: this model takes text only]" in shown
    longer = [*turns, ("assistant", "hi"), ("user", "more")]
    again = await shown_next(front, path, body_of(*longer))
    assert again.startswith(shown.removesuffix("<|im_start|>assistant\n"))


@pytest.mark.parametrize("before", [[], [("user", "hi"), ("assistant", "hi")]], ids=["", "later"])
@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize(("protocol", "kind"), PARTS)
async def test_an_unreadable_new_part_is_refused_by_name(
    protocol: str, kind: str, role: str, before: list[Any], tmp_path: Path
) -> None:
    path, body_of, field = PROTOCOLS[protocol]
    part, _ = PARTS[protocol, kind]
    front = seeing_front(tmp_path / "images")
    turns = [*before, (role, part)] if role == "user" else [*before, (role, part), ("user", "x")]
    answer = await front.http.post(path, json=body_of(*turns))
    assert answer.status_code == 400, answer.text
    assert f"{field}.{len(before)}.content.0" in answer.text
    assert front.engine.submitted == []


async def test_an_image_in_an_answered_system_message_becomes_a_note(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    turns = [("system", openai(CAT)), ("user", "look"), ("assistant", "hm"), ("user", "and?")]
    shown = await shown_next(front, "/v1/chat/completions", in_chat(*turns))
    assert "[image/png left out: this model takes text only]" in shown


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_a_misplaced_ollama_image_becomes_a_note(role: str, tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    messages = [
        {"role": role, "content": "hm", "images": ["AAAA"]},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and?"},
    ]
    body = {"model": MODEL, "messages": messages, "stream": False}
    assert "hm" in (shown := await shown_next(front, "/api/chat", body))
    assert "[image left out: this model takes text only]" in shown
    new = {**body, "messages": [messages[0], messages[2]]}
    status = (await front.http.post("/api/chat", json=new)).status_code
    assert status == (400 if role == "system" else 200)


async def test_a_document_after_a_tool_result_becomes_a_note(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    body = in_messages(("user", "read it"), ("result", "PDF file read"))
    body["messages"][-1]["content"].append(DOCUMENT)
    shown = await shown_next(front, "/v1/messages", body)
    assert "[application/pdf left out: this model takes text only]" in shown


async def test_an_unknown_item_that_was_answered_becomes_a_note(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    body = in_responses(("user", "look"), ("assistant", "hm"), ("user", "and?"))
    unknown = {"type": "hologram", "id": "h_1"}
    body["input"].insert(1, unknown)
    assert "[hologram left out" in await shown_next(front, "/v1/responses", body)
    body["input"].append(unknown)
    answer = await front.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.4.type")


AUDIO = {"type": "input_audio", "input_audio": SOUND}


def test_the_library_treats_unreadable_parts_like_the_server() -> None:
    seen = {"type": "text", "text": "look"}
    unseen: Body = {"role": "user", "content": [AUDIO]}
    later: list[Body] = [
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": [seen]},
    ]
    prompt = chat_request([unseen, *later], {}).prompt
    assert isinstance(prompt, ChatPrompt)
    note = {"type": "text", "text": "[input_audio left out: this model takes text only]"}
    assert prompt.messages == ({"role": "user", "content": [note]}, *later)
    with pytest.raises(InvalidRequest) as refused:
        chat_request([*later, unseen], {})
    assert refused.value.field == "messages.2.content.0"


def test_a_message_without_role_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request([{"content": [AUDIO]}], {})
    assert refused.value.field == "messages.0.role"


def test_a_part_named_like_an_internal_one_is_unknown() -> None:
    part = {"type": "hologram", "why it is refused": "x", "text": data_url(b"")}
    with pytest.raises(InvalidRequest):
        chat_request([{"role": "user", "content": [part]}], {})
