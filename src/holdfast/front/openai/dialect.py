"""OpenAI's dialect: its operations, its list of models, and the parts that are not served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.openai.chat import control_chat_completion, create_chat_completion
from holdfast.front.openai.completions import create_completion
from holdfast.front.openai.embeddings import create_embedding
from holdfast.front.server.dialect import Dialect, ModelShapes
from holdfast.models.context_window import planned_answer_tokens


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model, with its context length under the names that clients look for; null where it is
    not known before the load.

    max_model_len: vLLM's name for the context length. context_length: OpenRouter's.
    max_output_tokens: the longest answer to plan for; not a limit.
    state: that of /health. aliases: further names that requests may use.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "holdfast"
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    max_output_tokens: int | None = None
    state: str
    aliases: tuple[str, ...] = ()


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_card(model: ModelStatus) -> ModelCard:
    """A model as OpenAI shows it."""
    context_tokens = model.context_tokens
    return ModelCard(
        id=model.id,
        created=model.created,
        max_model_len=context_tokens,
        context_length=context_tokens,
        context_window=context_tokens,
        max_output_tokens=None if context_tokens is None else planned_answer_tokens(context_tokens),
        state=model.state,
        aliases=model.aliases,
    )


def _list(models: Sequence[ModelStatus]) -> ModelList:
    return ModelList(data=[model_card(model) for model in models])


OPENAI_MODELS = ModelShapes(many_type=ModelList, one_type=ModelCard, many=_list, one=model_card)
OPENAI = Dialect(
    name="OpenAI's API",
    error=openai_error,
    error_shape=ErrorBody,
    serves="OpenAI's /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models",
    operations=(
        create_chat_completion,
        control_chat_completion,
        create_completion,
        create_embedding,
    ),
    models=OPENAI_MODELS,
)
OTHER_PARTS = Dialect(
    name="This part of OpenAI's API",
    error=openai_error,
    prefixes=(
        "/v1/audio",
        "/v1/images",
        "/v1/moderations",
        "/v1/files",
        "/v1/batches",
        "/v1/assistants",
        "/v1/threads",
    ),
)
