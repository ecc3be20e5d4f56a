"""GET /v1/models: what is served, in the form that the client's protocol has for it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.server.body import json_response
from holdfast.front.server.dialect import Dialect, ModelShapes, Operation, operation
from holdfast.front.server.openapi import either_of
from holdfast.front.server.services import Services, named_model, served_models


def model_operations(speakers: Sequence[Dialect]) -> tuple[Operation, ...]:
    """The operations. speakers: the dialects that have a form of their own; the first one's is
    everybody else's.
    """
    shapes = [dialect.models for dialect in speakers if dialect.models is not None]

    def shape_for(request: Request) -> ModelShapes:
        spoken: ModelShapes | None = request.app.state.dialects.spoken(request.headers).models
        return (
            spoken
            if spoken is not None and spoken.is_on(request.app.state.services.server)
            else shapes[0]
        )

    @operation(
        "GET",
        "/v1/models",
        either_of(*[shape.many_type for shape in shapes]),
        summary="what is served",
    )
    async def list_models(request: Request, services: Services) -> Response:
        """The served models."""
        return json_response(shape_for(request).many(served_models(services)))

    @operation(
        "GET", "/v1/models/{model_id:path}", either_of(*[shape.one_type for shape in shapes])
    )
    async def get_model(request: Request, services: Services) -> Response:
        """One served model; its id may contain slashes."""
        return json_response(
            shape_for(request).one(named_model(services, request.path_params["model_id"]))
        )

    return list_models, get_model
