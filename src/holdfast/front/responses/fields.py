"""The fields of POST /v1/responses, the refusals of unsupported ones, and the generation request
they ask for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from holdfast.config import LimitsSettings
from holdfast.front.openai.fields import KNOWN, JsonSchemaFormat, SamplingFields
from holdfast.front.responses.answer import ResponseAnswer, ResponseObject, Shows, sampling_fields
from holdfast.front.responses.compaction import CompactionAnswer, summary_request, summary_seal
from holdfast.front.responses.items import (
    Input,
    InputItem,
    asks_for_compaction,
    conversation,
    items_of,
)
from holdfast.front.responses.tools import (
    OfferedTools,
    ResponseToolChoice,
    ResponseTools,
    choice_of,
    missing,
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

# features of OpenAI's own service
_HOSTED = ("prompt", "context_management", "moderation", "access_programs", "image")
_RENAMED = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "system": "instructions",
    "verbosity": "text.verbosity",
}
UNSUPPORTED = UnsupportedFields(
    neutral={
        **KNOWN,
        **dict.fromkeys((*_HOSTED, *_RENAMED), ([], {})),
        **dict.fromkeys(("stop", "functions"), ([], "")),
        "n": (1,),
        "logprobs": (False,),
    },
    reasons={
        **dict.fromkeys(_HOSTED, "this is a part of OpenAI's own service"),
        **{name: f"the field is called `{other}` here" for name, other in _RENAMED.items()},
        "n": "a response has one answer",
        "stop": "the Responses API has no stop strings",
        "functions": "the field is called `tools` here",
        "function_call": "the field is called `tool_choice` here",
        "logprobs": 'ask for `include`: ["message.output_text.logprobs"]',
    },
)
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
# fields of a function that the response shows although the request left them out
_FUNCTION: Mapping[str, Any] = dict.fromkeys(("description", "parameters", "strict"))
_REPEATED = {
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
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ResponseMetadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class TextFormat(JsonSchemaFormat):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(BaseModel):
    """The format of the visible text."""

    model_config = STRICT

    format: TextFormat | None = Field(None, description="Text or JSON.")
    verbosity: Annotated[str, Field(max_length=20)] | None = Field(
        None, description="Accepted, without effect."
    )

    def output_format(self) -> OutputFormat | None:
        """The format to enforce; None: any text. Raises RequestRefused if a schema is missing."""
        given = self.format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return OutputFormat(kind="json_object", field="text.format")
        field = "text.format.schema"
        if given.schema_ is None:
            raise missing(field)
        return OutputFormat(kind="json_schema", schema=given.schema_, field=field)


class ResponseReasoning(ReasoningOptions):
    """Whether and how much to think, and how thoughts are shown."""

    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None,
        description="Show thoughts as summary instead of as content; it is the whole thought.",
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Older name of summary."
    )


class ResponseStreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class ConversationName(BaseModel):
    """A conversation by its id."""

    model_config = STRICT

    id: Annotated[str, Field(min_length=1)]


ConversationField = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag(ONE)]
    | Annotated[ConversationName, Tag(MANY)],
    Discriminator(lambda value: ONE if isinstance(value, str) else MANY),
]


class ResponseRequest(SamplingFields):
    """Items to answer."""

    input: Input | None = Field(
        None, description="A text, or the conversation as items, oldest first."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = Field(
        None, description="Maximum number of tokens to generate, thoughts included."
    )
    tools: ResponseTools | None = Field(None, description="The tools that the model may call.")
    tool_choice: ResponseToolChoice | None = Field(
        None, description="Whether the model may, must or must not call tools, and which."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call in an answer."
    )
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Limits hosted tools, of which there are none: no effect."
    )
    reasoning: ResponseReasoning | None = Field(
        None, description="How much to think first, and how thoughts are shown."
    )
    text: TextOptions | None = Field(None, description="The format of the answer.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None,
        description=f"What to add: {_SEALED}, {_LOGPROBS}. Other values concern hosted tools and add nothing.",
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Number of most likely tokens to list at each position."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Accepted; an input that is too long is refused either way."
    )
    store: bool | None = Field(
        None, description="False: the response is not stored and cannot be retrieved."
    )
    previous_response_id: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Continue a stored response: its input and output come first, without its instructions.",
    )
    conversation: ConversationField | None = Field(
        None, description="Continue a conversation; input and output are added to it."
    )
    background: bool | None = Field(
        None, description="Answer at once, and generate the response in the background."
    )
    metadata: ResponseMetadata | None = Field(None, description="Repeated in the response.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, without effect.")
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="Accepted, without effect."
    )
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")

    def plan(
        self, services: Services, *, session_key: str, before: Sequence[InputItem]
    ) -> AnswerPlan:
        """What to generate, and the form of the answer. Raises RequestRefused naming the field.

        before: the items that this input continues.
        """
        self.refuse_what_cannot_be_served(services.limits)
        offered = offered_tools(self.tools or (), limits=services.limits)
        response = self._response(services)
        form_type = ResponseAnswer
        seal = services.seal
        if asks_for_compaction(items_of(self.input)):
            form_type = CompactionAnswer
            seal = summary_seal(seal, response.model)
        form = form_type(response, tools=offered, shows=self._shows(), seal=seal.close)
        request = self.request(services, form.id, offered=offered, before=before)
        return self.plan_of([request], form, session_key=session_key)

    def request(
        self,
        services: Services,
        request_id: str,
        *,
        offered: OfferedTools,
        before: Sequence[InputItem],
    ) -> GenerationRequest:
        """What to generate. Raises RequestRefused."""
        items = [*before, *items_of(self.input)]
        compacts = asks_for_compaction(items)
        if compacts:
            items.pop()
        if not items:
            raise missing("input")
        model = model_of(services, self.model)
        messages = conversation(
            items,
            instructions=self.instructions,
            unseal=services.seal.open,
            open_summary=summary_seal(services.seal, model).open,
            earlier=len(before),
        )
        parallel = self.parallel_tool_calls is not False
        request = GenerationRequest(
            request_id=request_id,
            model=model,
            prompt=ChatPrompt(
                messages=messages, tools=offered.definitions, tool_fields=offered.fields
            ),
            max_tokens=self.max_output_tokens,
            want_logprobs=self._shows().logprobs,
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
        """The id of the conversation that it continues."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named

    @property
    def stores(self) -> bool:
        """Whether the response is to be stored."""
        return self.store is not False

    def refuse_what_cannot_be_served(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for what the field types alone allow."""
        UNSUPPORTED.refuse(self.model_extra)
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.conversation_id and self.previous_response_id:
            reason = "`previous_response_id` is not allowed together with `conversation`"
            raise RequestRefused(reason, field="previous_response_id")
        if self.background and not self.stores:
            raise RequestRefused(
                "`background` needs `store`: the response could not be retrieved",
                field="background",
            )

    def _shows(self) -> Shows:
        included = self.include or ()
        reasoning = self.reasoning
        return Shows(
            logprobs=_LOGPROBS in included or bool(self.top_logprobs),
            sealed_thoughts=_SEALED in included,
            summaries=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
        )

    def _response(self, services: Services) -> ResponseObject:
        """The response object before anything is generated."""
        said = self.model_dump(mode="json", include=_REPEATED, by_alias=True, exclude_unset=True)
        given = {name: value for name, value in said.items() if value is not None}
        if "tools" in given:
            given["tools"] = [
                {**_FUNCTION, **tool} if tool["type"] == "function" else tool
                for tool in given["tools"]
            ]
        text = {"format": {"type": "text"}, **given.pop("text", {})}
        return ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            status="queued" if self.background else "in_progress",
            store=self.stores,
            conversation={"id": self.conversation_id} if self.conversation_id else None,
            created_at=int(time.time()),
            model=model_of(services, self.model),
            text=text,
            **sampling_fields(self.sampling()),
            **given,
        )
