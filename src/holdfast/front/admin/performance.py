"""/admin/performance: how long requests took, by model and time range."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import query_shape, returns
from holdfast.front.server.request import choice_in, json_response
from holdfast.front.server.services import Services, model_of, served_models
from holdfast.front.telemetry.history import RANGES, Performance, RangeName

_DEFAULT: RangeName = "1h"


@operation(
    "GET",
    "/admin/performance",
    query_shape(
        {
            "model": (str, "Show only this model; default: all models."),
            "range": (RangeName, f"The range of time up to now; default: {_DEFAULT}."),
        }
    ),
    returns(Performance),
    needs_admin=True,
)
async def show_performance(request: Request, services: Services) -> Response:
    """Show how long requests took, by phase: queue, load, lookup, restore, prefill, gaps.

    The figures are those of `/metrics`, kept by minute, five minutes and hour for up to seven days.
    They survive restarts.
    """
    query = request.query_params
    range_name = choice_in(query, "range", RANGES, _DEFAULT)
    name = query.get("model")
    model = None
    if name:
        model = model_of(services, name)
        if model not in services.telemetry.metrics.history.models and model not in {
            each.id for each in served_models(services)
        }:
            raise services.models.catalog().unknown(name)
    return json_response(services.telemetry.metrics.history.report(range_name, model=model))


OPERATIONS = (show_performance,)
