"""The protocols of a server: their operations, the errors in their form, and /openapi.json."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.access import KEY_HEADER_NAMES, check_admin
from holdfast.front.server.problem import Problem, problem_of, record_problem
from holdfast.front.server.request import tenant_in
from holdfast.front.server.services import Services
from holdfast.telemetry.request_log import RECORD, RequestRecord
from holdfast.wire.sessions import LONGEST_SESSION_ID

Handler: TypeAlias = Callable[[Request, Services], Awaitable[Response]]
_VERSION = "v1"


Shape: TypeAlias = Mapping[str, Any]  # a part of an operation's description, made by `openapi`
_LONGEST_PATH = 100
ENDLESS_MARK = "x-endless"  # in the description of an operation whose answer does not end by itself
_COMPONENTS = "#/components/schemas/{name}"
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")
_QUERY: dict[str, dict[str, Any]] = {
    "id": {
        "description": "A name for the session.",
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": LONGEST_SESSION_ID,
            "pattern": "^[^/]+$",
        },
    },
    "model": {
        "description": "The model whose sessions are meant; the first if not given.",
        "schema": {"type": "string"},
    },
    "limit": {
        "description": "At most so many.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
    },
    "forget": {"description": "Delete what was read in it.", "schema": {"type": "boolean"}},
    "cache_salt": {
        "description": "The salt of the session's requests.",
        "schema": {"type": "string"},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path: who answers it, and how /openapi.json describes it.

    An ASGI application.
    """

    method: str
    path: str  # with its variables in braces, as Starlette has them
    handler: Handler  # its name and docstring are shown in /openapi.json
    shape: Shape  # empty: the operation is not described
    summary: str = ""  # for the start page, which leaves out operations without one
    needs_key: bool = True
    needs_admin: bool = False  # see `access.check_admin`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        if self.needs_admin:
            check_admin(request)
        response = await self.handler(request, _services_of(request))
        await response(scope, receive, send)


def _services_of(request: Request) -> Services:
    """The services, with a seal that is the client's own: what was sealed for one tenant says
    nothing to another.
    """
    services: Services = request.app.state.services
    tenant = tenant_in(request, cache_salt="")
    return replace(services, seal=services.seal.of(tenant)) if tenant else services


