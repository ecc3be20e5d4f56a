"""Unusable images are an error if new, otherwise a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.config import ImagesSettings
from holdfast.errors import InvalidRequest
from holdfast.front.images import intake as intake_module
from tests.fakes.image_requests import CALL, CAT, PROTOCOLS, Body, in_chat, openai
from tests.fakes.images import broken_images, data_url, png
from tests.fakes.scripted_gateway import MODEL
from tests.fakes.seeing import QWEN, chat, said, seeing_front

NOTE = "[image left out: it cannot be read]"
DAMAGED = CAT[:60]
BROKEN = broken_images()

OLD: dict[str, Any] = {  # conversations with an earlier image
    "result": lambda image: [("user", "look"), ("result", image)],
    "earlier result": lambda image: [
        ("user", "look"),
        ("result", image),
        ("assistant", "hm"),
        ("user", "and?"),
    ],
    "answered": lambda image: [("user", image), ("assistant", "hm"), ("user", "and?")],
    "refused, and then a text": lambda image: [("user", image), ("user", "and?")],
    "before a call": lambda image: [("user", image), ("result", CAT)],
}


@pytest.mark.parametrize("place", OLD)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_unusable_old_image_becomes_a_note(
    protocol: str, place: str, tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    front = seeing_front(tmp_path / "images")
    turns = OLD[place](DAMAGED)
    answer = await front.http.post(path, json=body_of(*turns))
    assert answer.status_code == 200, answer.text
    shown = front.shown()
    assert NOTE in shown
    # the next turn begins with the same tokens and processes nothing again
    asked = len(front.engine.asked)
    before = front.sent.prompt_token_ids
    longer = [*turns, ("assistant", "hi"), ("user", "more")]
    assert (await front.http.post(path, json=body_of(*longer))).status_code == 200
    assert front.shown().startswith(shown.removesuffix("<|im_start|>assistant\n"))
    assert len(front.engine.asked) == asked
    restarted = seeing_front(tmp_path / "images", bundle=front.bundle)
    assert (await restarted.http.post(path, json=body_of(*turns))).status_code == 200
    assert restarted.sent.prompt_token_ids == before


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("before", [[], [("user", "hi"), ("assistant", "hi")]], ids=["", "later"])
async def test_an_unusable_new_image_is_an_error(
    protocol: str, before: list[Any], tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    front = seeing_front(tmp_path / "images")
    for _ in range(2):
        answer = await front.http.post(path, json=body_of(*before, ("user", DAMAGED)))
        assert answer.status_code == 400, answer.text
        assert "damaged" in answer.text
    assert front.engine.submitted == []
    # even if the same image is in an earlier turn
    turns = [("user", "look"), ("result", DAMAGED), ("assistant", "hm"), ("user", DAMAGED)]
    assert (await front.http.post(path, json=body_of(*turns))).status_code == 400


@pytest.mark.parametrize("place", [each for each in OLD if each != "before a call"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("refused", ["", "it runs in the layout solo"])
async def test_a_text_model_gets_a_note_for_an_old_image(
    protocol: str, place: str, refused: str, tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    front = seeing_front(tmp_path / "images")
    vision = msgspec.structs.replace(QWEN, refused=refused) if refused else None
    front.engine.info = msgspec.structs.replace(front.engine.info, vision=vision)
    answer = await front.http.post(path, json=body_of(*OLD[place](CAT)))
    assert answer.status_code == 200, answer.text
    note = "[image left out" if protocol == "ollama" else "[image/png left out"
    assert f"{note}: this model takes text only]" in front.shown()
    new = await front.http.post(path, json=body_of(("user", CAT)))
    assert new.status_code == 400


@pytest.mark.parametrize("kind", [each for each in BROKEN if BROKEN[each][0]])
async def test_every_kind_of_broken_image_gets_the_same_note(kind: str, tmp_path: Path) -> None:
    settings = ImagesSettings(max_pixels=1_000_000)
    front = seeing_front(tmp_path / "images", settings=settings)
    body = in_chat(("user", "look"), ("result", BROKEN[kind][0]))
    assert (await front.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert f"<tool_response>\n{NOTE}\n</tool_response>" in front.shown()


PARTS: dict[str, Body] = {
    "no image": {"type": "image_url"},
    "no text": {"type": "image_url", "image_url": {"url": 7}},
    "a file": {"type": "input_image", "file_id": "file-1"},
    "a scheme": {"type": "image_url", "image_url": {"url": "ftp://example.com/x.png"}},
    "no base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
    "empty": {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    "a PDF": {"type": "image_url", "image_url": {"url": "data:application/pdf;base64,AAAA"}},
    "too large": {"type": "image_url", "image_url": {"url": data_url(bytes(2000))}},
    "a URL": {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
    "too wide": openai(png(size=(650, 10))),
}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("kind", PARTS)
async def test_every_kind_of_invalid_image_part_becomes_a_note(
    kind: str, role: str, tmp_path: Path
) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(max_bytes=1024))
    messages = [
        said("look"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        said("seen", role="tool", tool_call_id=CALL["id"]),
        {"role": "assistant", "content": "hm"},
        said("and?"),
    ]
    place = 0 if role == "user" else 2
    messages[place]["content"].append(PARTS[kind])
    body = {"model": MODEL, "messages": messages}
    answer = await front.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert NOTE in front.shown()
    new = await front.http.post("/v1/chat/completions", json=chat("look", PARTS[kind]))
    assert new.status_code == 400, new.text
    assert new.json()["error"]["param"].startswith("messages.0.content.1")


async def test_an_image_url_is_fetched_once_and_survives_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(urls=True))
    fetched: list[str] = []
    gone: set[str] = set()

    def fetch(url: str, *, field: str, **_: Any) -> bytes:
        fetched.append(url)
        if url in gone:
            raise InvalidRequest("the image cannot be fetched: status 404", field=field)
        return png()

    monkeypatch.setattr(intake_module, "fetch_image", fetch)
    cat, dog = "https://example.com/cat.png", "https://example.com/dog.png"

    def shown(url: str) -> Body:
        return said({"type": "image_url", "image_url": {"url": url}})

    async def ask(*messages: Body) -> int:
        body = {"model": MODEL, "messages": [*messages]}
        return (await front.http.post("/v1/chat/completions", json=body)).status_code

    answer = {"role": "assistant", "content": "hi"}
    assert await ask(shown(cat)) == 200
    before = front.sent
    gone |= {cat, dog}
    assert await ask(shown(cat), answer, said("and?")) == 200
    assert front.sent.images == before.images
    assert fetched == [cat]
    # in a new message, it is fetched again
    assert await ask(shown(cat)) == 400
    # an image that was never fetched stays a note
    for _ in range(2):
        assert await ask(shown(dog), answer, said("and?")) == 200
        assert NOTE in front.shown()
    assert fetched == [cat, cat, dog]
    gone.clear()
    assert await ask(shown(dog), answer, said("and?")) == 200
    assert NOTE in front.shown()
    assert await ask(shown(dog)) == 200
    assert front.sent.images == before.images


TOO_MANY = "[image left out: the conversation has too many images]"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_oldest_excess_images_are_left_out_in_batches(
    protocol: str, tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(max_count=8))
    turns: list[tuple[str, Any]] = [("user", "look")]
    left_out, changed, before = [], [], ""
    for number in range(14):
        turns.append(("result", png(number + 1)))
        answer = await front.http.post(path, json=body_of(*turns))
        assert answer.status_code == 200, answer.text
        shown = front.shown()
        assert len(front.sent.images) == number + 1 - shown.count(TOO_MANY) <= 8
        notes, _, rest = shown.rpartition(TOO_MANY)
        assert "{image" not in notes and TOO_MANY not in rest
        left_out.append(shown.count(TOO_MANY))
        changed.append(not shown.startswith(before))
        before = shown.removesuffix("<|im_start|>assistant\n")
    assert left_out == [0] * 8 + [2, 2, 4, 4, 6, 6]
    assert changed == [False] * 8 + [True, False] * 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_excess_new_images_are_refused_and_old_ones_dropped(
    protocol: str, tmp_path: Path
) -> None:
    path, body_of, _ = PROTOCOLS[protocol]
    old = [("user", CAT), ("assistant", "hm")]
    for most, status, notes in ((2, 200, 0), (1, 200, 1), (0, 400, 0)):
        settings = ImagesSettings(max_count=most)
        front = seeing_front(tmp_path / f"{most}", settings=settings)
        answer = await front.http.post(path, json=body_of(*old, ("user", png(2))))
        assert answer.status_code == status, answer.text
        if status == 200:
            assert front.shown().count(TOO_MANY) == notes
            assert len(front.sent.images) == 2 - notes
        else:
            assert "at most 0 images, got 1" in answer.text
    text = await front.http.post(path, json=body_of(*old, ("user", "and?")))
    assert text.status_code == 200, text.text
    assert front.shown().count(TOO_MANY) == 1
