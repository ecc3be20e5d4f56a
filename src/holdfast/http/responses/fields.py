"""The fields of a Responses request, and what they come to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from holdfast.config import LimitsSettings
from holdfast.http.openai.fields import SamplingFields
from holdfast.http.responses.answer import ResponseAnswer, Shows
from holdfast.http.responses.formats import TextOptions
from holdfast.http.responses.items import Input, InputItem, Unseal, conversation, items_of
from holdfast.http.responses.shapes import ResponseObject
from holdfast.http.responses.tools import OfferedTools, ResponseToolChoice, ResponseTools, choice_of, offered_tools
from holdfast.http.responses.unsupported import UNSUPPORTED
from holdfast.http.server.answers import AnswerPlan
from holdfast.http.server.fields import STRICT, MaxTokens, refuse_above
from holdfast.http.server.problem import RequestRefused
from holdfast.http.server.services import Services, first_model
from holdfast.http.server.thinking import ReasoningOptions, thinking_of
from holdfast.messages.requests import ChatPrompt, GenerationRequest

_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_MOST_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseReasoning(ReasoningOptions):
    """Whether and how much to think, and how thoughts are shown."""

    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Show thoughts as summary instead of as they are; it is the whole thought."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Older name of summary.")


class ResponseStreamOptions(BaseModel):
    """What a stream carries."""

    model_config = STRICT

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class ResponseRequest(SamplingFields):
    """Items to be answered."""

    input: Input | None = Field(None, description="A text, or the conversation as items, oldest first.")
    instructions: str | None = Field(None, description="Goes before the input as a system message.")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = Field(None, description="Most tokens to generate, thoughts included.")
    tools: ResponseTools | None = Field(None, description="What the model may call.")
    tool_choice: ResponseToolChoice | None = Field(None, description="Whether it may, must or must not, and which of them.")
    parallel_tool_calls: bool | None = Field(None, description="False: one call in an answer at most.")
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Of hosted tools, of which there are none: accepted, without effect."
    )
    reasoning: ResponseReasoning | None = Field(None, description="How much to think first, and how that is shown.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description=f"What to add: {_SEALED}, {_LOGPROBS}. Others are about hosted tools and add nothing."
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(None, description="So many of the likeliest at each token's place.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Accepted; an input that is too long is refused either way."
    )
    store: bool | None = Field(None, description="Accepted, without effect.")
    background: Literal[False] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MOST_METADATA)] | None = Field(
        None, description="Told again in the response."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")

    def plan(self, services: Services, *, unseal: Unseal, session_key: str = "", before: Sequence[InputItem] = ()) -> AnswerPlan:
        """What to generate and how to answer. Raises RequestRefused naming the field that cannot be served.

        unseal: of thoughts that were sealed. before: the items that this input goes on from.
        """
        self.refuse_what_cannot_be_served(services.limits)
        offered = offered_tools(self.tools or (), limits=services.limits)
        form = ResponseAnswer(self.response(services), tools=offered, shows=self.shows())
        request = self.request(services, form.id, offered=offered, unseal=unseal, before=before)
        return self.plan_of([request], form, session_key=session_key)

    def request(
        self, services: Services, request_id: str, *, offered: OfferedTools, unseal: Unseal, before: Sequence[InputItem] = ()
    ) -> GenerationRequest:
        """What to generate. Raises RequestRefused."""
        parallel = self.parallel_tool_calls is not False
        return GenerationRequest(
            request_id=request_id,
            model=self.model or first_model(services),
            prompt=self.prompt_of(offered, unseal=unseal, before=before),
            max_tokens=self.max_output_tokens,
            want_logprobs=self.shows().logprobs,
            top_logprobs=self.top_logprobs or 0,
            tool_choice=choice_of(self.tool_choice, offered=offered, parallel=parallel),
            thinking=thinking_of(said={"reasoning": self.reasoning}),
            output_format=self.text.output_format() if self.text is not None else None,
            prompt_field="input",
            **self.request_options(),
        )

    def prompt_of(self, offered: OfferedTools, *, unseal: Unseal, before: Sequence[InputItem] = ()) -> ChatPrompt:
        """The conversation to be answered. Raises RequestRefused for items that cannot be served, or none."""
        items = [*before, *items_of(self.input)]
        if not items:
            raise RequestRefused("`input` is required", code="missing_required_parameter", field="input")
        messages = conversation(items, instructions=self.instructions, unseal=unseal)
        return ChatPrompt(messages=messages, tools=offered.definitions)

    def shows(self) -> Shows:
        """What the client wants to see beside the text."""
        included, reasoning = self.include or (), self.reasoning
        return Shows(
            logprobs=_LOGPROBS in included or bool(self.top_logprobs),
            sealed_thoughts=_SEALED in included,
            summaries=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
        )

    def response(self, services: Services) -> ResponseObject:
        """The response object before anything has been generated: what the request said, told again."""
        told = self.model_dump(mode="json", include=_TOLD, by_alias=True, exclude_unset=True)
        given = {name: value for name, value in told.items() if value is not None}
        if self.parallel_tool_calls is None:
            given["parallel_tool_calls"] = True
        text = {"format": {"type": "text"}, **given.pop("text", {})}
        return ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=self.model or first_model(services),
            text=text,
            **given,
        )

    def refuse_what_cannot_be_served(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for what the types alone cannot tell."""
        UNSUPPORTED.refuse(self.model_extra)
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")


_TOLD = {
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "reasoning",
    "text",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
