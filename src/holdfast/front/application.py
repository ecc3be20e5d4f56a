"""The HTTP application: its protocols and its middleware.

The outermost middleware gives every request an id, counts it, and logs one line when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import WorkerUnavailable
from holdfast.front.admin.control import ADMIN
from holdfast.front.anthropic.messages import ANTHROPIC
from holdfast.front.ollama.generation import OLLAMA
from holdfast.front.openai.endpoints import OPENAI, OTHER_PARTS
from holdfast.front.page import shell, start_page
from holdfast.front.rerank import RERANK
from holdfast.front.responses.create import RESPONSES
from holdfast.front.server.dialect import (
    HANDLERS,
    NO_SNIFFING,
    Dialect,
    DialectTable,
    ModelShapes,
    Operation,
    answer_of,
    handle,
    operation,
)
from holdfast.front.server.guard import LOCAL_ORIGIN, ForwardedAddresses, Guard, trusted_networks
from holdfast.front.server.openapi import returns
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services, named_model, served_models
from holdfast.front.server.streams import disconnected
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.request_log import (
    PAGE_HEADER,
    RECORD,
    UNKNOWN_ROUTE,
    RequestRecord,
    write_line,
)
from holdfast.front.telemetry.traces import Traces
from holdfast.front.tokens import TOKENS

# OpenAI's clients read the first header, Anthropic's clients the second
_ID_HEADERS = (b"x-request-id", b"request-id")
_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def _model_operations(protocols: Sequence[Dialect]) -> tuple[Operation, ...]:
    """Create the operations that list all models and show one of them.

    Each client gets the format of its protocol.

    protocols: the protocols that define such a format; clients of other protocols get the format
        of the first one.
    """
    all_shapes = [dialect.models for dialect in protocols if dialect.models is not None]

    def shapes_for(request: Request) -> ModelShapes:
        """The format of the client's protocol, if that protocol is enabled and has one, or the
        first.
        """
        client_shapes: ModelShapes | None = request.app.state.dialects.by_headers(
            request.headers
        ).models
        is_enabled = client_shapes is not None and client_shapes.is_on(
            request.app.state.services.server
        )
        return client_shapes if client_shapes is not None and is_enabled else all_shapes[0]

    @operation(
        "GET",
        "/v1/models",
        returns(*[shape.many_type for shape in all_shapes]),
        summary="the served models",
    )
    async def list_models(request: Request, services: Services) -> Response:
        """List the served models."""
        return json_response(shapes_for(request).many(served_models(services)))

    @operation(
        "GET", "/v1/models/{model_id:path}", returns(*[shape.one_type for shape in all_shapes])
    )
    async def get_model(request: Request, services: Services) -> Response:
        """Show one served model, whose id may contain slashes."""
        return json_response(
            shapes_for(request).one(named_model(services, request.path_params["model_id"]))
        )

    return list_models, get_model


MODELS = Dialect(  # without a prefix, so that errors have the format of the client's protocol
    name="The list of models",
    error=OPENAI.error,
    error_shape=OPENAI.error_shape,
    operations=_model_operations((OPENAI, ANTHROPIC, RESPONSES)),
)
PAGE = Dialect(
    name="The page for browsers",
    error=OPENAI.error,
    error_shape=OPENAI.error_shape,
    prefixes=("/page",),
    operations=(*start_page.OPERATIONS, *shell.OPERATIONS),
)
DIALECTS = (OPENAI, MODELS, PAGE, ADMIN, RESPONSES, RERANK, TOKENS, OTHER_PARTS, ANTHROPIC, OLLAMA)


def create_application(services: Services, *, dialects: Sequence[Dialect] = DIALECTS) -> Starlette:
    """Create the application. Errors for unknown paths have the format of the first protocol."""
    table = DialectTable(dialects)
    proxies = trusted_networks(services.server.trusted_proxies)
    middleware = [
        *([Middleware(ForwardedAddresses, trusted=proxies)] if proxies else ()),
        Middleware(
            _request_record_layer,
            metrics=services.telemetry.metrics,
            traces=services.telemetry.traces,
        ),
        _cors(services.server.cors_origins),
        Middleware(
            Guard,
            server=services.server,
            dialects=table,
            keys=services.access.keys,
            drain=services.access.drain,
        ),
        Middleware(ExceptionMiddleware, handlers=HANDLERS),
    ]
    app = Starlette(
        routes=[_route(each) for each in table.operations],
        middleware=middleware,
        exception_handlers={HTTPException: handle},  # Starlette's, for unknown paths and methods
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.services, app.state.dialects = services, table
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    """Close the services when the server stops."""
    services: Services = app.state.services
    yield
    services.gateway.close()
    await services.models.library.close()
    await services.answers.resumable.close()
    await services.answers.responses.close()
    if services.telemetry.history_file is not None:
        await services.telemetry.history_file.close()


def _cors(origins: Sequence[str]) -> Middleware:
    """Middleware that lets pages of these origins, and of this machine, call the API."""
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=LOCAL_ORIGIN.pattern,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id"],
    )


def _route(served: Operation) -> Route:
    """The route of an operation."""
    route = Route(served.path, served, methods=[served.method])
    route.methods = {served.method}  # removes HEAD, which Starlette adds
    return route


def _request_record_layer(
    app: ASGIApp, *, metrics: Metrics, traces: Traces | None = None
) -> ASGIApp:
    """Middleware that gives every request an id, counts it and logs it.

    traces: if given, every request is also traced.
    """

    async def handle_connection(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        client, request_id = scope.get("client"), _request_id(scope)
        record = RequestRecord(
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else "",
            is_from_page=any(name == PAGE_HEADER for name, _ in scope["headers"]),
            request_id=request_id.decode(),
        )
        scope[RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, request_id) for name in _ID_HEADERS),
                    NO_SNIFFING,
                ]
            await send(message)

        try:
            with metrics.loop_lag.watched():
                await app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.is_aborted = True
        except asyncio.CancelledError:
            # The server is stopping, and the handler did not turn the cancellation into an answer.
            response = answer_of(
                WorkerUnavailable("the server stopped before the request was complete"), scope
            )
            # If the response has begun, wait: the server is about to close the connection.
            await (
                disconnected(receive)
                if record.has_status
                else response(scope, receive, send_with_id)
            )
        finally:
            path = getattr(scope.get("endpoint"), "path", UNKNOWN_ROUTE)
            metrics.http_requests.labels(record.method, path, str(record.status)).inc()
            write_line(record)
            if traces is not None:
                traces.book(record, route=path, headers=scope["headers"])

    return handle_connection


def _request_id(scope: Scope) -> bytes:
    """The id that the client sent, if it is well formed, or else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED_ID.fullmatch(value):
            return bytes(value)
    return b"req_" + uuid.uuid4().hex.encode()
