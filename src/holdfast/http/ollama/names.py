"""Models as Ollama's clients name them (`demo` and `demo:latest` are the same), and what they can do."""

from __future__ import annotations

import contextlib
import json
from typing import Literal, TypeAlias

from holdfast.errors import UnknownModel, WorkerUnavailable
from holdfast.http.server.problem import RequestRefused
from holdfast.http.server.services import Services, model_of, served_models
from holdfast.residency.residency import ModelStatus

Capability: TypeAlias = Literal["completion", "tools", "thinking"]
_LATEST = ":latest"
_LONGEST_SHOWN = 100


def shown_name(model_id: str) -> str:
    """A served id as Ollama lists models: with a tag, without which some clients do not find again what they read here."""
    return model_id if ":" in model_id.rpartition("/")[2] else model_id + _LATEST


def served_model(name: str | None, services: Services) -> ModelStatus:
    """The model that is meant; the first one by no name. Raises RequestRefused (404) with the words that clients look for."""
    models = {model.id: model for model in served_models(services)}
    wanted = name or model_of(services, None)
    for known in (wanted, wanted.removesuffix(_LATEST), wanted + _LATEST):
        if (meant := model_of(services, known)) in models:
            return models[meant]
    message = f"model {json.dumps(wanted[:_LONGEST_SHOWN], ensure_ascii=False)} not found, try pulling it first"
    raise RequestRefused(message, status=404, code="model_not_found", field="model")


async def learn_capabilities(model_id: str, services: Services) -> None:
    """Have the files of a model read that say what it can do, if nobody has needed them yet."""
    if model_id not in services.dialects:
        with contextlib.suppress(UnknownModel, WorkerUnavailable):  # they are broken: nothing is known of it
            await services.tokenizer_of(model_id)


def capabilities(model_id: str, services: Services) -> tuple[Capability, ...]:
    """What a served model can do. Not said: that it makes embeddings, of which `ollama run` takes that it does nothing else."""
    report = services.dialects.get(model_id)
    can: dict[Capability, bool] = {
        "completion": True,
        "tools": report is not None and report.tools != "none",
        "thinking": report is not None and report.thinking is not None,
    }
    return tuple(name for name, holds in can.items() if holds)
