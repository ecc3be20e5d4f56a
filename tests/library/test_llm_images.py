"""Images in the library, with a tiny random vision model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ImagesRefused, InvalidRequest
from holdfast.library.llm import LLM
from tests.fakes.images import data_url, png
from tests.fakes.vision_models import write_vision_model

CAT = png(1, size=(64, 48))
OPTIONS: Any = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_vision_model(tmp_path_factory.mktemp("seeing") / "model", "qwen2_5_vl")
    with LLM(folder) as llm:
        yield llm


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}


def test_an_image_is_given_in_many_ways_and_prefilled_once(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(CAT)
    first = llm.chat([user({"type": "image", "path": path})], tenant="ways", **OPTIONS)
    assert first.cached_tokens == 0
    for part in (
        {"type": "image", "path": str(path)},
        {"type": "image", "data": CAT},
        {"type": "image", "data": base64.b64encode(CAT).decode()},
        {"type": "image_url", "image_url": {"url": data_url(CAT)}},
    ):
        again = llm.chat([user(part)], tenant="ways", **OPTIONS)
        assert again.text == first.text
        assert again.cached_tokens == first.prompt_tokens - 1
    without_tenant = llm.chat([user({"type": "image", "data": CAT})], **OPTIONS)
    assert without_tenant.text == first.text
    assert without_tenant.prompt_tokens == first.prompt_tokens
    messages = [user({"type": "image", "data": CAT}), first.message, user()]
    with llm.stream_chat(messages, tenant="ways", **OPTIONS) as stream:
        assert stream.read_all().cached_tokens >= first.prompt_tokens
    other = llm.chat([user({"type": "image", "data": png(2)})], tenant="ways", **OPTIONS)
    assert other.cached_tokens < first.prompt_tokens - 10


@pytest.mark.parametrize(
    ("part", "reason", "field"),
    [
        ({"type": "image", "path": "no.png"}, "cannot be read", "messages.0.content.1.path"),
        ({"type": "image", "data": CAT[:90]}, "damaged", "messages.0.content.1.data"),
        ({"type": "image"}, "no image", "messages.0.content.1"),
        (
            {"type": "image_url", "image_url": "http://127.0.0.1/cat.png"},
            "does not fetch",
            "messages.0.content.1.image_url",
        ),
    ],
)
def test_unusable_images_are_reported(
    llm: LLM, part: dict[str, Any], reason: str, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        llm.chat([user(part)], **OPTIONS)
    assert refused.value.field == field


@pytest.mark.parametrize("part", [{"path": "no.png"}, {"data": CAT[:90]}, {}])
def test_an_unusable_earlier_image_becomes_a_note(llm: LLM, part: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "hm"}
    noted = llm.chat([user({"type": "image", **part}), answer, user()], **OPTIONS)
    note = {"type": "text", "text": "[image left out: it cannot be read]"}
    written = llm.chat([user(note), answer, user()], **OPTIONS)
    assert (noted.text, noted.prompt_tokens) == (written.text, written.prompt_tokens)
    assert written.cached_tokens == written.prompt_tokens - 1


def test_images_are_held_during_generation(llm: LLM) -> None:
    folder = llm._images.folder
    with llm.stream_chat([user({"type": "image", "data": CAT})], **OPTIONS) as stream:
        next(stream.events())
        assert len(folder._holds) == 1
    assert not folder._holds


def test_images_are_removed_when_the_model_is_closed(llm: LLM) -> None:
    """The last test of this model."""
    llm.chat([user({"type": "image", "data": CAT})], **OPTIONS)
    folder = llm._images.folder.path
    assert any(folder.iterdir())
    llm.close()
    assert not folder.exists()


def test_a_text_model_refuses_images_but_not_results_with_them() -> None:
    part = {"type": "image", "data": CAT}
    with LLM() as llm:
        with pytest.raises(ImagesRefused, match="reads text only"):
            llm.chat([user(part)], max_tokens=4)
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        answer = llm.chat(
            [
                user(),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [part]},
            ],
            max_tokens=4,
        )
    assert answer.completion_tokens == 4
