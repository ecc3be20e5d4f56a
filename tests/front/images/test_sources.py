"""Reading images from the parts of messages."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.front.images.sources import for_log, image_part, image_source, text_source

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
