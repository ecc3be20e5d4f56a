"""POST /v1/messages and /v1/messages/count_tokens: what they take, and what that asks the gateway
for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings
from holdfast.front.anthropic.answer import MessageAnswer, MessageEvent, MessagesAnswer, TokenCount
from holdfast.front.anthropic.content import (
    CacheControl,
    Conversation,
    Message,
    SystemPrompt,
    Turn,
    referenced_tools,
)
from holdfast.front.anthropic.tools import MessagesTool, MessagesToolChoice, choice_of, shown_tools
from holdfast.front.prompt.limits import MAX_STOP_CHARACTERS
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import (
    INT32_MAX,
    STRICT,
    MaxTokens,
    ReasoningOptions,
    SharedFields,
    UnsupportedFields,
    thinking_of,
    within,
)
from holdfast.front.server.generation import generate
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, parse, read_body, tenant_in
from holdfast.front.server.services import Services, model_of, salted
from holdfast.wire.requests import (
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    SamplingParams,
    Thinking,
)

_SESSION_HEADER = "x-claude-code-session-id"
_WITHOUT_EFFECT = frozenset(
    "metadata service_tier speed inference_geo context_management safeguards diagnostics betas "
    "user_profile_id "
    # the last ones where tokens are counted
    "fallbacks max_tokens stream stop_sequences temperature top_p top_k".split()
)
_NOT_SERVED = UnsupportedFields(neutral=dict.fromkeys(("container", "mcp_servers"), ([], {}, "")))
_MOST_BREAKPOINTS = 4
_SAMPLING = ("temperature", "top_p", "top_k")
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class ThinkingField(BaseModel):
    """Whether to think, and what of it is shown."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="Whether to think."
    )
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="Most tokens of thought."
    )
    display: str | None = Field(
        None,
        description="omitted: blocks of thinking have a signature only, which carries the thought.",
    )


class JsonOutput(BaseModel):
    """JSON that fits a schema."""

    model_config = STRICT

    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] = Field(
        alias="schema", description="The schema that the answer has to fit."
    )


class OutputConfig(BaseModel):
    """How much to think, and the form of the answer."""

    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much to think, if at all."
    )
    format: JsonOutput | None = Field(None, description="The form of the answer.")


class PromptFields(SharedFields):
    """What the model is to read."""

    model: Annotated[str, Field(min_length=1)] = Field(
        description="Id of a model that /v1/models lists."
    )
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation, oldest first."
    )
    system: SystemPrompt | None = Field(None, description="What goes before the conversation.")
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = Field(
        None, description="What the model may call."
    )
    tool_choice: MessagesToolChoice | None = Field(
        None, description="Whether it may, must or must not, and which of them."
    )
    thinking: ThinkingField | None = Field(
        None, description="Whether the model is to think first; not, if left out."
    )
    output_config: OutputConfig | None = Field(
        None, description="How much to think, and the form of the answer."
    )
    cache_control: CacheControl | None = Field(None, description="Keep all of it.")
    output_format: JsonOutput | None = Field(
        None, description="Older name of output_config.format."
    )

    def request(self, services: Services, *, request_id: str, **options: Any) -> GenerationRequest:
        """What to generate, or to count.

        Raises RequestRefused naming the field that cannot be served.
        """
        self._refuse_unsupported()
        tools = shown_tools(
            self.tools or (), referenced=referenced_tools(self.messages), limits=services.limits
        )
        talk = self._conversation(services)
        is_continued = self._continues(talk.messages)
        prompt = ChatPrompt(
            messages=tuple(talk.messages),
            tools=tools.definitions,
            tool_fields=tools.schema_fields,
            found_tools=tools.found,
            continue_last=is_continued,
            cache_breakpoints=tuple(talk.breakpoints),
        )
        return GenerationRequest(
            request_id=request_id,
            model=model_of(services, self.model),
            prompt=prompt,
            tool_choice=choice_of(self.tool_choice, tools=tools),
            thinking=self._thinking(),
            output_format=self._output_format(),
            prompt_field="messages",
            **options,
        )

    def _conversation(self, services: Services) -> Conversation:
        talk = Conversation(seal=services.seal)
        for tool in self.tools or ():
            talk.mark(tool, messages=0)
        if self.system:
            talk.add_system(self.system)
        for place, turn in enumerate(self.messages):
            talk.add(turn, f"messages.{place}.content")
        talk.mark({"cache_control": self.cache_control}, messages=len(talk.messages))
        if len(talk.breakpoints) > _MOST_BREAKPOINTS:
            message = (
                f"`cache_control`: at most {_MOST_BREAKPOINTS} blocks may have it, got "
                f"{len(talk.breakpoints)}"
            )
            raise RequestRefused(message, field="cache_control")
        return talk

    def _refuse_unsupported(self) -> None:
        _NOT_SERVED.refuse(
            {
                name: value
                for name, value in (self.model_extra or {}).items()
                if name not in _WITHOUT_EFFECT
            }
        )

    def _continues(self, messages: list[Message]) -> bool:
        """Whether the conversation ends in an answer that is to be continued; an empty one is taken
        away.

        Raises RequestRefused for one that cannot be continued.
        """
        field = f"messages.{len(self.messages) - 1}.content"
        if not messages:
            raise RequestRefused(
                f"`{field}`: there is nothing in it that a model could read", field=field
            )
        last = messages[-1]
        if self.messages[-1]["role"] != "assistant":
            return False
        if last.get("tool_calls"):
            raise RequestRefused(
                f"`{field}`: the results of the calls in it are missing", field=field
            )
        text: str = last["content"]
        if text != text.rstrip():
            raise RequestRefused(
                f"`{field}`: an answer that is to be continued must not end with white space",
                field=field,
            )
        if not text and len(messages) > 1:
            messages.pop()
        return bool(text)

    def _thinking(self) -> Thinking:
        """Who does not ask for a thought gets none, where the model has a switch for it: so it is
        with Anthropic's models.
        """
        asked = self.thinking
        if asked is None or asked.type == "disabled":
            return Thinking(effort="off")
        effort = self.output_config.effort if self.output_config else None
        said = ReasoningOptions(effort=effort, enabled=True, max_tokens=asked.budget_tokens)
        return thinking_of(said={"reasoning": said})

    def _output_format(self) -> OutputFormat | None:
        new = self.output_config.format if self.output_config else None
        if (asked := new or self.output_format) is None:
            return None
        field = "output_config.format.schema" if new else "output_format.schema"
        return OutputFormat(kind="json_schema", schema=asked.schema_, field=field)


