"""Reading images from the parts of messages."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.front.images.sources import for_log, image_part, image_source, text_source
from holdfast.front.request import ChatPrompt
from holdfast.library.llm import chat_request
from tests.fakes.image_requests import (
    CAT,
    PROTOCOLS,
    Body,
    in_chat,
    in_messages,
    in_responses,
    openai,
)
from tests.fakes.images import data_url
from tests.fakes.scripted_gateway import MODEL
from tests.fakes.seeing import SeeingFront, seeing_front

DATA = b"an image"
TEXT = base64.b64encode(DATA).decode()
NAMES = st.sampled_from("image_url source image data url media_type mimeType file_id".split())
URL = f"data:image/png;base64,{TEXT}"


@pytest.mark.parametrize(
    ("part", "media_type"),
    [
        ({"image_url": {"url": URL}}, "image/png"),
        ({"image_url": URL}, "image/png"),
        ({"image_url": f"DATA:IMAGE/PNG;BASE64,{TEXT}"}, ""),
        ({"image_url": f"data:image/jpeg;charset=utf-8;base64,{TEXT}"}, "image/jpeg"),
        ({"image_url": f"data:;base64,{TEXT}"}, ""),
        ({"image": URL}, "image/png"),
        ({"image": TEXT}, ""),
        ({"data": TEXT, "mimeType": "image/webp"}, "image/webp"),
        (
            {"source": {"type": "base64", "media_type": "image/gif", "data": TEXT}},
            "image/gif",
        ),
        ({"image_url": URL.replace(TEXT, TEXT[:4] + "\r\n" + TEXT[4:])}, "image/png"),
    ],
)
def test_an_image_is_read_in_all_its_forms(part: dict[str, Any], media_type: str) -> None:
    source = image_source({"type": "image", **part}, "at")
    assert source.decoded(max_bytes=100) == DATA
    assert source.media_type == media_type
    assert source.field == f"at.{next(iter(part))}"


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": {"url": "https://example.com/cat.png"}},
        {"image_url": "HTTP://example.com/cat.png"},
        {"source": {"type": "url", "url": "http://example.com/cat.png"}},
    ],
)
def test_a_url_is_not_read_as_data(part: dict[str, Any]) -> None:
    source = image_source({"type": "image", **part}, "at")
    assert (source.text, source.data) == ("", b"")
    assert source.url.lower().startswith("http")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({}, "no image"),
        ({"file_id": "file-1"}, "cannot be uploaded"),
        ({"image_url": None}, "no image"),
        ({"image_url": ""}, "must be a URL or base64"),
        ({"image_url": {}}, "must be a URL or base64"),
        ({"image_url": {"url": 7}}, "must be a URL or base64"),
        ({"image_url": ["x"]}, "must be a URL or base64"),
        ({"image_url": "file:///etc/passwd"}, "must be a data URL"),
        ({"image_url": "ftp://example.com/x.png"}, "must be a data URL"),
        ({"image_url": "data:image/png,hello"}, "must have the form"),
        ({"image_url": "data:image/png;base64"}, "must have the form"),
        ({"image_url": "data:image/png;base64,"}, "is empty"),
        ({"image_url": f"data:text/html;base64,{TEXT}"}, "must be an image type"),
        ({"image_url": f"data:application/pdf;base64,{TEXT}"}, "must be an image type"),
        ({"source": {"media_type": "video/mp4", "data": TEXT}}, "must be an image type"),
    ],
)
def test_a_part_without_an_image_is_refused_on_reading(part: dict[str, Any], reason: str) -> None:
    source = image_source({"type": "image", **part}, "messages.2.content.1")
    with pytest.raises(InvalidRequest, match=reason) as refused:
        source.decoded(max_bytes=100)
    assert refused.value.field.startswith("messages.2.content.1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from([URL, TEXT]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_any_part_is_an_image_or_refused(part: dict[str, Any]) -> None:
    try:
        source = image_source({"type": "image", **part}, "at")
        decoded = b"" if source.url else source.decoded(max_bytes=100)
    except InvalidRequest as refusal:
        assert str(refusal)
    else:
        assert len(decoded) <= 100


@pytest.mark.parametrize("text", ["%%%%", "AAA", "A" * 5, "ÄÖÜ=", "AAAA=AAAA"])
def test_invalid_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid base64"):
        text_source(text, "at").decoded(max_bytes=100)


def test_a_large_image_is_refused_before_it_is_decoded() -> None:
    source = text_source("%" * 1000, "at")  # decoding it would fail
    with pytest.raises(InvalidRequest, match="at most 100 are allowed"):
        source.decoded(max_bytes=100)


def test_only_equal_images_have_equal_keys() -> None:
    other = TEXT[:-4] + "AAAA"
    sent = [TEXT, URL, other, "https://example.com/cat.png", "https://example.com/\ud800.png"]
    keys = [text_source(each, "at").key() for each in sent]
    assert len(set(keys)) == len(sent)
    assert keys == [text_source(each, "elsewhere").key() for each in sent]
    in_bytes = [image_source({"data": each}, "at").key() for each in (DATA, DATA, b"another")]
    assert in_bytes[0] == in_bytes[1] != in_bytes[2]


def test_the_log_does_not_contain_the_image() -> None:
    message = {"role": "user", "content": [image_part(text_source(URL, "at")), "hello"]}
    (logged,) = for_log([message])
    assert logged == {
        "role": "user",
        "content": [{"type": "image", "image": "<image/png>"}, "hello"],
    }


# Parts that no model here reads are an error if new, otherwise a note.

PDF = "data:application/pdf;base64,AAAA"
SOUND = {"data": "AAAA", "format": "wav"}
UNKNOWN = {"type": "hologram", "hologram": {"data": "AAAA"}}
DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
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
