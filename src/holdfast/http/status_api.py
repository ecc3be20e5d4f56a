"""/v1/models, /health and /metrics: what the server has, how it is doing, what it has counted."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from holdfast.errors import UnknownModel
from holdfast.http.openai_shapes import Health, MemoryHealth, ModelCard, ModelHealth, ModelList
from holdfast.http.services import ServedModel, Services
from holdfast.telemetry.metrics import CONTENT_TYPE, ModelFacts

_READY = "ready"


def list_models(services: Services) -> Response:
    """All served models."""
    return _json(ModelList(data=[_card(model) for model in services.models.statuses()]))


def one_model(services: Services, model_id: str) -> Response:
    """One served model. Raises UnknownModel."""
    models = services.models.statuses()
    for model in models:
        if model.id == model_id:
            return _json(_card(model))
    raise UnknownModel(model=model_id, available=tuple(model.id for model in models))


def health(services: Services) -> Response:
    """200 when at least one model is ready, else 503 with the state of the first."""
    models = [_health(model) for model in services.models.statuses()]
    states = [model.state for model in models] or ["loading"]
    status = "ok" if _READY in states else states[0]
    body = Health(status=status, version=services.version, models=models)
    return _json(body, status=200 if status == "ok" else 503)


async def metrics(services: Services) -> Response:
    """All metrics, with the workers' statistics of this moment."""
    models = services.models.statuses()
    facts = ModelFacts(
        load_seconds={model.id: model.info.load_seconds for model in models if model.info is not None},
        restarts={model.id: model.restarts for model in models},
    )
    text = services.metrics.exposition(await services.models.statistics(), facts)
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.id, created=model.created, max_model_len=model.info.context_tokens if model.info else None)


def _health(model: ServedModel) -> ModelHealth:
    info = model.info
    return ModelHealth(
        id=model.id,
        state=model.state,
        pid=model.pid,
        layout=info.layout if info else None,
        layout_reason=info.layout_reason if info else None,
        running=model.running,
        queued=model.queued,
        memory=None if model.memory is None else msgspec.convert(model.memory, MemoryHealth, from_attributes=True),
    )


def _json(value: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
