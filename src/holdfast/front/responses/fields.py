"""The fields of a request for a Response, with their ranges; and those that are refused."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.front.openai.fields import KNOWN, SamplingFields
from holdfast.front.openai.structured_output import JsonSchemaFormat
from holdfast.front.responses.answer import ResponseAnswer, Shows, told_sampling, unheard
from holdfast.front.responses.compaction import (
    CompactionAnswer,
    asks_for_compaction,
    summary_request,
    summary_seal,
)
from holdfast.front.responses.items import Input, InputItem, conversation, items_of
from holdfast.front.responses.run import ResponseRun
from holdfast.front.responses.shapes import ResponseObject
from holdfast.front.responses.tools import (
    OfferedTools,
    ResponseToolChoice,
    ResponseTools,
    choice_of,
    offered_tools,
)
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.fields import (
    MANY,
    ONE,
    STRICT,
    MaxTokens,
    ReasoningOptions,
    UnsupportedFields,
    refuse_above,
    thinking_of,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services, model_of
from holdfast.wire.requests import ChatPrompt, GenerationRequest, OutputFormat

# parts of OpenAI's own service
_HOSTED = ("prompt", "context_management", "moderation", "access_programs", "image")
_CALLED_OTHERWISE = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "system": "instructions",
    "verbosity": "text.verbosity",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **KNOWN,
    **dict.fromkeys(_HOSTED, ([], {})),
    **dict.fromkeys(_CALLED_OTHERWISE, ([], {})),
    "n": (1,),
    **dict.fromkeys(("stop", "functions"), ([], "")),
    "logprobs": (False,),
}
_REASONS = {
    **dict.fromkeys(_HOSTED, "this is a part of OpenAI's own service"),
    **{name: f"the field is called `{other}` here" for name, other in _CALLED_OTHERWISE.items()},
    "n": "a response has one answer",
    "stop": "the Responses API has no stop strings",
    "functions": "the field is called `tools` here",
    "function_call": "the field is called `tool_choice` here",
    "logprobs": 'ask for `include`: ["message.output_text.logprobs"]',
}

UNSUPPORTED = UnsupportedFields(neutral=_NEUTRAL, reasons=_REASONS)
# what of a tool is told again even if it was not given
_FUNCTION = dict.fromkeys(("description", "parameters", "strict"))
_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_MOST_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ResponseMetadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MOST_METADATA)]


class TextFormat(JsonSchemaFormat):
    """Text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(BaseModel):
    """What the visible text of a response is to be."""

    model_config = STRICT

    format: TextFormat | None = Field(None, description="Its form: text, or JSON.")
    verbosity: Annotated[str, Field(max_length=20)] | None = Field(
        None, description="Accepted, without effect."
    )

    def output_format(self) -> OutputFormat | None:
        """The form that is asked for; None: any.

        Raises RequestRefused for a schema that is missing.
        """
        given = self.format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return OutputFormat(kind="json_object", field="text.format")
        field = "text.format.schema"
        if given.schema_ is None:
            raise RequestRefused(
                f"`{field}` is required", code="missing_required_parameter", field=field
            )
        return OutputFormat(kind="json_schema", schema=given.schema_, field=field)


class ResponseReasoning(ReasoningOptions):
    """Whether and how much to think, and how thoughts are shown."""

    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None,
        description="Show thoughts as summary instead of as they are; it is the whole thought.",
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Older name of summary."
    )


class ResponseStreamOptions(BaseModel):
    """What a stream carries."""

    model_config = STRICT

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class ConversationName(BaseModel):
    """Which conversation is meant."""

    model_config = STRICT

    id: Annotated[str, Field(min_length=1)]


def _text_or_object(value: Any) -> str:
    return ONE if isinstance(value, str) else MANY


ConversationField = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag(ONE)]
    | Annotated[ConversationName, Tag(MANY)],
    Discriminator(_text_or_object),
]