def operation(
    method: str,
    path: str,
    *shapes: Shape,
    summary: str = "",
    needs_key: bool = True,
    needs_admin: bool = False,
) -> Callable[[Handler], Operation]:
    """Decorator that makes an operation of its handler; `shapes` together describe it."""

    def of(handler: Handler) -> Operation:
        shape = {name: part for each in shapes for name, part in each.items()}
        return Operation(
            method=method,
            path=path,
            handler=handler,
            shape=shape,
            summary=summary,
            needs_key=needs_key,
            needs_admin=needs_admin,
        )

    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """How a protocol shows the models that are served: the types of a list and of one, and how they
    are made.
    """

    many_type: type[msgspec.Struct]
    one_type: type[msgspec.Struct]
    many: Callable[[Sequence[ModelStatus]], msgspec.Struct]
    one: Callable[[ModelStatus], msgspec.Struct]
    # else the first protocol's form is used
    is_on: Callable[[ServerSettings], bool] = lambda server: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A protocol that clients may speak to this server: a folder, and a line in the table of
    `application.py`.
    """

    name: str
    # the body of an answer that says what went wrong, to be encoded as JSON
    error: Callable[[Problem], Any]
    # of its paths, one or two segments long; errors on them come in its form
    prefixes: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()  # none: it is not served yet
    serves: str = ""  # what a client that calls an unknown path is told of it
    error_shape: type | None = None  # what `error` returns, for /openapi.json
    # Whether a client that sends these headers speaks it, on paths that are nobody's.
    is_spoken: Callable[[Mapping[str, str]], bool] = lambda headers: False
    models: ModelShapes | None = None  # its form of the list of models
    # Statuses by the code of a problem, where the protocol has another one than most.
    statuses: Mapping[str, int] = field(default_factory=dict)


class DialectTable:
    """All dialects of a server. The first one is spoken where nothing else is known."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.dialects = tuple(dialects)
        self.operations = tuple(
            operation for dialect in dialects for operation in dialect.operations
        )
        self.open_paths = frozenset(
            operation.path for operation in self.operations if not operation.needs_key
        )
        self.serves = "; ".join(dialect.serves for dialect in dialects if dialect.serves)
        self._by_prefix = {prefix: dialect for dialect in dialects for prefix in dialect.prefixes}
        fixed = {operation.path for operation in self.operations if "{" not in operation.path} - {
            "/"
        }
        known = [(*path.split("/"), "")[1:3] for path in (*self._by_prefix, *fixed)]
        self._under_version = {second for first, second in known if first == _VERSION}
        self._without_version = {first for first, _ in known if first != _VERSION} | {_VERSION}
        self._endings = sorted(
            (path.removeprefix(f"/{_VERSION}") for path in fixed), key=len, reverse=True
        )

    def dialect_of(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """The dialect to which a served path belongs; where it is nobody's, the one that its client
        speaks.
        """
        _, first, second = (*path.split("/", 3), "", "")[:3]
        return (
            self._by_prefix.get(f"/{first}/{second}")
            or self._by_prefix.get(f"/{first}")
            or self.spoken(headers)
        )

    def spoken(self, headers: Mapping[str, str]) -> Dialect:
        """The dialect of a client, as far as its headers tell it; else the first."""
        return next(
            (dialect for dialect in self.dialects if dialect.is_spoken(headers)), self.dialects[0]
        )

    def served_path(self, path: str) -> str:
        """The path that is meant: without doubled slashes, with one /v1 where it belongs.

        An unknown one loses only its slashes.

        Base URLs are given with and without /v1 and a slash at their end, so clients call
        /chat/completions and /v1/v1/models.
        """
        segments = [segment for segment in path.split("/") if segment]
        while (
            segments[:1] == [_VERSION]
            and len(segments) > 1
            and segments[1] in self._without_version
        ):
            del segments[0]
        if segments and segments[0] in self._under_version:
            segments.insert(0, _VERSION)
        return "/" + "/".join(segments)

    def meant_path(self, path: str) -> str | None:
        """The served path whose end an unknown path has, such as /v1/chat/completions for
        /openai/v2/chat/completions.
        """
        found = next((ending for ending in self._endings if path.endswith(ending)), None)
        return None if found is None else self.served_path(found)


def problem_body(problem: Problem, dialect: Dialect) -> bytes:
    """The body of an answer that says what went wrong."""
    return msgspec.json.encode(dialect.error(problem))


def answer_of(error: Exception, scope: Scope) -> Response:
    """The answer to a request that failed; its record gets the reason, for the log."""
    table: DialectTable = scope["app"].state.dialects
    path = table.served_path(scope["path"])
    dialect = table.dialect_of(path, Headers(scope=scope))
    problem = (
        _path_problem(path, scope, dialect)
        if isinstance(error, HTTPException)
        else problem_of(error)
    )
    record: RequestRecord = scope[RECORD]
    record_problem(record, problem, error)
    status = dialect.statuses.get(problem.code, problem.status)
    problem = replace(problem, status=status, request_id=record.request_id)
    body = problem_body(problem, dialect)
    return Response(
        body, status_code=status, headers=problem.headers, media_type="application/json"
    )


async def handle(request: Request, error: Exception) -> Response:
    """Handler for all exceptions."""
    return answer_of(error, request.scope)


async def pass_on(request: Request, error: Exception) -> Response:
    """Handler for a client that has gone: whoever writes the log is told, and nobody is answered."""
    raise error


HANDLERS = {Exception: handle, HTTPException: handle, ClientDisconnect: pass_on}


def _path_problem(path: str, scope: Scope, dialect: Dialect) -> Problem:
    """What is wrong with a path or a method, in place of the framework's own error."""
    app, method = scope["app"], scope["method"]
    table: DialectTable = app.state.dialects
    if not dialect.operations:
        message = (
            f"{dialect.name} is not served by this version of Holdfast yet ({method} {path}). It "
            f"serves {table.serves}"
        )
        # No 5xx: the official clients would repeat the request, Claude Code ten times without a
        # word.
        return Problem(status=404, code="protocol_not_served", message=message)
    methods = sorted(
        {route.endpoint.method for route in app.routes if route.matches(scope)[0] is not Match.NONE}
    )
    if methods:
        allow = ", ".join(methods)
        return Problem(
            status=405,
            code="method_not_allowed",
            message=f"this path takes {allow}",
            headers={"allow": allow},
        )
    meant = table.meant_path(path)
    hint = f". It serves {table.serves}" if meant is None else f"; did you mean {meant}?"
    return Problem(
        status=404,
        code="unknown_path",
        message=f"this server has no path {path[:_LONGEST_PATH]}{hint}",
    )


def request_of(model: type[BaseModel], *, required: bool = True) -> Shape:
    """Shape of an operation that reads a body."""
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": model}}}
    }


def query_of(*names: str) -> Shape:
    """Shape of an operation that reads its query; all of it may be left out."""
    return {
        "parameters": [
            _QUERY[name] | {"name": name, "in": "query", "required": False} for name in names
        ]
    }


