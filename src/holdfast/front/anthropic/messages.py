"""POST /v1/messages and /v1/messages/count_tokens, and Anthropic's list of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.anthropic.answer import (
    STATUSES,
    MessageAnswer,
    MessageEvent,
    MessagesAnswer,
    MessagesError,
    TokenCount,
    anthropic_error,
)
from holdfast.front.anthropic.conversation import (
    CacheControl,
    Conversation,
    Message,
    MessagesTool,
    MessagesToolChoice,
    SystemPrompt,
    Turn,
    choice_of,
    referenced_tools,
    shown_tools,
)
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.prompt.limits import MAX_STOP_CHARACTERS
from holdfast.front.request import (
    GenerationRequest,
    OutputFormat,
    Thinking,
    new_request_id,
    sampling_options,
)
from holdfast.front.server.access import Seal
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.server.context import RequestContext, context_of
from holdfast.front.server.dialect import Dialect, ModelShapes, operation
from holdfast.front.server.fields import (
    INT32_MAX,
    STRICT,
    EffortWord,
    MaxTokens,
    ReasoningOptions,
    SharedFields,
    UnsupportedFields,
    optional,
    refuse_too_many,
    sampled,
    thinking_of,
)
from holdfast.front.server.generation import generation_response
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import invalid_field, missing_field
from holdfast.front.server.request import json_response, parse, read_json
from holdfast.front.server.services import Services, model_of

# accepted fields without effect on the prompt
_WITHOUT_EFFECT = frozenset(
    "metadata service_tier speed inference_geo context_management safeguards diagnostics betas "
    "user_profile_id workspace_id billing_policy fallback_credit_token "
    # the next line is needed for requests that only count tokens
    "fallbacks max_tokens stream stop_sequences temperature top_p top_k compaction".split()
)
_NOT_SERVED = UnsupportedFields(
    neutral={**dict.fromkeys(("container", "mcp_servers"), ([], {}, "")), "thread": ()},
    reasons={"thread": "this server keeps no threads; send the whole conversation each time"},
)
_NOT_ANSWERED = UnsupportedFields(  # in requests that only count tokens, they are ignored
    neutral={"compaction": ()},
    reasons={
        "compaction": (
            "this server does not support compaction here; ask for a summary in a message, or use "
            "/v1/responses/compact"
        )
    },
)
_MOST_BREAKPOINTS = 4
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class ThinkingField(BaseModel):
    """Whether to think, and how thinking is shown."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="Whether to think."
    )
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Maximum number of tokens for thinking."
    )
    block_binding: dict[str, Any] | None = optional(
        "Accepted, but has no effect: thoughts from other conversations are left out."
    )
    display: str | None = optional(
        "omitted: thinking blocks have no text, only a signature that contains the text."
    )


class JsonOutput(BaseModel):
    """An answer in JSON that matches a schema."""

    model_config = STRICT

    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] = Field(
        alias="schema", description="The schema that the answer must match."
    )


class OutputConfig(BaseModel):
    """How much to think, and the format of the answer."""

    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "How much to think, if thinking is on."
    )
    format: JsonOutput | None = optional("The format of the answer.")


