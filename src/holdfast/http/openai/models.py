"""Models as OpenAI shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.http.server.dialect import ModelShapes
from holdfast.residency.residency import ModelStatus


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `state` is that of /health; `aliases` are further names that requests may use."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "holdfast"
    max_model_len: int | None = None  # vLLM's name for the context length; clients look for it
    state: str
    aliases: tuple[str, ...] = ()


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_card(model: ModelStatus) -> ModelCard:
    """A model as OpenAI shows it."""
    return ModelCard(
        id=model.id,
        created=model.created,
        max_model_len=model.context_tokens,
        state=model.state,
        aliases=model.aliases,
    )


def _list(models: Sequence[ModelStatus]) -> ModelList:
    return ModelList(data=[model_card(model) for model in models])


OPENAI_MODELS = ModelShapes(many_type=ModelList, one_type=ModelCard, many=_list, one=model_card)
