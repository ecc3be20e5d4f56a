"""The HTTP application: its paths and what stands in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from holdfast.http import errors, openapi, sessions_api, start_page, status_api
from holdfast.http.body import parse, read_body
from holdfast.http.extensions import extended
from holdfast.http.generation import GenerationResponse
from holdfast.http.guard import Guard
from holdfast.http.openai_chat import ChatCompletionRequest
from holdfast.http.openai_completions import CompletionRequest
from holdfast.http.openai_shapes import ChatCompletion, ChatCompletionChunk, Completion, Health, ModelCard, ModelList
from holdfast.http.request_lines import RequestLines
from holdfast.http.services import Services, first_model
from holdfast.telemetry.requests import RequestWatch

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def _nothing_to_start(_: FastAPI) -> AsyncIterator[None]:
    yield


def create_application(services: Services, *, lifespan: Lifespan = _nothing_to_start) -> FastAPI:
    """The application over these services. `lifespan` starts and stops what the services need, in the server's own loop."""
    app = FastAPI(
        title="Holdfast",
        summary="Language models with MLX, for agents; OpenAI-compatible.",
        version=services.version,
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_generating_paths(app, services)
    sessions_api.install(app, services)
    _add_status_paths(app, services)
    errors.install(app)
    openapi.install(app)
    app.add_middleware(Guard, server=services.server)
    if services.server.cors_origins:
        origins = list(services.server.cors_origins)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestLines, metrics=services.metrics)
    return app


def _add_generating_paths(app: FastAPI, services: Services) -> None:
    @app.post(
        "/v1/chat/completions",
        openapi_extra=openapi.request_of(ChatCompletionRequest),
        responses=openapi.answers_of(ChatCompletion, chunk=ChatCompletionChunk),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await _generation(request, services, ChatCompletionRequest)

    @app.post(
        "/v1/completions",
        openapi_extra=openapi.request_of(CompletionRequest),
        responses=openapi.answers_of(Completion, chunk=Completion),
    )
    async def create_completion(request: Request) -> Response:
        """Continue a text."""
        return await _generation(request, services, CompletionRequest)


async def _generation(
    request: Request, services: Services, kind: type[ChatCompletionRequest] | type[CompletionRequest]
) -> Response:
    watch = RequestWatch(services.metrics)
    body = await read_body(request.scope, request.receive, limit_bytes=services.limits.max_body_bytes)
    fields = parse(kind, body)
    plan = fields.plan(services.limits, default_model=first_model(services), version=services.version)
    plan = extended(plan, request.headers, fields, api_key=services.server.api_key)
    return GenerationResponse(services, plan, watch)


def _add_status_paths(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models", responses=openapi.answers_of(ModelList))
    async def list_models() -> Response:
        """The served models."""
        return status_api.list_models(services)

    @app.get("/v1/models/{model_id:path}", responses=openapi.answers_of(ModelCard))
    async def get_model(model_id: str) -> Response:
        """One served model; its id may contain slashes."""
        return status_api.one_model(services, model_id)

    @app.get("/", response_class=Response, responses=openapi.text_answer("text/html", "text/plain"))
    async def front_page(request: Request) -> Response:
        """What this server is: a page for browsers, lines for others. Needs no key, but tells of models only to who has it."""
        return start_page.front_page(request, services)

    @app.get("/health", responses=openapi.answers_of(Health, further_statuses=(503,)))
    async def health() -> Response:
        """How the server and its models are doing. Needs no key."""
        return status_api.health(services)

    @app.get("/metrics", response_class=Response, responses=openapi.text_answer("text/plain"))
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return await status_api.metrics(services)
