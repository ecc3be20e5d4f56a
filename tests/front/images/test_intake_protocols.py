"""Images in the requests of all protocols, up to the worker's sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config import ImagesSettings
from holdfast.wire.images import VisionInfo
from tests.fakes.image_requests import (
    CAT,
    DOG,
    NEW,
    REQUESTS,
    TOKENS,
    WHAT,
    anthropic,
    in_base64,
    openai,
    text,
)
from tests.fakes.images import data_url, png
from tests.fakes.scripted_gateway import MODEL
from tests.fakes.seeing import FAMILIES, chat, said, seeing_front


def shortened(shown: str) -> str:
    """Without the markers that Qwen's template writes around images."""
    return shown.replace("<|vision_start|>", "").replace("<|vision_end|>", "")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_an_image_reaches_the_worker(kind: str, streams: bool, tmp_path: Path) -> None:
    path, body, shown = REQUESTS[kind]
    front = seeing_front(tmp_path / "images")
    options = {"stream_options": {"include_usage": True}} if streams and "chat/" in path else {}
    answer = await front.http.post(path, json={**body, "stream": streams, **options})
    assert answer.status_code == 200, answer.text
    assert shown in shortened(front.shown())
    (span,) = front.sent.images
    assert (tmp_path / "images" / span.layout.image).read_bytes() == CAT
    assert len(span.layout.token_ids) == TOKENS
    prompt_tokens = len(front.sent.prompt_token_ids)
    assert f":{prompt_tokens}" in answer.text.replace(" ", "")  # the usage counts the image


@pytest.mark.parametrize("kind", NEW)
async def test_a_broken_image_is_a_400_in_the_protocols_form(kind: str, tmp_path: Path) -> None:
    path, body, _ = REQUESTS[kind]
    front = seeing_front(tmp_path / "images")
    broken = json.dumps(body).replace(in_base64(CAT), in_base64(CAT[:60]))
    answer = await front.http.post(path, content=broken)
    assert answer.status_code == 400, answer.text
    assert "damaged" in answer.text
    assert any(name in answer.text for name in ("image_url", "source", "images.0"))
    assert front.engine.submitted == []


@pytest.mark.parametrize("kind", NEW)
async def test_a_url_is_fetched_only_if_enabled(kind: str, tmp_path: Path) -> None:
    path, body, _ = REQUESTS[kind]
    front = seeing_front(tmp_path / "images")
    named = json.dumps(body).replace(data_url(CAT), "http://example.com/cat.png")
    named = named.replace(in_base64(CAT), "http://example.com/cat.png")
    answer = await front.http.post(path, content=named)
    assert answer.status_code == 400, answer.text
    assert "does not fetch images" in answer.text


@pytest.mark.parametrize("kind", NEW)
async def test_a_model_without_its_extra_says_what_to_install(kind: str, tmp_path: Path) -> None:
    path, body, _ = REQUESTS[kind]
    vision = VisionInfo(
        template_placeholder="", written="", placeholder="", refused="install the extra vision"
    )
    front = seeing_front(tmp_path / "images", vision=vision)
    answer = await front.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "install the extra vision" in answer.text
    assert front.engine.asked == []


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_and_texts_keep_their_places_with_every_template(
    family: str, tmp_path: Path
) -> None:
    front = seeing_front(tmp_path / "images", family=family)
    messages = [
        said("one", openai(CAT), "two", openai(DOG), "three"),
        {"role": "assistant", "content": "hm"},
        said(openai(DOG), "four", openai(CAT)),
    ]
    answer = await front.http.post("/v1/chat/completions", json={**chat(), "messages": messages})
    assert answer.status_code == 200, answer.text
    shown = front.shown()
    places = [shown.index(word) for word in ("one", "two", "three", "four")]
    assert places == sorted(places)
    assert len(front.sent.images) == 4
    names = [span.layout.image for span in front.sent.images]
    assert names == [names[0], names[1], names[1], names[0]]
    if family != "llava":  # it puts a message's images first
        assert shown.index("one") < shown.index("{image 0}") < shown.index("two")
        assert shown.index("two") < shown.index("{image 1}") < shown.index("three")
    if family == "gemma3":
        assert "one\n\n{image 0}\n\ntwo" in shown
    if family == "strings only":
        assert "one{image 0}two{image 1}three" in shown


