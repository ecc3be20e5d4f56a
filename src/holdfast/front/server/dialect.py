"""The protocols of a server and their operations. This file finds the protocol of a path, and formats
errors for the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.access import check_admin
from holdfast.front.server.problem import Problem, problem_of, record_problem
from holdfast.front.server.services import Services
from holdfast.front.telemetry.request_log import RECORD, RequestRecord

Handler: TypeAlias = Callable[[Request, Services], Awaitable[Response]]
Shape: TypeAlias = Mapping[str, Any]  # part of an operation's description in /openapi.json
# marks an operation whose response does not end, for programs that call all operations
ENDLESS_MARK = "x-endless"
# for every response: an answer repeats untrusted text, so a browser must not render it as a page
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
_VERSION = "v1"
_LONGEST_PATH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One HTTP method of one path, with its handler and description. It is an ASGI application."""

    method: str
    path: str  # variables in braces, as in Starlette
    handler: Handler  # the handler's name and docstring appear in /openapi.json
    shape: Shape  # if empty, /openapi.json omits the operation
    summary: str = ""  # for the start page, which lists only operations with a summary
    needs_key: bool = True
    needs_admin: bool = False  # only callers that may administer the server can use it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        if self.needs_admin:
            check_admin(request)
        response = await self.handler(request, request.app.state.services)
        await response(scope, receive, send)


