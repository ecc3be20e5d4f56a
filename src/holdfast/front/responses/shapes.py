"""The Responses API's answers as structs: the response object and the items of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.front.openai.answers import ContentLogprob
from holdfast.front.server.answers import Explanation

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """A thought as the model thought it."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A thought where the client asked for a summary: the whole of it."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Visible text of the answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText] = ()


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """A thought. `encrypted_content` is it again, sealed, for clients that bring their history
    along.
    """

    id: str
    summary: Sequence[SummaryText] = ()
    content: Sequence[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: ItemStatus


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of a function. `arguments`: JSON text."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: ItemStatus


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a tool that takes a text."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str
    status: ItemStatus


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """A summary of the conversation so far, sealed, for clients that bring it back instead."""

    id: str
    encrypted_content: str


OutputItem: TypeAlias = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CompactionItem
)


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the input's tokens were."""

    cached_tokens: int
    cache_write_tokens: int = 0  # what is written is never charged apart


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the output's tokens were."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Exact token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it stands at some moment.

    What the request said is told again, from `instructions` on.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970, as completed_at
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: Sequence[OutputItem] = ()
    usage: ResponseUsage | None = None
    instructions: str | Sequence[Any] | None = None
    tools: Sequence[Any] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    reasoning: Any = None
    text: Any = None
    truncation: Literal["disabled"] = "disabled"  # nothing is ever left out of an input
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool = False
    store: bool = False
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    user: str | None = None
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a conversation: the messages of its user, and one compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int  # seconds since 1970
    output: Sequence[Any]
    usage: ResponseUsage


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; which further fields it has depends on its type."""

    type: str
    sequence_number: int


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
