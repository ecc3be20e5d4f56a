"""The description at /openapi.json, made from the very types that check requests and encode answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from holdfast.http.errors import ErrorBody
from holdfast.http.openai_chat import ChatCompletionRequest
from holdfast.http.openai_completions import CompletionRequest
from holdfast.http.openai_shapes import ChatCompletion, ChatCompletionChunk, Completion, Health, ModelCard, ModelList

_COMPONENTS = "#/components/schemas/{name}"
_REQUESTS: tuple[type[BaseModel], ...] = (ChatCompletionRequest, CompletionRequest)
_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
    Health,
    ErrorBody,
)


def request_of(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI extra for a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(model)}}}}


def answers_of(whole: type[msgspec.Struct], *, chunk: type[msgspec.Struct] | None = None) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route: the whole answer, the events of a stream, the error form."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(whole)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _reference(chunk)}
    failure = {"application/json": {"schema": _reference(ErrorBody)}}
    return {200: {"description": "The answer", "content": content}, "default": {"description": "An error", "content": failure}}


def install(app: FastAPI) -> None:
    """Make `app.openapi` give the full description, built when it is first asked for."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _describe(app: FastAPI) -> dict[str, Any]:
    description = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    template = _COMPONENTS.replace("{name}", "{model}")
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=template)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_COMPONENTS)
    schemas = {**requests["$defs"], **answers}
    components = description.setdefault("components", {})
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    description["security"] = [{}, {"key": []}]
    return description


def _reference(model: type) -> dict[str, str]:
    return {"$ref": _COMPONENTS.format(name=model.__name__)}
