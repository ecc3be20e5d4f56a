"""Reads the body of a request, as a validated pydantic model, and the values in its query."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, TypeVar

import msgspec
import pydantic
from msgspec import Struct
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import TAG_MARK
from holdfast.front.server.problem import RequestRefused, invalid_field

M = TypeVar("M", bound=pydantic.BaseModel)
C = TypeVar("C", bound=str)
_LONGEST_SHOWN = 60  # characters of an invalid value that a message quotes
_DIGITS = re.compile(r"[0-9]{1,19}")
_NOT_JSON = "json_invalid"
_GZIP = zlib.MAX_WBITS | 16
# content encoding → zlib's `wbits`
_CODINGS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": zlib.MAX_WBITS, "identity": None, "": None}
_NAMED_CODINGS = "gzip or deflate"
_DECOMPRESSED_AT_ONCE = 1 << 20  # takes about 2 ms
# a JSON escape, of which a whole surrogate pair is one; `half` matches half a pair. An escaped
# backslash consumes both characters, so that it does not begin another escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_REPLACEMENT = b"\\ufffd"
# pydantic's type of an error → OpenAI's error code
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


async def body_pieces(request: Request, *, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, decompressed.

    Raises RequestRefused: 413 as soon as the body exceeds the limit, 415 for an unsupported
    encoding, 400 for damaged compressed data.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in _CODINGS:
        reason = f"`content-encoding`: a body may be compressed with {_NAMED_CODINGS}"
        raise RequestRefused(
            reason,
            status=415,
            code="unsupported_encoding",
            field="content-encoding",
            shown=f", not {coding[:40]!r}",
        )
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    size = 0
    pieces = request.stream()
    async for piece in pieces if _CODINGS[coding] is None else _decompressed(pieces, coding):
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        yield piece


async def _decompressed(pieces: AsyncIterator[bytes], coding: str) -> AsyncIterator[bytes]:
    """Yield the body in pieces of bounded size, because a small body may expand a thousandfold."""
    decompressor: zlib._Decompress | None = None
    async for piece in pieces:
        unread = piece
        is_full = False
        # after a full piece, zlib may hold more output even though it has consumed all its input
        while unread or is_full:
            if decompressor is None or decompressor.eof:  # gzip may consist of several members
                decompressor = zlib.decompressobj(wbits=_window_bits(coding, unread))
            try:
                decompressed = decompressor.decompress(unread, _DECOMPRESSED_AT_ONCE)
            except zlib.error as error:
                raise _damaged(coding, str(error)) from None
            unread = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
            is_full = len(decompressed) == _DECOMPRESSED_AT_ONCE and not decompressor.eof
            yield decompressed
            await asyncio.sleep(0)
    if decompressor is not None and not decompressor.eof:
        raise _damaged(coding, "unexpected end of data")


def _window_bits(coding: str, beginning: bytes) -> int:
    """The `wbits` argument with which zlib can decompress the body.

    Some clients send deflate data without the zlib header, whose first byte contains the method 8.
    """
    window_bits = _CODINGS[coding]
    assert window_bits is not None, "a plain body is not decompressed"
    return -zlib.MAX_WBITS if coding == "deflate" and beginning[0] & 15 != 8 else window_bits


def _damaged(coding: str, why: str) -> RequestRefused:
    """The error for a body that cannot be decompressed."""
    return invalid_field(
        "content-encoding",
        f"the body is not valid {coding} data",
        code="invalid_encoding",
        shown=f": {why}",
    )


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """Read the whole body. Raises what `body_pieces` raises."""
    return b"".join([piece async for piece in body_pieces(request, limit_bytes=limit_bytes)])


async def read_json(request: Request, model: type[M], limits: LimitsSettings) -> M:
    """Read the body as JSON into `model`. Raises what `read_body` and `parse` raise."""
    return parse(model, await read_body(request, limit_bytes=limits.max_body_bytes))


def json_response(value: Struct, *, status: int = 200) -> Response:
    """Create a response that is sent in one piece."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def parse(model: type[M], body: bytes) -> M:
    """Parse the body as `model`. Raises RequestRefused, which names the first invalid field.

    Half of a surrogate pair becomes U+FFFD; clients send one if they cut a text within an emoji.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        fault = _first_fault(error)
        if fault["type"] == _NOT_JSON and (mended := _ESCAPE.sub(_whole_character, body)) != body:
            return parse(model, mended)
        raise _refusal(fault) from None


def validated(model: type[M], content: Mapping[str, Any]) -> M:
    """Return a body that did not arrive as JSON as `model`. Raises RequestRefused."""
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        raise _refusal(_first_fault(error)) from None


def number_in(query: Mapping[str, str], name: str, lowest: int, highest: int) -> int | None:
    """The whole number that a query has under this name; None if it is missing.

    Raises RequestRefused if it is not a number from `lowest` to `highest`.
    """
    text = query.get(name)
    if text is None:
        return None
    if not (_DIGITS.fullmatch(text) and lowest <= int(text) <= highest):
        raise invalid_field(name, f"must be a number from {lowest} to {highest}")
    return int(text)


def choice_in(query: Mapping[str, str], name: str, choices: Collection[C], default: C) -> C:
    """The value of a query's parameter, one of `choices`; the default if it is missing.

    Raises RequestRefused for any other value.
    """
    text = query.get(name, default)
    for choice in choices:
        if choice == text:
            return choice
    raise invalid_field(name, f"must be one of {', '.join(choices)}")


def _whole_character(escape: re.Match[bytes]) -> bytes:
    """The escape itself, or U+FFFD in place of half a surrogate pair."""
    return _REPLACEMENT if escape["half"] else escape[0]


def field_name(location: tuple[int | str, ...]) -> str:
    """The location of an error as a dotted path, such as messages.0.content.

    Left out are parts that pydantic adds and that are not in the request, such as tags of unions.
    """
    return ".".join(
        str(part)
        for part in location
        if not (isinstance(part, str) and (part[:1] == TAG_MARK or part == "[key]"))
    )


def _first_fault(error: pydantic.ValidationError) -> ErrorDetails:
    return error.errors(include_url=False, include_context=False)[0]


def _refusal(fault: ErrorDetails) -> RequestRefused:
    """The error for a client, in the words of this server, from pydantic's error."""
    fault_type, message, value = fault["type"], fault["msg"], fault["input"]
    if fault_type == _NOT_JSON:
        return RequestRefused(
            f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}",
            code="invalid_json",
        )
    field = field_name(fault["loc"])
    if not field:
        return RequestRefused("the body must be a JSON object", code="invalid_type")
    code = _CODES.get(fault_type) or (
        "invalid_type" if fault_type.endswith("_type") else "invalid_value"
    )
    if fault_type == "missing":
        return RequestRefused(f"`{field}` is required", code=code, field=field)
    text = message.removeprefix("Value error, ")
    if isinstance(value, str | list) and not value and fault_type.endswith("too_short"):
        text = "must not be empty"
    return invalid_field(field, f"{text[:1].lower()}{text[1:]}", code=code, shown=_shown(value))


def _shown(value: Any) -> str:
    """The end of an error message, which quotes an invalid value; empty for lists and objects."""
    if value is None:
        return ", got null"
    if isinstance(value, bool):
        return f", got {str(value).lower()}"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_SHOWN:
        return ", got a huge number"
    if isinstance(value, int | float | str):
        text = repr(value)
        return f", got {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '…'}"
    return ""


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(
        f"the body is larger than {limit_bytes:,} bytes", status=413, code="body_too_large"
    )
