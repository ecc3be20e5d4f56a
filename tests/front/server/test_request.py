from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from holdfast.config import LimitsSettings
from holdfast.front.openai.endpoints import ChatCompletionRequest
from holdfast.front.request import ChatPrompt
from holdfast.front.server.request import _DECOMPRESSED_AT_ONCE, field_name, parse, read_body
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import ScriptedGateway

NOT_JSON = {
    "nothing": b"",
    "half an object": b'{"model": "demo/tiny", ',
    "not JSON": b"model=demo",
    "invalid UTF-8": b'{"model": "\xff\xfe", "messages": []}',
    "nested too deeply": b"[" * 100_000,
    "nested too deeply within a field": b'{"metadata": ' + b'{"a":' * 100_000,
    "a number of ten thousand digits": b'{"seed": ' + b"1" * 10_000 + b"}",
    "text behind the object": b"{} {}",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_invalid_json_is_refused_with_a_400(body: bytes) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert gateway.requests == []


HALVES = {
    b"\\ud83d": "\ufffd",
    b"\\ude00": "\ufffd",
    b"cut \\uD83D": "cut \ufffd",
    b"\\ud83dx": "\ufffdx",
    b"\\ud83d\\n": "\ufffd\n",
    b"\\ud83d\\u0041": "\ufffdA",
    b"\\ud83d\\ud83d\\ude00": "\ufffd\U0001f600",
    b"\\ude00\\ud83d": "\ufffd\ufffd",
    b"\\\\ud83d\\ud83d": "\\ud83d\ufffd",
    b"\\ud83d\\ude00": "\U0001f600",
}


@pytest.mark.parametrize(("written", "read"), HALVES.items())
async def test_half_of_a_surrogate_pair_becomes_the_replacement_character(
    written: bytes, read: str
) -> None:
    """Clients cut texts within an emoji; if refused, such a conversation could never continue."""
    gateway = ScriptedGateway()
    body = b'{"messages": [{"role": "user", "content": "%b"}], "metadata": {"%b": "\\udfff"}}' % (
        written,
        written,
    )
    async with client_of(gateway) as client:
        response = await client.post(CHAT, content=body)
    assert response.status_code == 200
    prompt = gateway.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["content"] == read


texts = st.text(
    alphabet=st.characters() | st.sampled_from('\ud83d\ude00\udfff\ud800\\u"'), max_size=30
)


@given(text=texts, ascii_only=st.booleans())
def test_only_halves_of_surrogate_pairs_are_replaced(text: str, ascii_only: bool) -> None:
    if not ascii_only:
        text = re.sub("[\ud800-\udfff]", "", text)  # they can only be written as escapes
    body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=ascii_only)
    whole = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(body)["messages"][0]["content"])
    assert parse(ChatCompletionRequest, body.encode()).messages[0].get("content") == whole


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"true", b"NaN"])
async def test_non_object_json_is_refused_with_a_400(body: bytes) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, content=body)
    assert response.status_code == 400
    assert "object" in response.json()["error"]["message"]


async def test_oversized_bodies_are_refused_by_declared_or_real_length() -> None:
    async def parts() -> Any:
        for _ in range(5):
            yield b" " * 1000

    async with client_of(ScriptedGateway(), limits=LimitsSettings(max_body_bytes=2048)) as client:
        announced = await client.post(CHAT, content=b" " * 2049)
        unannounced = await client.post(CHAT, content=parts())
        small = await client.post(CHAT, json=chat_body())
    assert [announced.status_code, unannounced.status_code, small.status_code] == [413, 413, 200]
    assert announced.json()["error"]["code"] == "body_too_large"


def test_union_tags_are_left_out_of_field_names() -> None:
    assert field_name(("messages", 0, "content", "|many", 2, "text")) == "messages.0.content.2.text"
    assert field_name(("logit_bias", "12", "[key]")) == "logit_bias.12"


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


COMPRESSED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip by its older name": ("X-GZip", gzip.compress),
    "gzip of two members": (
        "gzip",
        lambda body: gzip.compress(body[:9], mtime=0) + gzip.compress(body[9:], mtime=0),
    ),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "nothing": ("identity", bytes),
}


async def sent(pieces: list[bytes], encoding: str, *, most_bytes: int = 1 << 20) -> httpx.Response:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async with client_of(
        ScriptedGateway(), limits=LimitsSettings(max_body_bytes=most_bytes)
    ) as client:
        return await client.post(CHAT, content=stream(), headers={"content-encoding": encoding})


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("name", COMPRESSED)
async def test_a_compressed_body_is_read_from_any_pieces(name: str, pieces: int) -> None:
    encoding, compress = COMPRESSED[name]
    body = compress(json.dumps(chat_body()).encode())
    size = -(-len(body) // pieces)
    response = await sent(
        [body[start : start + size] for start in range(0, len(body), size)], encoding
    )
    assert response.status_code == 200, response.text


async def read(compressed: bytes, encoding: str) -> bytes:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": compressed, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-encoding", encoding.encode())]}
    return await read_body(Request(scope, receive), limit_bytes=8 << 20)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(COMPRESSED)),
    pieces=st.integers(1, 2),
    beside=st.integers(-600, 600),
    unit=st.binary(min_size=1, max_size=12),
)
def test_a_body_near_a_multiple_of_the_buffer_is_complete(
    name: str, pieces: int, beside: int, unit: bytes
) -> None:
    """With repetitive data, all input may have been consumed while output is still pending."""
    size = pieces * _DECOMPRESSED_AT_ONCE + beside
    body = (unit * (size // len(unit) + 1))[:size]
    encoding, compress = COMPRESSED[name]
    assert asyncio.run(read(compress(body), encoding.lower())) == body


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
async def test_an_unknown_encoding_is_a_415_with_the_header(encoding: str) -> None:
    response = await sent([b"x"], encoding)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        415,
        "content-encoding",
        "unsupported_encoding",
    )
    assert response.headers["accept-encoding"] == "gzip, deflate"


# without the time, so that the test has the same name in every process
EMPTY_OBJECT = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize(
    "body", [b"{}", EMPTY_OBJECT[:-9], EMPTY_OBJECT + b"more", zlib.compress(b"{}")]
)
async def test_damaged_compressed_data_is_a_400_with_the_header(body: bytes) -> None:
    response = await sent([body], "gzip")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "content-encoding")


async def test_a_decompression_bomb_is_refused_before_it_is_decompressed() -> None:
    bomb = gzip.compress(b" " * (64 << 20), compresslevel=1)
    tracemalloc.start()
    response = await sent([bomb], "gzip")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert most < 8 << 20
