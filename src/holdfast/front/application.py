"""The HTTP application: the table of dialects, and what stands in front of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from holdfast.front.admin.dialect import ADMIN
from holdfast.front.anthropic.dialect import ANTHROPIC
from holdfast.front.ollama.dialect import OLLAMA
from holdfast.front.openai.dialect import OPENAI, OTHER_PARTS
from holdfast.front.rerank.dialect import RERANK
from holdfast.front.responses.dialect import RESPONSES
from holdfast.front.server.dialect import Dialect, DialectTable, Operation
from holdfast.front.server.errors import HANDLERS, handle
from holdfast.front.server.guard import LOCAL_ORIGIN, Guard
from holdfast.front.server.models import model_operations
from holdfast.front.server.proxies import ForwardedAddresses, trusted_networks
from holdfast.front.server.request_lines import request_lines
from holdfast.front.server.services import Services
from holdfast.front.tokens.dialect import TOKENS

MODELS = Dialect(  # errors on its paths are those of the client's own protocol
    name="The list of models",
    error=OPENAI.error,
    error_shape=OPENAI.error_shape,
    operations=model_operations((OPENAI, ANTHROPIC, RESPONSES)),
)
DIALECTS = (
    OPENAI,
    MODELS,
    ADMIN,
    RESPONSES,
    RERANK,
    TOKENS,
    OTHER_PARTS,
    ANTHROPIC,
    OLLAMA,
)


def create_application(services: Services, *, dialects: Sequence[Dialect] = DIALECTS) -> Starlette:
    """The application over these services. Paths that no dialect claims are the first one's."""
    table = DialectTable(dialects)
    proxies = trusted_networks(services.server.trusted_proxies)
    middleware = [
        *([Middleware(ForwardedAddresses, trusted=proxies)] if proxies else ()),
        Middleware(request_lines, metrics=services.metrics, traces=services.traces),
        _cors(services.server.cors_origins),
        Middleware(
            Guard, server=services.server, dialects=table, keys=services.keys, drain=services.drain
        ),
        Middleware(ExceptionMiddleware, handlers=HANDLERS),
    ]
    app = Starlette(
        routes=[_route(operation) for operation in table.operations],
        middleware=middleware,
        exception_handlers={HTTPException: handle},  # the framework's own, about paths and methods
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.services, app.state.dialects = services, table
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    services: Services = app.state.services
    yield
    await services.library.close()
    await services.running.close()
    await services.responses.close()


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=LOCAL_ORIGIN.pattern,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id"],
    )


def _route(operation: Operation) -> Route:
    route = Route(operation.path, operation, methods=[operation.method])
    route.methods = {operation.method}  # without the HEAD that it adds
    return route