class PromptFields(SharedFields):
    """The fields that form the prompt."""

    session_headers = ("x-claude-code-session-id",)
    model: Annotated[str, Field(min_length=1)] = Field(description="Id of a model in /v1/models.")
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far, oldest first."
    )
    system: SystemPrompt | None = optional("The system message.")
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = optional(
        "The tools that the model may call."
    )
    tool_choice: MessagesToolChoice | None = optional(
        "Whether the model may, must or must not call tools, and which tools."
    )
    thinking: ThinkingField | None = optional("Whether to think first; default: not to think.")
    output_config: OutputConfig | None = optional(
        "How much to think, and the format of the answer."
    )
    cache_control: CacheControl | None = optional("Cache the whole prompt.")
    output_format: JsonOutput | None = optional("Older name for output_config.format.")

    def request(self, context: RequestContext) -> GenerationRequest:
        """Return what to generate or count.

        Raises RequestRefused, which names the invalid field.
        """
        self._refuse_unsupported()
        tools = shown_tools(
            self.tools or (),
            referenced=referenced_tools([turn for _, turn in self._shown_turns()]),
            limits=context.services.limits,
        )
        conversation = self._conversation(context.seal)
        continues_answer = self._continues_answer(conversation.messages)
        prompt = conversation.prompt(tools, continue_last=continues_answer)
        return GenerationRequest(
            request_id=new_request_id("msg_"),
            model=model_of(context.services, self.model),
            prompt=prompt,
            tool_choice=choice_of(self.tool_choice, tools=tools),
            thinking=self._thinking(),
            output_format=self._output_format(),
            prompt_field="messages",
            **self.request_options(context),
        )

    def _conversation(self, seal: Seal) -> Conversation:
        """Return the messages of the prompt, and its cache breakpoints. Raises RequestRefused."""
        conversation = Conversation(seal=seal)
        for tool in self.tools or ():
            conversation.mark_breakpoint(tool, messages=0)
        if self.system:
            conversation.add_system(self.system)
        for index, turn in self._shown_turns():
            conversation.add_turn(turn, f"messages.{index}.content")
        conversation.mark_breakpoint(
            {"cache_control": self.cache_control}, messages=len(conversation.messages)
        )
        if (count := len(conversation.breakpoints)) > _MOST_BREAKPOINTS:
            raise invalid_field(
                "cache_control", f"at most {_MOST_BREAKPOINTS} blocks may have it, got {count}"
            )
        return conversation

    def _shown_turns(self) -> Iterator[tuple[int, Turn]]:
        """Iterate over the turns that the model reads, each with its index. Raises RequestRefused.

        A system message may apply to a single user turn, or contain only a configuration.
        """
        last_user = max(
            (index for index, turn in enumerate(self.messages) if turn["role"] == "user"), default=0
        )
        for index, turn in enumerate(self.messages):
            is_system = turn["role"] == "system"
            config = turn.get("output_config") or {}
            if config.get("format") is not None or (config and not is_system):
                field = f"messages.{index}.output_config" + (".format" if is_system else "")
                raise invalid_field(
                    field, "this field is allowed only at the top level of the request"
                )
            if is_system and turn.get("clear_at") == "next_user_message" and index < last_user:
                continue
            if "content" in turn:
                yield index, turn
            elif not config:
                raise missing_field(f"messages.{index}.content")

    def _refuse_unsupported(self) -> None:
        """Raise RequestRefused for fields that neither an answer nor a token count may have."""
        extras = (self.model_extra or {}).items()
        _NOT_SERVED.refuse({name: value for name, value in extras if name not in _WITHOUT_EFFECT})

    def _continues_answer(self, messages: list[Message]) -> bool:
        """Whether the last message is an answer that the model should continue.

        An empty answer is removed from `messages`. Raises RequestRefused if the answer cannot be
        continued.
        """
        field = f"messages.{len(self.messages) - 1}.content"
        if not messages:
            raise invalid_field(field, "it contains nothing that a model can read")
        last_message = messages[-1]
        if self.messages[-1]["role"] != "assistant":
            return False
        if last_message.get("tool_calls"):
            raise invalid_field(field, "the results of this turn's tool calls are missing")
        text: str = last_message["content"]
        if text != text.rstrip():
            raise invalid_field(field, "an answer to continue must not end with white space")
        if not text and len(messages) > 1:
            messages.pop()
        return bool(text)

    def _thinking(self) -> Thinking:
        """Return the thinking settings. As with Anthropic's models, thinking is off by default."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return Thinking(effort="off")
        effort = self._effort_of_turn() or (
            self.output_config.effort if self.output_config else None
        )
        reasoning = ReasoningOptions(effort=effort, enabled=True, max_tokens=thinking.budget_tokens)
        return thinking_of(values={"reasoning": reasoning})

    def _effort_of_turn(self) -> EffortWord | None:
        """The effort that a message after the last answer asks for; None if none does."""
        for turn in reversed(self.messages):
            if turn["role"] == "assistant":
                break
            effort: EffortWord | None = (turn.get("output_config") or {}).get("effort")
            if effort is not None:
                return effort
        return None

    def _output_format(self) -> OutputFormat | None:
        """The format to enforce, from the newer field or the older one; None: any text."""
        newer_field = self.output_config.format if self.output_config else None
        if (json_output := newer_field or self.output_format) is None:
            return None
        field = "output_config.format.schema" if newer_field else "output_format.schema"
        return OutputFormat(kind="json_schema", schema=json_output.schema_, field=field)


class MessagesRequest(PromptFields):
    """A request to answer a conversation."""

    max_tokens: MaxTokens = Field(
        description="Maximum number of tokens to generate, including thoughts; 0: only prefill."
    )
    stream: bool | None = optional("Send the answer as server-sent events while it is generated.")
    stop_sequences: Annotated[list[StopSequence], Field(fail_fast=True)] | None = optional(
        "Strings that end the answer. The answer does not include them."
    )
    temperature: float | None = sampled("temperature", le=1)
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k")
    metadata: dict[str, Any] | None = optional("Accepted, but has no effect.")

    def plan(self, context: RequestContext) -> GenerationPlan:
        """Return what to generate, and the format of the answer.

        Raises RequestRefused, which names the invalid field.
        """
        _NOT_ANSWERED.refuse(
            {
                name: value
                for name, value in (self.model_extra or {}).items()
                if name == "compaction"
            }
        )
        max_stop_strings = context.services.limits.max_stop_strings
        refuse_too_many(self.stop_sequences or (), max_stop_strings, field="stop_sequences")
        request = self.request(context)
        answer_format = MessagesAnswer(
            answer_id=request.request_id,
            model=request.model,
            seal=context.seal,
            max_tokens=self.max_tokens,
            hides_thinking=self.thinking is not None and self.thinking.display == "omitted",
        )
        return [request], answer_format

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.stream)

    def request_options(self, context: RequestContext) -> dict[str, Any]:
        """Return the fields of a GenerationRequest that do not concern the prompt."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {
            "max_tokens": self.max_tokens,
            **sampling_options(sampling),
            "stop": tuple(dict.fromkeys(self.stop_sequences or ())),
            **super().request_options(context),
        }


