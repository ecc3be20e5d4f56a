"""What Codex wants to be told in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import PromptTooLong
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.dialect import ModelCard, model_card
from holdfast.front.server.answers import AnswerFormat
from holdfast.front.server.dialect import ModelShapes
from holdfast.front.server.problem import problem_of, record_problem
from holdfast.telemetry.request_log import RECORD

_NAME = "codex"
_INSTRUCTIONS = (  # in place of those that Codex has for models it knows
    "You are Codex, a coding agent in the user's terminal. Do what the user asks in the current "
    "folder: look at files before you "
    "change them, change no more than is asked, run what you have changed, and go on until the "
    "task is done. Use the tools for "
    "all of that, and tell the user in a few words what you have done."
)


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from Codex."""
    return any(
        headers.get(name, "").lower().startswith(_NAME) for name in ("originator", "user-agent")
    )


class OverflowInStream(Response):
    """A streamed answer whose input may turn out to be too long, which is then told within the
    stream.

    Codex makes a conversation shorter when a response has failed for this reason; a status of 400
    only ends its turn.
    """

    def __init__(self, answer: Response, form: AnswerFormat) -> None:
        super().__init__()
        self._answer, self._form = answer, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or a stream that says that it failed."""
        try:
            await self._answer(scope, receive, send)
        except PromptTooLong as error:  # so nothing has been sent
            problem = problem_of(error)
            record_problem(scope[RECORD], problem, error)
            failed = Response(self._form.broken(problem), media_type=self._form.stream_type)
            await failed(scope, receive, send)


class CodexReasoningLevel(msgspec.Struct, frozen=True, kw_only=True):
    """How much thought a user of Codex may ask for."""

    effort: str
    description: str


class CodexTruncation(msgspec.Struct, frozen=True, kw_only=True):
    """How long an output of a tool Codex passes on."""

    mode: Literal["bytes", "tokens"] = "tokens"
    limit: int = 10_000  # as Codex has it of itself


class CodexModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as Codex wants to know it. It takes none of the list if one field is missing."""

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
    """All served models, as OpenAI lists them and as Codex does."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[CodexModel]


def _list(models: Sequence[ModelStatus]) -> CodexModelList:
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


CODEX_MODELS = ModelShapes(
    many_type=CodexModelList,
    one_type=ModelCard,
    many=_list,
    one=model_card,
    is_on=lambda server: server.codex_models,
)