class ResponseRequest(SamplingFields):
    """Items to be answered."""

    input: Input | None = Field(
        None, description="A text, or the conversation as items, oldest first."
    )
    instructions: str | None = Field(None, description="Goes before the input as a system message.")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = Field(
        None, description="Most tokens to generate, thoughts included."
    )
    tools: ResponseTools | None = Field(None, description="What the model may call.")
    tool_choice: ResponseToolChoice | None = Field(
        None, description="Whether it may, must or must not, and which of them."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: one call in an answer at most."
    )
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Of hosted tools, of which there are none: accepted, without effect."
    )
    reasoning: ResponseReasoning | None = Field(
        None, description="How much to think first, and how that is shown."
    )
    text: TextOptions | None = Field(None, description="The form of the answer.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None,
        description=f"What to add: {_SEALED}, {_LOGPROBS}. Others are about hosted tools and add nothing.",
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="So many of the likeliest at each token's place."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Accepted; an input that is too long is refused either way."
    )
    store: bool | None = Field(
        None, description="False: the response is not kept, and cannot be asked for again."
    )
    previous_response_id: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Go on from a response that is kept: its input and output come first, not its instructions.",
    )
    conversation: ConversationField | None = Field(
        None, description="Go on from a conversation; input and output are added to it."
    )
    background: bool | None = Field(
        None, description="Answer at once, and make the response meanwhile."
    )
    metadata: ResponseMetadata | None = Field(None, description="Told again in the response.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="Accepted, without effect."
    )
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")

    def plan(
        self,
        services: Services,
        *,
        session_key: str = "",
        before: Sequence[InputItem] = (),
        run: ResponseRun | None = None,
    ) -> AnswerPlan:
        """What to generate and how to answer.

        Raises RequestRefused naming the field that cannot be served.

        before: the items that this input goes on from. run: hears the events.
        """
        self.refuse_what_cannot_be_served(services.limits)
        offered = offered_tools(self.tools or (), limits=services.limits)
        hear = unheard if run is None else run.hear
        response = self.response(services)
        kind = ResponseAnswer
        seal = services.seal
        if asks_for_compaction(items_of(self.input)):
            kind = CompactionAnswer
            seal = summary_seal(seal, response.model)
        form = kind(response, tools=offered, shows=self.shows(), seal=seal.close, hear=hear)
        if run is not None:
            run.told_by(form)
        request = self.request(services, form.id, offered=offered, before=before)
        return self.plan_of([request], form, session_key=session_key)

    def request(
        self,
        services: Services,
        request_id: str,
        *,
        offered: OfferedTools,
        before: Sequence[InputItem] = (),
    ) -> GenerationRequest:
        """What to generate. Raises RequestRefused, also where there is nothing to answer."""
        items, parallel = [*before, *items_of(self.input)], self.parallel_tool_calls is not False
        compacts = asks_for_compaction(items)
        if compacts:
            items.pop()
        if not items:
            raise RequestRefused(
                "`input` is required", code="missing_required_parameter", field="input"
            )
        model = model_of(services, self.model)
        messages = conversation(
            items,
            instructions=self.instructions,
            unseal=services.seal.open,
            open_summary=summary_seal(services.seal, model).open,
            earlier=len(before),
        )
        request = GenerationRequest(
            request_id=request_id,
            model=model,
            prompt=ChatPrompt(
                messages=messages, tools=offered.definitions, tool_fields=offered.fields
            ),
            max_tokens=self.max_output_tokens,
            want_logprobs=self.shows().logprobs,
            top_logprobs=self.top_logprobs or 0,
            tool_choice=choice_of(self.tool_choice, offered=offered, parallel=parallel),
            thinking=thinking_of(said={"reasoning": self.reasoning}),
            output_format=self.text.output_format() if self.text is not None else None,
            prompt_field="input",
            **self.request_options(),
        )
        return summary_request(request) if compacts else request

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation that it goes on from."""
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationName)
            else self.conversation
        )

    def shows(self) -> Shows:
        """What the client wants to see beside the text."""
        included, reasoning = self.include or (), self.reasoning
        return Shows(
            logprobs=_LOGPROBS in included or bool(self.top_logprobs),
            sealed_thoughts=_SEALED in included,
            summaries=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
        )

    def response(self, services: Services) -> ResponseObject:
        """The response object before anything has been generated: what the request said, told
        again.
        """
        told = self.model_dump(mode="json", include=_TOLD, by_alias=True, exclude_unset=True)
        given = {name: value for name, value in told.items() if value is not None}
        if self.parallel_tool_calls is None:
            given["parallel_tool_calls"] = True
        if "tools" in given:
            given["tools"] = [
                _FUNCTION | tool if tool["type"] == "function" else tool for tool in given["tools"]
            ]
        text = {"format": {"type": "text"}, **given.pop("text", {})}
        return ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            status="queued" if self.background else "in_progress",
            store=self.store is not False,
            conversation={"id": self.conversation_id} if self.conversation_id else None,
            created_at=int(time.time()),
            model=model_of(services, self.model),
            text=text,
            **told_sampling(self.sampling()),
            **given,
        )

    def refuse_what_cannot_be_served(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for what the types alone cannot tell."""
        UNSUPPORTED.refuse(self.model_extra)
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.conversation_id and self.previous_response_id:
            reason = "`previous_response_id` is not allowed together with `conversation`"
            raise RequestRefused(reason, field="previous_response_id")
        if self.background and self.store is False:
            raise RequestRefused(
                "`background` needs `store`: nobody could ask for the response", field="background"
            )


_TOLD = {
    "previous_response_id",
    "background",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "max_output_tokens",
    "top_logprobs",
    "reasoning",
    "text",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
