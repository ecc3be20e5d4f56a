"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.errors import UnknownModel
from holdfast.http.server.body import json_response
from holdfast.http.server.dialect import operation
from holdfast.http.server.openapi import answers_of
from holdfast.http.server.services import Services
from holdfast.residency.residency import ModelStatus


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "holdfast"
    max_model_len: int | None = None  # vLLM's name for the context length; clients look for it


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@operation("GET", "/v1/models", answers_of(ModelList), summary="what is served")
async def list_models(request: Request, services: Services) -> Response:
    """The served models."""
    return json_response(ModelList(data=[_card(model) for model in services.statuses()]))


@operation("GET", "/v1/models/{model_id:path}", answers_of(ModelCard))
async def get_model(request: Request, services: Services) -> Response:
    """One served model; its id may contain slashes."""
    models = {model.id: model for model in services.statuses()}
    model_id = request.path_params["model_id"]
    if model_id not in models:
        raise UnknownModel(model=model_id, available=tuple(models))
    return json_response(_card(models[model_id]))


def _card(model: ModelStatus) -> ModelCard:
    return ModelCard(id=model.id, created=model.created, max_model_len=model.info.context_tokens if model.info else None)
