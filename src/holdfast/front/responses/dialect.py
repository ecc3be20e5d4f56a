"""OpenAI's Responses API, which Codex and the newer SDKs speak, and the list of models in Codex'
form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.openai.endpoints import ModelCard, model_card
from holdfast.front.responses.create import (
    compact_response,
    count_input_tokens,
    create_response,
    is_codex,
)
from holdfast.front.responses.stored import OPERATIONS
from holdfast.front.server.dialect import Dialect, ModelShapes

_INSTRUCTIONS = (  # Codex has its own for the models that it knows
    "You are Codex, a coding agent in the user's terminal. Do what the user asks in the current "
    "folder: look at files before you change them, change no more than is asked, run what you have "
    "changed, and go on until the task is done. Use the tools for all of that, and tell the user "
    "in a few words what you have done."
)


class CodexReasoningLevel(msgspec.Struct, frozen=True, kw_only=True):
    """A reasoning effort that a user of Codex may choose."""

    effort: str
    description: str


class CodexTruncation(msgspec.Struct, frozen=True, kw_only=True):
    """The longest tool output that Codex passes on; Codex' own default."""

    mode: Literal["bytes", "tokens"] = "tokens"
    limit: int = 10_000


class CodexModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in Codex' form. Codex rejects the whole list if a field is missing."""

    slug: str
    display_name: str
    description: str | None = None
    supported_reasoning_levels: tuple[CodexReasoningLevel, ...] = tuple(
        CodexReasoningLevel(effort=effort, description=f"{effort} effort")
        for effort in ("low", "medium", "high")
    )
    shell_type: str = "unified_exec"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    upgrade: None = None
    base_instructions: str = _INSTRUCTIONS
    supports_reasoning_summaries: bool = True
    support_verbosity: bool = False
    default_verbosity: None = None
    apply_patch_tool_type: str = "freeform"
    truncation_policy: CodexTruncation = CodexTruncation()
    supports_parallel_tool_calls: bool = True
    context_window: int | None
    experimental_supported_tools: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ("text",)


class CodexModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models, in OpenAI's form and in Codex'."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[CodexModel]


def _models(models: Sequence[ModelStatus]) -> CodexModelList:
    shown = [
        CodexModel(
            slug=model.id,
            display_name=model.id,
            priority=place,
            context_window=model.context_tokens,
        )
        for place, model in enumerate(models)
    ]
    return CodexModelList(data=[model_card(model) for model in models], models=shown)


RESPONSES = Dialect(
    name="OpenAI's Responses API",
    error=openai_error,
    error_shape=ErrorBody,
    is_spoken=is_codex,
    models=ModelShapes(
        many_type=CodexModelList,
        one_type=ModelCard,
        many=_models,
        one=model_card,
        is_on=lambda server: server.codex_models,
    ),
    prefixes=("/v1/responses", "/v1/conversations"),
    serves="OpenAI's Responses: /v1/responses, /v1/conversations",
    operations=(create_response, compact_response, count_input_tokens, *OPERATIONS),
)