def file_request() -> Shape:
    """Shape of an operation that takes a file."""
    return {"requestBody": {"required": True, "content": _FILE}}


def file_answer() -> Shape:
    """Shape of an operation that gives a file."""
    return {"responses": {"200": {"description": "The file", "content": _FILE}}}


def text_answer(*media_types: str) -> Shape:
    """Shape of an operation that gives text."""
    content = {media_type: {"schema": {"type": "string"}} for media_type in media_types}
    return {"responses": {"200": {"description": "The text", "content": content}}}


def endless_stream_of(event: type[msgspec.Struct]) -> Shape:
    """Shape of an operation that sends events until its client leaves.

    The mark tells programs that call every described operation not to wait for the end of this one.
    """
    content = {"text/event-stream": {"schema": event}}
    return {
        "responses": {"200": {"description": "The events", "content": content}},
        ENDLESS_MARK: True,
    }


def answers_of(
    whole: type[msgspec.Struct],
    *,
    chunk: type[msgspec.Struct] | None = None,
    chunk_type: str = "text/event-stream",
    statuses: tuple[str, ...] = ("200",),
) -> Shape:
    """Shape of an operation by its whole answer, which comes with these statuses, and the events of
    a stream of that type.
    """
    content: dict[str, Any] = {"application/json": {"schema": whole}}
    if chunk is not None:
        content[chunk_type] = {"schema": chunk}
    return {
        "responses": {
            status: {"description": "The answer", "content": content} for status in statuses
        }
    }


def either_of(*wholes: type[msgspec.Struct]) -> Shape:
    """Shape of an operation whose answer has the form of the client's protocol."""
    content = {"application/json": {"schema": {"anyOf": list(wholes)}}}
    return {"responses": {"200": {"description": "The answer", "content": content}}}


@lru_cache(maxsize=1)
def description(table: DialectTable, *, version: str) -> dict[str, Any]:
    """The whole description of what a server serves."""
    types: dict[str, type] = {}
    paths: dict[str, dict[str, Any]] = {}
    for dialect in table.dialects:
        failure = {
            "description": "An error",
            "content": {"application/json": {"schema": dialect.error_shape or {}}},
        }
        for operation in dialect.operations:
            if operation.shape:
                described = _referring(_described(operation, failure), types)
                paths.setdefault(_VARIABLE.sub(r"{\1}", operation.path), {})[
                    operation.method.lower()
                ] = described
    schemes = {"key": {"type": "http", "scheme": "bearer"}} | {
        name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADER_NAMES
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "summary": "Language models with MLX, for agents; OpenAI-compatible.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": _schemas(types), "securitySchemes": schemes},
        "security": [{}, *({name: []} for name in schemes)],
    }


def _described(operation: Operation, failure: Shape) -> dict[str, Any]:
    handler, variables = operation.handler, _VARIABLE.findall(operation.path)
    name = getattr(handler, "__name__", operation.path)
    in_path = [
        {
            "name": variable,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "title": _title(variable)},
        }
        for variable in variables
    ]
    parameters = [*in_path, *operation.shape.get("parameters", ())]
    place = re.sub(r"\W", "_", _VARIABLE.sub(r"{\1}", operation.path))
    return {
        "summary": _title(name),
        "description": (handler.__doc__ or "").strip(),
        "operationId": f"{name}{place}_{operation.method.lower()}",
        **operation.shape,
        **({"parameters": parameters} if parameters else {}),
        "responses": {**operation.shape.get("responses", {}), "default": failure},
    }


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _referring(node: Any, types: dict[str, type]) -> Any:
    """A description in which references stand for types, which are collected."""
    if isinstance(node, type):
        assert types.setdefault(node.__name__, node) is node, (
            f"two types of one name: {node.__name__}"
        )
        return {"$ref": _COMPONENTS.format(name=node.__name__)}
    if isinstance(node, Mapping):
        return {key: _referring(value, types) for key, value in node.items()}
    return [_referring(value, types) for value in node] if isinstance(node, list | tuple) else node


def _schemas(types: Mapping[str, type]) -> dict[str, Any]:
    requests = [(model, "validation") for model in types.values() if issubclass(model, BaseModel)]
    answers = [model for model in types.values() if not issubclass(model, BaseModel)]
    _, taken = models_json_schema(requests, ref_template=_COMPONENTS.replace("{name}", "{model}"))  # type: ignore[arg-type]
    _, given = msgspec.json.schema_components(answers, ref_template=_COMPONENTS)
    return {**taken.get("$defs", {}), **given}