def operation(
    method: str,
    path: str,
    *shapes: Shape,
    summary: str = "",
    needs_key: bool = True,
    needs_admin: bool = False,
) -> Callable[[Handler], Operation]:
    """Decorator that turns a handler into an operation.

    shapes: the parts of the operation's description in /openapi.json.
    """

    def operation_of(handler: Handler) -> Operation:
        return Operation(
            method=method,
            path=path,
            handler=handler,
            shape={name: part for shape in shapes for name, part in shape.items()},
            summary=summary,
            needs_key=needs_key,
            needs_admin=needs_admin,
        )

    return operation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """How a protocol formats the list of served models (`many`) and a single model (`one`)."""

    many_type: type[Struct]
    one_type: type[Struct]
    many: Callable[[Sequence[ModelStatus]], Struct]
    one: Callable[[ModelStatus], Struct]
    # whether these formats are in use; if not, clients get the formats of the first protocol
    is_on: Callable[[ServerSettings], bool] = lambda server: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A protocol that clients can use.

    Each protocol has its own folder and a line in the table of `application.py`.
    """

    name: str
    error: Callable[[Problem], Any]  # the body of an error, to be encoded as JSON
    # prefixes of the protocol's paths, one or two segments long; errors on such paths have its
    # format
    prefixes: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()  # if empty, the protocol is not served
    serves: str = ""  # text for the error that an unknown path gets
    error_shape: type | None = None  # the type that `error` returns, for /openapi.json
    # tells, for paths without a protocol, whether a client with these headers uses this protocol
    matches_headers: Callable[[Mapping[str, str]], bool] = lambda headers: False
    models: ModelShapes | None = None  # the protocol's own format of the list of models
    # HTTP statuses by problem code, where they differ from the other protocols'
    statuses: Mapping[str, int] = field(default_factory=dict)


class DialectTable:
    """All protocols of a server. The first one is the default."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.dialects = tuple(dialects)
        self.operations = tuple(each for dialect in dialects for each in dialect.operations)
        without_key = [each.path for each in self.operations if not each.needs_key]
        self._open_paths = frozenset(without_key)
        self._open_folders = tuple(path.partition("{")[0] for path in without_key if "{" in path)
        self.serves = "; ".join(dialect.serves for dialect in dialects if dialect.serves)
        self._by_prefix = {prefix: dialect for dialect in dialects for prefix in dialect.prefixes}
        fixed_paths = {each.path for each in self.operations if "{" not in each.path} - {"/"}
        # the first two segments of each path, which tell whether it begins with /v1
        beginnings = [(*path.split("/"), "")[1:3] for path in (*self._by_prefix, *fixed_paths)]
        self._under_version = {second for first, second in beginnings if first == _VERSION}
        self._without_version = {first for first, _ in beginnings if first != _VERSION} | {_VERSION}
        path_endings = [path.removeprefix(f"/{_VERSION}") for path in fixed_paths]
        self._path_endings = sorted(path_endings, key=len, reverse=True)

    def is_open(self, path: str) -> bool:
        """Whether a path needs no API key."""
        return path in self._open_paths or path.startswith(self._open_folders)

    def for_path(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """The protocol of a path; for a path of no protocol, the one that the client seems to use.

        headers: the headers of the request.
        """
        _, first, second = (*path.split("/", 3), "", "")[:3]
        return (
            self._by_prefix.get(f"/{first}/{second}")
            or self._by_prefix.get(f"/{first}")
            or self.by_headers(headers)
        )

    def by_headers(self, headers: Mapping[str, str]) -> Dialect:
        """The protocol that a client's headers reveal; by default the first protocol."""
        matching = (dialect for dialect in self.dialects if dialect.matches_headers(headers))
        return next(matching, self.dialects[0])

    def served_path(self, path: str) -> str:
        """The path without repeated slashes, and with exactly one /v1 if the served path has one.

        Base URLs are configured with and without /v1 and a final slash, so clients call
        /chat/completions and /v1/v1/models. In an unknown path, only the slashes are normalized.
        """
        segments = [segment for segment in path.split("/") if segment]
        while (
            len(segments) > 1 and segments[0] == _VERSION and segments[1] in self._without_version
        ):
            del segments[0]
        if segments and segments[0] in self._under_version:
            segments.insert(0, _VERSION)
        return "/" + "/".join(segments)

    def suggested_path(self, path: str) -> str | None:
        """The served path that an unknown path ends with, such as /v1/chat/completions for
        /openai/v2/chat/completions. None if it ends with none.
        """
        longest = next((ending for ending in self._path_endings if path.endswith(ending)), None)
        return None if longest is None else self.served_path(longest)


def problem_body(problem: Problem, dialect: Dialect) -> bytes:
    """The body of an error in the format of a protocol."""
    return msgspec.json.encode(dialect.error(problem))


def answer_of(error: Exception, scope: Scope) -> Response:
    """Create the error response for a failed request, and note the reason in its log record."""
    table: DialectTable = scope["app"].state.dialects
    path = table.served_path(scope["path"])
    dialect = table.for_path(path, Headers(scope=scope))
    # the web framework raises HTTPException only for an unknown path or method
    is_routing_error = isinstance(error, HTTPException)
    problem = _path_problem(path, scope, dialect) if is_routing_error else problem_of(error)
    record: RequestRecord = scope[RECORD]
    record_problem(record, problem, error)
    status = dialect.statuses.get(problem.code, problem.status)
    problem = replace(problem, status=status, request_id=record.request_id)
    return Response(
        problem_body(problem, dialect),
        status_code=status,
        headers=problem.headers,
        media_type="application/json",
    )


async def handle(request: Request, error: Exception) -> Response:
    """Exception handler: create the error response."""
    return answer_of(error, request.scope)


async def pass_on(request: Request, error: Exception) -> Response:
    """Exception handler for a client that disconnected: raise again, as nobody reads a response."""
    raise error


HANDLERS = {Exception: handle, HTTPException: handle, ClientDisconnect: pass_on}


def _path_problem(path: str, scope: Scope, dialect: Dialect) -> Problem:
    """The problem with an unknown path, or with a method that the path does not allow.

    It replaces the web framework's error.
    """
    app, method = scope["app"], scope["method"]
    table: DialectTable = app.state.dialects
    if not dialect.operations:
        # Not a 5xx: the official clients would retry, and Claude Code would do so ten times
        # silently.
        return Problem(
            status=404,
            code="protocol_not_served",
            message=f"{dialect.name} is not served by this version of Holdfast yet ({method} {path}). "
            f"It serves {table.serves}",
        )
    matching_routes = [route for route in app.routes if route.matches(scope)[0] is not Match.NONE]
    if matching_routes:
        allow = ", ".join(sorted({route.endpoint.method for route in matching_routes}))
        return Problem(
            status=405,
            code="method_not_allowed",
            message=f"this path allows only {allow}",
            headers={"allow": allow},
        )
    suggestion = table.suggested_path(path)
    hint = f". It serves {table.serves}"
    if suggestion is not None:
        hint = f"; did you mean {suggestion}?"
    return Problem(
        status=404,
        code="unknown_path",
        message=f"this server has no path {path[:_LONGEST_PATH]}{hint}",
    )