class MessagesRequest(PromptFields):
    """A conversation to be answered."""

    max_tokens: MaxTokens = Field(
        description="Most tokens to generate, those of thought included; 0: only read the prompt."
    )
    stream: bool | None = Field(
        None, description="Send the answer as server-sent events while it is made."
    )
    stop_sequences: Annotated[list[StopSequence], Field(fail_fast=True)] | None = Field(
        None, description="Strings that end the answer; they are not part of it."
    )
    temperature: Annotated[float, within("temperature", le=1)] | None = Field(
        None, description="0 takes the most likely token."
    )
    top_p: Annotated[float, within("top_p")] | None = Field(
        None, description="Draw from the likeliest tokens of this mass."
    )
    top_k: Annotated[int, within("top_k")] | None = Field(
        None, description="Draw from so many tokens; 0: off."
    )
    metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")

    def plan(self, services: Services, *, session_key: str = "") -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.
        """
        self._refuse_too_many_stops(services.limits)
        services = salted(services, self.cache_salt)
        form = MessagesAnswer(
            model=model_of(services, self.model),
            seal=services.seal,
            max_tokens=self.max_tokens,
            hides_thinking=self.thinking is not None and self.thinking.display == "omitted",
        )
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        request = self.request(
            services,
            request_id=form.id,
            max_tokens=self.max_tokens,
            sampling=SamplingParams(**given),
            unset_sampling=tuple(
                name for name in SamplingParams.__struct_fields__ if name not in given
            ),
            stop=tuple(dict.fromkeys(self.stop_sequences or ())),
        )
        return AnswerPlan(
            requests=[request],
            form=form,
            streams=bool(self.stream),
            **self.plan_options(session_key=session_key),
        )

    def _refuse_too_many_stops(self, limits: LimitsSettings) -> None:
        if len(self.stop_sequences or ()) > limits.max_stop_strings:
            raise RequestRefused(
                f"`stop_sequences`: at most {limits.max_stop_strings} strings",
                field="stop_sequences",
            )


class CountTokensRequest(PromptFields):
    """A conversation whose length is asked for.

    What only says how it would be answered is taken too.
    """


@operation(
    "POST",
    "/v1/messages",
    request_of(MessagesRequest),
    answers_of(MessageAnswer, chunk=MessageEvent),
    summary="chat (Anthropic)",
)
async def create_message(request: Request, services: Services) -> Response:
    """Answer a conversation."""
    key = request.headers.get(_SESSION_HEADER, "")
    return await generate(
        request, services, lambda body: parse(MessagesRequest, body).plan(services, session_key=key)
    )


@operation(
    "POST", "/v1/messages/count_tokens", request_of(CountTokensRequest), answers_of(TokenCount)
)
async def count_message_tokens(request: Request, services: Services) -> Response:
    """Tell how many tokens the model would read."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(CountTokensRequest, body)
    counted = asked.request(salted(services, asked.cache_salt), request_id="count")
    tenant = tenant_in(request, cache_salt=asked.cache_salt or "")
    encoded = await services.encode(msgspec.structs.replace(counted, tenant=tenant))
    return json_response(TokenCount(input_tokens=len(encoded.token_ids)))