class CountTokensRequest(PromptFields):
    """A request to count the tokens of a conversation. Accepts fields that affect only answers."""

    def request_options(self, context: RequestContext) -> dict[str, Any]:
        """Return only the tenant: a count belongs to no session."""
        return {"tenant": context.tenant}


@operation(
    "POST",
    "/v1/messages",
    accepts(MessagesRequest),
    returns(MessageAnswer, chunk=MessageEvent),
    summary="chat (Anthropic)",
)
async def create_message(request: Request, services: Services) -> Response:
    """Answer a conversation."""
    return await generation_response(request, services, partial(parse, MessagesRequest))


@operation("POST", "/v1/messages/count_tokens", accepts(CountTokensRequest), returns(TokenCount))
async def count_message_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of the prompt."""
    body = await read_json(request, CountTokensRequest, services.limits)
    context = context_of(request, services, cache_salt=body.cache_salt)
    encoded = await services.gateway.encode(body.request(context))
    return json_response(TokenCount(input_tokens=len(encoded.token_ids)))


class AnthropicModel(Struct, frozen=True, kw_only=True):
    """A served model."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None  # the context that fits the memory for KV; null while unknown
    max_tokens: int | None
    max_context_length: (
        int | None
    )  # Holdfast's own field: the context that the model was trained for
    state: str  # as in /health


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    """All served models, on one page."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def _model_list(models: Sequence[ModelStatus]) -> AnthropicModelList:
    entries = [_anthropic_model(model) for model in models]
    first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
    return AnthropicModelList(data=entries, first_id=first, last_id=last)


def _anthropic_model(model: ModelStatus) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC),
        max_input_tokens=model.context_tokens,
        max_tokens=model.context_tokens,
        max_context_length=model.own_context_tokens,
        state=model.state,
    )


ANTHROPIC = Dialect(
    name="Anthropic's Messages API",
    error=anthropic_error,
    error_shape=MessagesError,
    prefixes=("/v1/messages", "/v1/complete"),
    matches_headers=lambda headers: "anthropic-version" in headers,
    models=ModelShapes(
        many_type=AnthropicModelList,
        one_type=AnthropicModel,
        many=_model_list,
        one=_anthropic_model,
    ),
    statuses=STATUSES,
    serves="Anthropic's messages: /v1/messages",
    operations=(create_message, count_message_tokens),
)
