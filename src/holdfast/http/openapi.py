"""The description at /openapi.json, made from the very types that check requests and encode answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from holdfast.http.error_forms import ErrorBody
from holdfast.http.openai_chat import ChatCompletionRequest
from holdfast.http.openai_completions import CompletionRequest
from holdfast.http.openai_shapes import ChatCompletion, ChatCompletionChunk, Completion, Health, ModelCard, ModelList
from holdfast.http.session_fields import (
    SessionChange,
    SessionDeleted,
    SessionForking,
    SessionList,
    SessionObject,
    SessionOpening,
)
from holdfast.messages.sessions import LONGEST_SESSION_ID

_COMPONENTS = "#/components/schemas/{name}"
_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    SessionOpening,
    SessionChange,
    SessionForking,
)
_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
    Health,
    SessionObject,
    SessionList,
    SessionDeleted,
    ErrorBody,
)


def _reference(model: type) -> dict[str, str]:
    return {"$ref": _COMPONENTS.format(name=model.__name__)}


_FAILURE = {"description": "An error", "content": {"application/json": {"schema": _reference(ErrorBody)}}}
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_QUERY: dict[str, dict[str, Any]] = {
    "id": {
        "description": "A name for the session.",
        "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_SESSION_ID, "pattern": "^[^/]+$"},
    },
    "model": {"description": "The model whose sessions are meant; the first if not given.", "schema": {"type": "string"}},
    "limit": {"description": "At most so many.", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
    "forget": {"description": "Delete what was read in it.", "schema": {"type": "boolean"}},
    "cache_salt": {"description": "The salt of the session's requests.", "schema": {"type": "string"}},
}


def request_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """OpenAPI extra for a route that reads its body itself."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": _reference(model)}}}}


def query_of(*names: str) -> dict[str, Any]:
    """OpenAPI extra for a route that reads its query itself; all of it may be left out."""
    return {"parameters": [_QUERY[name] | {"name": name, "in": "query", "required": False} for name in names]}


def file_request() -> dict[str, Any]:
    """OpenAPI extra for a route that takes a file."""
    return {"requestBody": {"required": True, "content": _FILE}}


def file_answer() -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that gives a file."""
    return {200: {"description": "The file", "content": _FILE}, "default": _FAILURE}


def text_answer(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that gives text."""
    content = {media_type: {"schema": {"type": "string"}} for media_type in media_types}
    return {200: {"description": "The text", "content": content}, "default": _FAILURE}


def answers_of(
    whole: type[msgspec.Struct], *, chunk: type[msgspec.Struct] | None = None, further_statuses: tuple[int, ...] = ()
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route: the whole answer, the events of a stream, the error form.

    further_statuses: those besides 200 with which the answer comes in the same form.
    """
    content: dict[str, Any] = {"application/json": {"schema": _reference(whole)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _reference(chunk)}
    answer = {"description": "The answer", "content": content}
    return {200: answer, **dict.fromkeys(further_statuses, answer), "default": _FAILURE}


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
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}} | {
        name: {"type": "apiKey", "in": "header", "name": name} for name in ("x-api-key", "api-key")
    }
    description["security"] = [{}, *({name: []} for name in components["securitySchemes"])]
    return description