async def test_the_second_turn_begins_with_the_tokens_of_the_first(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    first = [said("What?", openai(CAT))]
    answer = await front.http.post("/v1/chat/completions", json={**chat(), "messages": first})
    content = answer.json()["choices"][0]["message"]["content"]
    second = [*first, {"role": "assistant", "content": content}, said("And this?", openai(DOG))]
    await front.http.post("/v1/chat/completions", json={**chat(), "messages": second})
    before, after = front.engine.submitted
    length = len(before.prompt_token_ids)
    assert after.prompt_token_ids[:length] == before.prompt_token_ids
    assert after.images[0] == before.images[0]
    # the layout of the cat was known
    assert [len(command.images) for command in front.engine.asked] == [1, 1]


async def test_several_choices_share_the_images(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    answer = await front.http.post("/v1/chat/completions", json=chat("What?", openai(CAT), n=3))
    assert answer.status_code == 200, answer.text
    assert len({sequence.images for sequence in front.engine.submitted}) == 1
    assert answer.json()["usage"]["prompt_tokens"] == len(front.sent.prompt_token_ids)


async def test_images_count_as_tokens_wherever_tokens_are_counted(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    _, body, _ = REQUESTS["Anthropic"]
    counted = await front.http.post("/v1/messages/count_tokens", json=body)
    answer = await front.http.post("/v1/messages", json=body)
    tokens = len(front.sent.prompt_token_ids)
    assert counted.json()["input_tokens"] == tokens, counted.text
    assert answer.json()["usage"]["input_tokens"] == tokens
    listed = await front.http.post("/tokenize", json=chat("What?", openai(CAT)))
    assert listed.json()["count"] == tokens, listed.text
    assert listed.json()["tokens"].count(902) == TOKENS - 2


async def test_a_rendered_conversation_shows_the_placeholder(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    rendered = await front.http.post("/apply-template", json=chat("What?", openai(CAT)))
    assert "What?<|vision_start|><|image_pad|><|vision_end|>" in rendered.json()["prompt"]


async def test_a_prompt_too_long_with_its_images_is_refused(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", context_tokens=30)
    answer = await front.http.post("/v1/chat/completions", json=chat("?", openai(CAT), openai(DOG)))
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


async def test_too_many_images_in_a_new_message_are_refused(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", settings=ImagesSettings(max_count=2))
    images = [openai(CAT)] * 3
    answer = await front.http.post("/v1/chat/completions", json=chat(*images))
    assert answer.status_code == 400
    assert "at most 2 images, got 3" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.2.image_url"


async def test_an_image_the_model_cannot_use_is_refused_by_field(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    wide = openai(png(size=(650, 10)))
    answer = await front.http.post("/v1/chat/completions", json=chat(openai(CAT), wide))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.content.1.image_url"
    assert "cannot use this image" in answer.json()["error"]["message"]


async def test_a_stored_response_is_continued_with_its_image(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    _, body, _ = REQUESTS["Responses"]
    first = await front.http.post("/v1/responses", json=body)
    second = {"model": MODEL, "input": "And?", "previous_response_id": first.json()["id"]}
    answer = await front.http.post("/v1/responses", json=second)
    assert answer.status_code == 200, answer.text
    assert WHAT in shortened(front.shown())


async def test_a_cache_breakpoint_may_follow_an_image(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    image = {**anthropic(CAT), "cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": [text("What?"), image, text("Say it.")]}],
    }
    assert (await front.http.post("/v1/messages", json=body)).status_code == 200
    (span,) = front.sent.images
    assert any(span.end <= point <= span.end + 1 for point in front.sent.branch_points)


async def test_ollamas_context_continues_without_the_images(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images")
    _, body, _ = REQUESTS["Ollama, a prompt"]
    first = (await front.http.post("/api/generate", json={**body, "stream": False})).json()
    body = {"model": MODEL, "prompt": "And?", "context": first["context"], "stream": False}
    answer = await front.http.post("/api/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert front.sent.images == ()
    assert "What?" in front.shown()


async def test_truncation_keeps_or_removes_whole_images(tmp_path: Path) -> None:
    front = seeing_front(tmp_path / "images", context_tokens=400)
    messages = [said(f"turn {turn} " + "word " * 20, openai(png(turn))) for turn in range(12)]
    messages.append(said("last ", openai(CAT), "words"))
    answer = await front.http.post(
        "/v1/chat/completions",
        json={**chat(), "messages": messages, "truncation": "middle", "max_tokens": 8},
    )
    assert answer.status_code == 200, answer.text
    shown = shortened(front.shown())
    assert "left out here" in shown
    assert "turn 0" in shown
    assert shown.count("{image") == len(front.sent.images) < 13
    last = f"{{image {len(set(front.sent.images)) - 1}}}"
    assert f"last {last}words" in shown
    assert len(front.sent.prompt_token_ids) <= 392
