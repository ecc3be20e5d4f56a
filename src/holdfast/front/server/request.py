"""Reads a request: its body, as a validated pydantic model, and the headers that Holdfast adds to
every protocol (tenant, session, priority, time limit, explanation).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import zlib
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

import msgspec
import pydantic
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.prompt.limits import tenant_of, tenant_of_key
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.fields import TAG_MARK
from holdfast.front.server.problem import RequestRefused, invalid_field
from holdfast.wire.requests import Priority, ServiceClass
from holdfast.wire.sessions import LONGEST_SESSION_ID, is_session_id

M = TypeVar("M", bound=pydantic.BaseModel)
C = TypeVar("C", bound=str)
_LONGEST_SHOWN = 60
_DIGITS = re.compile(r"[0-9]{1,19}")
_NOT_JSON = "json_invalid"
_GZIP = zlib.MAX_WBITS | 16
# content encoding → zlib's `wbits`
_CODINGS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": zlib.MAX_WBITS, "identity": None, "": None}
_NAMED_CODINGS = "gzip or deflate"
_DECOMPRESSED_AT_ONCE = 1 << 20  # takes about 2 ms
_ESCAPE = re.compile(  # a JSON escape; an escaped backslash consumes both characters
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_REPLACEMENT = b"\\ufffd"
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
TENANT_HEADER = "x-holdfast-tenant"
PRIORITY_HEADER = "x-holdfast-priority"
TIME_LIMIT_HEADER = "x-holdfast-timeout"  # seconds
EXPLAIN_HEADER = "x-holdfast-explain"
SESSION_HEADER = "x-session-id"
_PRIORITIES = get_args(Priority)
_YES = frozenset({"1", "true", "yes", "on"})


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
        rest = piece
        is_full = False
        # after a full piece, zlib may hold more output even though it has consumed all its input
        while rest or is_full:
            if decompressor is None or decompressor.eof:  # gzip may consist of several members
                decompressor = zlib.decompressobj(wbits=_window_bits(coding, rest))
            try:
                decompressed = decompressor.decompress(rest, _DECOMPRESSED_AT_ONCE)
            except zlib.error as error:
                raise _damaged(coding, str(error)) from None
            rest = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
            is_full = len(decompressed) == _DECOMPRESSED_AT_ONCE and not decompressor.eof
            yield decompressed
            await asyncio.sleep(0)
    if decompressor is not None and not decompressor.eof:
        raise _damaged(coding, "unexpected end of data")


def _window_bits(coding: str, beginning: bytes) -> int:
    """The `wbits` argument with which zlib can decompress the body.

    Some clients send deflate data without the zlib header, whose first byte contains the method 8.
    """
    bits = _CODINGS[coding]
    assert bits is not None, "a plain body is not decompressed"
    return -zlib.MAX_WBITS if coding == "deflate" and beginning[0] & 15 != 8 else bits


def _damaged(coding: str, why: str) -> RequestRefused:
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
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == _NOT_JSON and (mended := _ESCAPE.sub(_whole_character, body)) != body:
            return parse(model, mended)
        raise _refusal(first["type"], first["loc"], first["msg"], first["input"]) from None


def number_in(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """A whole number of a query; None if it is missing. Raises RequestRefused."""
    text = query.get(name)
    if text is None:
        return None
    if not (_DIGITS.fullmatch(text) and least <= int(text) <= most):
        raise invalid_field(name, f"must be a number from {least} to {most}")
    return int(text)


def choice_in(query: Mapping[str, str], name: str, choices: Collection[C], default: C) -> C:
    """One of the words that a query may have; the default if it is missing. Raises
    RequestRefused.
    """
    given = query.get(name, default)
    for choice in choices:
        if choice == given:
            return choice
    raise invalid_field(name, f"must be one of {', '.join(choices)}")


def _whole_character(escape: re.Match[bytes]) -> bytes:
    return _REPLACEMENT if escape["half"] else escape[0]


def field_name(location: tuple[int | str, ...]) -> str:
    """The location of an error as a dotted path, such as messages.0.content."""
    return ".".join(
        str(part)
        for part in location
        if not (isinstance(part, str) and (part[:1] == TAG_MARK or part == "[key]"))
    )


def _refusal(
    kind: str, location: tuple[int | str, ...], message: str, given: Any
) -> RequestRefused:
    if kind == _NOT_JSON:
        return RequestRefused(
            f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}",
            code="invalid_json",
        )
    field = field_name(location)
    if not field:
        return RequestRefused("the body must be a JSON object", code="invalid_type")
    code = _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "missing":
        return RequestRefused(f"`{field}` is required", code=code, field=field)
    text = message.removeprefix("Value error, ")
    if given in ("", []) and kind.endswith("too_short"):
        text = "must not be empty"
    return invalid_field(field, f"{text[:1].lower()}{text[1:]}", code=code, shown=_shown(given))


def _shown(given: Any) -> str:
    if given is None:
        return ", got null"
    if isinstance(given, bool):
        return f", got {str(given).lower()}"
    if isinstance(given, int) and abs(given) >= 10**_LONGEST_SHOWN:
        return ", got a huge number"
    if isinstance(given, int | float | str):
        text = repr(given)
        return f", got {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '…'}"
    return ""


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(
        f"the body is larger than {limit_bytes:,} bytes", status=413, code="body_too_large"
    )


def extended(plan: AnswerPlan, request: Request, *, limits: LimitsSettings) -> AnswerPlan:
    """Add tenant, session, priority and time limit to the plan, from the key, body and headers.

    Raises RequestRefused for an invalid session id, priority or time limit.
    """
    headers = request.headers
    tenant = tenant_in(request, cache_salt=plan.cache_salt)
    session_id = _session_id(plan, headers)
    service = service_in(request, can_wait=plan.can_wait)
    return replace(
        plan,
        requests=tuple(
            msgspec.structs.replace(
                asked,
                tenant=tenant,
                session_id=session_id,
                service=service,
                kv_bits=plan.kv_bits,
                truncation=plan.truncation,
            )
            for asked in plan.requests
        ),
        caller=caller_of(request),
        time_limit_seconds=time_limit_in(headers, limits=limits),
        explains=plan.explains or headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES,
    )


def tenant_in(request: Request, *, cache_salt: str) -> str:
    """The tenant of a request: only requests of the same tenant share cached prefixes."""
    caller, name = caller_of(request), request.headers.get(TENANT_HEADER, "")
    if caller.key is not None:
        return tenant_of_key(caller.key.name, name=name, cache_salt=cache_salt)
    return tenant_of(api_key=caller.server_key, name=name, cache_salt=cache_salt)


def service_in(request: Request, *, can_wait: bool = False) -> ServiceClass:
    """The priority of a request, and its flow. The scheduler shares the model fairly among flows.

    Key, header and body can each lower the priority, but not raise it. The flow is named after the
    API key, or else the tenant header, or else the client's address. It ignores salts, because
    otherwise a client with a new salt for each request would get many shares. Raises
    RequestRefused.

    can_wait: whether the body asks for batch priority.
    """
    caller = caller_of(request)
    header = request.headers.get(PRIORITY_HEADER, "interactive").strip().lower()
    if header not in _PRIORITIES:
        raise invalid_field(PRIORITY_HEADER, f"must be {' or '.join(_PRIORITIES)}")
    is_batch_key = caller.key is not None and caller.key.priority == "batch"
    is_batch = can_wait or header == "batch" or is_batch_key
    tenant = request.headers.get(TENANT_HEADER, "")
    if caller.key_name:
        flow = f"key {caller.key_name}"
    elif tenant:
        flow = f"tenant {tenant}"
    else:
        flow = f"address {caller.address}"
    return ServiceClass(flow=flow, priority="batch" if is_batch else "interactive")


def time_limit_in(headers: Mapping[str, str], *, limits: LimitsSettings) -> float:
    """The time limit of a request in seconds; 0: no limit.

    The client's limit applies, but cannot exceed the server's. Raises RequestRefused if the
    client's limit is not a positive number.
    """
    text = headers.get(TIME_LIMIT_HEADER)
    if text is None:
        return limits.request_seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid_field(TIME_LIMIT_HEADER, "must be a number of seconds above 0")
    return min(seconds, limits.request_seconds or seconds)


def _session_id(plan: AnswerPlan, headers: Mapping[str, str]) -> str:
    if (named := headers.get(SESSION_HEADER)) is not None:
        return checked_session_id(named, field="X-Session-ID")
    if plan.session_id is not None:
        return checked_session_id(plan.session_id, field="session_id")
    key = plan.session_key
    if not key or is_session_id(key):
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"key-{digest.hexdigest()}"


def checked_session_id(session_id: str, *, field: str) -> str:
    """Return a session id if it is valid. Raises RequestRefused if it is not."""
    if not is_session_id(session_id):
        raise invalid_field(
            field,
            f"a session id must have 1 to {LONGEST_SESSION_ID} printable characters and no slash",
        )
    return session_id
