"""From the bytes of a request to a checked pydantic model, whose failures name the field that is to blame; JSON answers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from holdfast.http.server.problem import RequestRefused

M = TypeVar("M", bound=pydantic.BaseModel)
TAG_MARK = "|"  # union tags begin with it, so that they can be left out of the names of fields
_LONGEST_SHOWN = 60
_NOT_JSON = "json_invalid"
_ESCAPE = re.compile(  # of JSON: what looks like one behind an escaped backslash is none
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_REPLACEMENT = b"\\ufffd"
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


async def body_pieces(request: Request, *, limit_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises RequestRefused (413) as soon as it is known to be larger than the limit."""
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        yield piece


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """The whole body. Raises RequestRefused (413) beyond the limit."""
    return b"".join([piece async for piece in body_pieces(request, limit_bytes=limit_bytes)])


def json_response(value: msgspec.Struct, *, status: int = 200) -> Response:
    """An answer that is sent in one piece."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def parse(model: type[M], body: bytes) -> M:
    """The body as `model`. Raises RequestRefused naming the first field that is wrong.

    Half of a surrogate pair, which clients write when they cut a text within an emoji, counts as U+FFFD.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == _NOT_JSON and (mended := _ESCAPE.sub(_whole_character, body)) != body:
            return parse(model, mended)
        raise _refusal(first["type"], first["loc"], first["msg"], first["input"]) from None


def _whole_character(escape: re.Match[bytes]) -> bytes:
    return _REPLACEMENT if escape["half"] else escape[0]


def field_name(location: tuple[int | str, ...]) -> str:
    """The place of an error as a dotted path, such as messages.0.content."""
    return ".".join(str(part) for part in location if not (isinstance(part, str) and (part[:1] == TAG_MARK or part == "[key]")))


def _refusal(kind: str, location: tuple[int | str, ...], message: str, given: Any) -> RequestRefused:
    if kind == _NOT_JSON:
        return RequestRefused(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    field = field_name(location)
    if not field:
        return RequestRefused("the body must be a JSON object", code="invalid_type")
    code = _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "missing":
        return RequestRefused(f"`{field}` is required", code=code, field=field)
    text = "must not be empty" if given in ("", []) and kind.endswith("too_short") else message.removeprefix("Value error, ")
    return RequestRefused(f"`{field}`: {text[:1].lower()}{text[1:]}", code=code, field=field, shown=_shown(given))


def _shown(given: Any) -> str:
    if given is None:
        return ", got null"
    if isinstance(given, bool):
        return f", got {str(given).lower()}"
    if isinstance(given, int | float | str):
        text = repr(given) if not isinstance(given, int) or abs(given) < 10**_LONGEST_SHOWN else "a huge number"
        return f", got {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '…'}"
    return ""


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(f"the body is larger than {limit_bytes:,} bytes", status=413, code="body_too_large")
