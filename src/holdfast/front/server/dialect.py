"""What a dialect is, and the table of them: which one a path belongs to, and which path is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.caller import check_admin
from holdfast.front.server.extensions import tenant_in
from holdfast.front.server.problem import Problem
from holdfast.front.server.services import Services

Handler: TypeAlias = Callable[[Request, Services], Awaitable[Response]]
_VERSION = "v1"


Shape: TypeAlias = Mapping[str, Any]  # a part of an operation's description, made by `openapi`


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
    needs_admin: bool = False  # see `caller.check_admin`

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
