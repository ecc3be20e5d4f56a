"""Anthropic's dialect: its operations and its list of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from holdfast.front.anthropic.answer import STATUSES, MessagesError, anthropic_error
from holdfast.front.anthropic.messages import count_message_tokens, create_message
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.dialect import Dialect, ModelShapes


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """One served model."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None  # null where it is not known before it is loaded
    max_tokens: int | None
    state: str  # that of /health


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models, on one page."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def _list(models: Sequence[ModelStatus]) -> AnthropicModelList:
    shown = [_model(model) for model in models]
    return AnthropicModelList(
        data=shown, first_id=shown[0].id if shown else None, last_id=shown[-1].id if shown else None
    )


def _model(model: ModelStatus) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC),
        max_input_tokens=model.context_tokens,
        max_tokens=model.context_tokens,
        state=model.state,
    )


ANTHROPIC_MODELS = ModelShapes(
    many_type=AnthropicModelList, one_type=AnthropicModel, many=_list, one=_model
)


ANTHROPIC = Dialect(
    name="Anthropic's Messages API",
    error=anthropic_error,
    error_shape=MessagesError,
    prefixes=("/v1/messages", "/v1/complete"),
    is_spoken=lambda headers: "anthropic-version" in headers,
    models=ANTHROPIC_MODELS,
    statuses=STATUSES,
    serves="Anthropic's messages: /v1/messages",
    operations=(create_message, count_message_tokens),
)
