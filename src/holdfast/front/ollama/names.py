"""Models as Ollama's clients name them (`demo` and `demo:latest` are the same), and what they can
do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

from holdfast.errors import UnknownModel, WorkerUnavailable
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.fields import STRICT
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services, model_of, served_models

Capability: TypeAlias = Literal["completion", "tools", "thinking"]
_LATEST = ":latest"
_HUB = re.compile(r"^(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_LONGEST_SHOWN = 100


def shown_name(model_id: str) -> str:
    """A served id as Ollama lists models: with a tag, without which some clients do not find again
    what they read here.
    """
    return model_id if ":" in model_id.rpartition("/")[2] else model_id + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """The names by which a model may be known here that a client calls so."""
    return tuple(
        spelled
        for own in dict.fromkeys((name, _HUB.sub("", name)))
        for spelled in (own, own.removesuffix(_LATEST), own + _LATEST)
    )


def named_entry(name: str, services: Services) -> CatalogEntry | None:
    """The model of the catalog that has this very name or alias; `server.model_aliases` do not
    count.
    """
    find = services.catalog().find
    return next((entry for known in spellings(name) if (entry := find(known)) is not None), None)


def hub_name(name: str) -> str:
    """A name as the Hub has it."""
    return _HUB.sub("", name).removesuffix(_LATEST)


def digest_of(model_id: str) -> str:
    """What tells the names of models apart; not their weights."""
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()


def served_model(name: str | None, services: Services) -> ModelStatus:
    """The model that is meant; the first one by no name.

    Raises RequestRefused (404) with the words that clients look for.
    """
    models = {model.id: model for model in served_models(services)}
    wanted = name or model_of(services, None)
    for known in spellings(wanted):
        if (meant := model_of(services, known)) in models:
            return models[meant]
    raise not_found(wanted)


def not_found(name: str) -> RequestRefused:
    """The error for a model that is not here, with the words that clients look for."""
    message = (
        f"model {json.dumps(name[:_LONGEST_SHOWN], ensure_ascii=False)} not found, try pulling it "
        "first"
    )
    return RequestRefused(message, status=404, code="model_not_found", field="model")


class NamedModel(BaseModel):
    """Which model is meant."""

    model_config = STRICT

    model: str | None = Field(
        None, description="A served model, with or without :latest, or owner/name of the Hub."
    )
    name: str | None = Field(None, description="Older name of model.")

    def required(self) -> str:
        """The name. Raises RequestRefused for none."""
        if not (name := self.model or self.name):
            raise RequestRefused(
                "`model` is required", code="missing_required_parameter", field="model"
            )
        return name


async def learn_capabilities(model_id: str, services: Services) -> None:
    """Have the files of a model read that say what it can do, if nobody has needed them yet."""
    if model_id not in services.dialects:
        # they are broken: nothing is known of it
        with contextlib.suppress(UnknownModel, WorkerUnavailable):
            await services.tokenizer_of(model_id)


def capabilities(model_id: str, services: Services) -> tuple[Capability, ...]:
    """What a served model can do.

    Not said: that it makes embeddings, of which `ollama run` takes that it does nothing else.
    """
    report = services.dialects.get(model_id)
    can: dict[Capability, bool] = {
        "completion": True,
        "tools": report is not None and report.tools != "none",
        "thinking": report is not None and report.thinking is not None,
    }
    return tuple(name for name, holds in can.items() if holds)
