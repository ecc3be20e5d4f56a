"""The answer of POST /v1/responses: the response object, its output items and its numbered events.

An answer that is not streamed is built from the same events. The answer to a request to compact a
conversation has one item: an encrypted summary, which the client sends back in place of the
conversation.
"""

from __future__ import annotations

import abc
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.front.openai.answer import ContentLogprob, content_logprobs
from holdfast.front.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    OutputEvent,
    TextDelta,
    TokenCounts,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.responses.fields import ClientTool, OfferedTools, Shows
from holdfast.front.responses.items import kind_of, stored_input
from holdfast.front.server.answers import KEEP_ALIVE_COMMENT, AnswerFormat
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Advice, Problem, RequestRefused
from holdfast.wire.requests import SamplingParams

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Event: TypeAlias = tuple[str, Mapping[str, Any]]  # type without the prefix `response.`, and fields
# code of a problem → code that clients of the Responses API react to
_FAILURES: Mapping[str, str] = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
    "model_unavailable": "server_is_overloaded",
    "request_too_large_for_memory": "invalid_prompt",
}
_INPUT_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# regular expressions of JSON escapes: the first and the second half of a surrogate pair; and what
# may follow a first half that has no second one
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
# matches the part of a JSON string that can already be decoded: up to the closing quote, or up to
# an escape that has not arrived completely
_DECODABLE = re.compile(
    rf'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_HIGH}(?:{_LOW}|{_NO_LOW}))*+'
)


class _Tagged(Struct, frozen=True, tag_field="type"):
    """A JSON object whose `type` is determined by its class."""


class OutputText(_Tagged, frozen=True, kw_only=True, tag="output_text"):
    """A text part of a message."""

    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(_Tagged, frozen=True, kw_only=True, tag="reasoning_text"):
    """The text of a thought (reasoning)."""

    text: str


class SummaryText(_Tagged, frozen=True, kw_only=True, tag="summary_text"):
    """A complete thought, for clients that asked for a summary."""

    text: str


class MessageItem(_Tagged, frozen=True, kw_only=True, tag="message"):
    """A message: visible text of the answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText] = ()


class ReasoningItem(_Tagged, frozen=True, kw_only=True, tag="reasoning"):
    """A thought. `encrypted_content` is an encrypted copy, for clients that send it back later."""

    id: str
    summary: Sequence[SummaryText] = ()
    content: Sequence[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus


class FunctionCallItem(_Tagged, frozen=True, kw_only=True, tag="function_call"):
    """A call of a function. `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    # of the tool, as the client declared it; `model_name` joins it and the name
    namespace: str | UnsetType = UNSET
    arguments: str
    status: ItemStatus


class CustomCallItem(_Tagged, frozen=True, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, whose only argument is a text."""

    id: str
    call_id: str
    name: str
    # of the tool, as the client declared it; `model_name` joins it and the name
    namespace: str | UnsetType = UNSET
    input: str
    status: ItemStatus


class CompactionItem(_Tagged, frozen=True, kw_only=True, tag="compaction"):
    """An encrypted summary of the conversation so far. Clients send it back in place of the
    conversation.
    """

    id: str
    encrypted_content: str


OutputItem: TypeAlias = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CompactionItem
)


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """Details of the input tokens.

    truncated_tokens, truncated_messages: those left out of an input that did not fit; absent if
        nothing was. These tokens are not counted in the input tokens.
    """

    cached_tokens: int
    cache_write_tokens: int = 0  # cache writes cost nothing here
    truncated_tokens: int | UnsetType = UNSET
    truncated_messages: int | UnsetType = UNSET


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Exact token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct, frozen=True, kw_only=True):
    """Why a response failed, and advice for the client."""

    code: str
    message: str
    advice: Advice


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The current state of a response. The fields from `instructions` on repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970, as in completed_at
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None  # null until it is complete
    error: ResponseFailure | None = None  # null unless it failed
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: Sequence[OutputItem] = ()  # empty until it has ended
    usage: ResponseUsage | None = None  # null until it has ended
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
    truncation: Literal["auto", "disabled", "middle"] = "disabled"
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool = False
    store: bool = False
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    user: str | None = None
    holdfast: Explanation | UnsetType = UNSET


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream. Which other fields it has depends on its type."""

    type: str
    sequence_number: int


class CompactedResponse(Struct, frozen=True, kw_only=True):
    """The replacement for a conversation: its user messages and one compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int  # seconds since 1970
    output: Sequence[Any]
    usage: ResponseUsage


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters as fields of a response object."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


class ResponseAnswer(AnswerFormat):
    """The AnswerFormat of the Responses API.

    An item is a part of the output: a message, a thought or a call. It is built while its deltas
    arrive, and is open until the next item begins.

    seal: encrypts a thought for `encrypted_content`.
    record: called with the number and bytes of each event, even if the answer is not streamed, but
        not for repeated status events. When it is called for the last event, `response` is final.
    """

    def __init__(
        self,
        response: ResponseObject,
        *,
        tools: OfferedTools,
        shows: Shows,
        seal: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.response = response  # the current state; final once the last event was created
        self.record: Callable[[int, bytes], None] = lambda number, event: None
        # item id → thought, for thoughts that are not shown in the content of their item
        self.hidden_thoughts: dict[str, str] = {}
        self._tools = tools
        self._shows = shows
        self._seal = seal
        self._finished_items: list[OutputItem] = []
        # the item that is being generated; None: between two items
        self._open_item: _ItemBuilder | None = None
        self._next_number = 0  # sequence number of the next event
        self._sent_status = ""  # status in the last status event, which keep-alives repeat
        self._end: EndWord = "stop"  # why the last choice ended

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    def set_sampling(self, sampling: SamplingParams) -> None:
        """Show the sampling parameters that are used, including the model's defaults."""
        self._change(**sampling_fields(sampling))

    def keep_alive(self) -> bytes:
        """Repeat the status event, because clients ignore comments and give up without events."""
        return self._created_event() + self._status_event()

    def follower_keep_alive(self) -> bytes:
        """Return a comment, because an event would have a number, but reach only one client."""
        return KEEP_ALIVE_COMMENT

    def stream_start(self, *, prompt_tokens: int) -> bytes:
        """Return the events before the first item."""
        events = self._created_event()
        if self.response.status == "queued":
            if self._sent_status != "queued":
                events += self._status_event()
            self._change(status="in_progress")
        return events + self._status_event()

    def delta_event(self, event: OutputDelta) -> bytes:
        """Return the events for text, reasoning and calls."""
        if isinstance(event, TextDelta):
            return self._text_events(event) if event.text or event.logprobs else b""
        if isinstance(event, ToolCallStarted):
            tool = self._tools.client_tool(event.name)
            item_type = _CustomCallBuilder if tool.is_custom else _CallBuilder
            end_events = self._end_item(_status_before_next(self._open_item))
            return end_events + self._begin_item(
                item_type(self._new_id(item_type), call_id=event.id, tool=tool)
            )
        if isinstance(self._open_item, _CallBuilder):
            if isinstance(event, ToolArgumentsDelta):
                return self._item_events(self._open_item, self._open_item.append_text(event.text))
            if isinstance(event, ToolCallFinished):
                return self._end_item("completed")
        return b""

    def choice_end(self, event: ChoiceFinished) -> bytes:
        self._end = event.finish_reason
        is_cut = self._end == "length"
        empty_message = b""
        if not self._finished_items and self._open_item is None:
            # else a later request would continue the conversation without the assistant's turn
            empty_message = self._begin_item(_MessageBuilder(self._new_id(_MessageBuilder)))
        status = "incomplete" if is_cut else _status_before_next(self._open_item)
        return empty_message + self._end_item(status)

    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """Return the last event, with the final response object."""
        usage = ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=counts.cached_tokens, **counts.truncated_fields()
            ),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens),
            total_tokens=counts.total_tokens,
        )
        changes: dict[str, Any] = {"usage": usage}
        if explanation is not None:
            changes["holdfast"] = explanation
        if self._end == "length":
            self._end_as("incomplete", incomplete_details=IncompleteDetails(), **changes)
        else:
            self._end_as("completed", completed_at=int(time.time()), **changes)
        return self._event(self.response.status, response=self.response)

    def error_event(self, problem: Problem) -> bytes:
        created_event = self._created_event()
        default_code = "server_error" if problem.status >= 500 else "invalid_prompt"
        code = _FAILURES.get(problem.code, default_code)
        failure = ResponseFailure(code=code, message=problem.message, advice=problem.advice)
        self._end_as("failed", error=failure)
        return created_event + self._event("failed", response=self.response)

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """Return the final response object, built from the same events."""
        self.stream_start(prompt_tokens=counts.prompt_tokens)
        for event in events:
            self.event_bytes(event)
        self.stream_end(counts, explanation)
        return msgspec.json.encode(self.response)

    def cancel(self) -> None:
        """End the response in its current state.

        The API lacks an event for cancellation, so the last event says `incomplete`.
        """
        self._end_as("cancelled")
        self._event("incomplete", response=self.response)

    def _text_events(self, event: TextDelta) -> bytes:
        """Return the events for text or reasoning, which may begin a new item."""
        item_type: type[_ItemBuilder] = _ThoughtBuilder
        if event.kind == "text":
            item_type = _MessageBuilder
        elif self._shows.summaries:
            item_type = _SummaryBuilder
        item = self._open_item
        item_start = b""
        if type(item) is not item_type:
            end_events = self._end_item(_status_before_next(item))
            item = item_type(self._new_id(item_type))
            item_start = end_events + self._begin_item(item)
        shows_logprobs = self._shows.logprobs and event.kind == "text"
        logprobs = content_logprobs(event.logprobs) if shows_logprobs else ()
        return item_start + self._item_events(item, item.append_text(event.text, logprobs))

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        """Make the response final. changes: further fields of the response object."""
        if self._open_item is not None:
            self._finished_items.append(self._open_item.to_item("incomplete"))
            self._open_item = None
        self._change(status=status, output=tuple(self._finished_items), **changes)

    def _change(self, **changes: Any) -> None:
        self.response = msgspec.structs.replace(self.response, **changes)

    def _new_id(self, item_type: type[_ItemBuilder]) -> str:
        """The id of the next item: the response's id and the item's index, in hexadecimal."""
        return (
            f"{item_type.id_prefix}_{self.id.removeprefix('resp_')}{len(self._finished_items):02x}"
        )

    def _begin_item(self, item: _ItemBuilder) -> bytes:
        """Make the item the open one, and return the events that announce it."""
        self._open_item = item
        added = self._event(
            "output_item.added",
            output_index=len(self._finished_items),
            item=item.to_item("in_progress"),
        )
        return added + self._item_events(item, item.part_events("added"))

    def _end_item(self, status: ItemStatus) -> bytes:
        """End the current item, if there is one.

        A call that was cut off gets no `done` event, because some clients would run it.
        """
        item = self._open_item
        self._open_item = None
        if item is None:
            return b""
        if isinstance(item, _ThoughtBuilder):
            if isinstance(item, _SummaryBuilder):
                self.hidden_thoughts[item.id] = item.text
            if self._shows.sealed_thoughts:
                item.sealed = self._seal(item.text)
        is_shown = status == "completed" or not isinstance(item, _CallBuilder)
        events = self._item_events(item, item.end_events()) if is_shown else b""
        finished_item = item.to_item(status)
        if is_shown:
            events += self._event(
                "output_item.done", output_index=len(self._finished_items), item=finished_item
            )
        self._finished_items.append(finished_item)
        return events

    def _item_events(self, item: _ItemBuilder, events: Sequence[Event]) -> bytes:
        """Return the bytes of an item's events, with the fields that tell which item it is."""
        item_fields = {"item_id": item.id, "output_index": len(self._finished_items)}
        return b"".join([self._event(kind, **item_fields, **fields) for kind, fields in events])

    def _created_event(self) -> bytes:
        """Return the first event; empty if it was created already."""
        if self._next_number:
            return b""
        return self._event("created", response=self.response)

    def _status_event(self) -> bytes:
        """Return an event with the current status. It is recorded only if the status is new."""
        status = self.response.status
        is_new = status != self._sent_status
        self._sent_status = status
        return self._event(status, is_new, response=self.response)

    def _event(self, kind: str, is_recorded: bool = True, /, **fields: Any) -> bytes:
        """Return an event. Numbers count from 0 over all events, recorded or not."""
        number = self._next_number
        self._next_number += 1
        data = msgspec.json.encode(
            {"type": f"response.{kind}", "sequence_number": number, **fields}
        )
        event = b"event: response.%b\ndata: %b\n\n" % (kind.encode(), data)
        if is_recorded:
            self.record(number, event)
        return event


class CompactionAnswer(ResponseAnswer):
    """AnswerFormat of a response whose only item is a compaction item."""

    # the conversation, if the answer becomes a CompactedResponse that replaces it
    replaces: Sequence[Mapping[str, Any]] | None = None

    def delta_event(self, event: OutputDelta) -> bytes:
        """Collect the summary. Thoughts are dropped."""
        if not isinstance(event, TextDelta) or event.kind != "text" or not event.text:
            return b""
        item = self._open_item
        item_start = b""
        if item is None:
            item = _CompactionBuilder(self._new_id(_CompactionBuilder), seal=self._seal)
            item_start = self._begin_item(item)
        item.pieces.append(event.text)
        return item_start

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """Return the response object or the CompactedResponse."""
        body = super().complete_body(events, counts, explanation)
        if self.replaces is None:
            return body
        response = self.response
        assert response.usage is not None, "a response that has ended has its usage"
        messages = [item for item in self.replaces if kind_of(item) == "message"]
        user_messages = [item for item in messages if item.get("role") == "user"]
        compacted = CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[*stored_input(user_messages), *response.output],
            usage=response.usage,
        )
        return msgspec.json.encode(compacted)

    def choice_end(self, event: ChoiceFinished) -> bytes:
        """Return the events that end the summary.

        Raises RequestRefused if the model wrote no summary.
        """
        if self._open_item is None or not self._open_item.text.strip():
            reason = "the model wrote no summary; try again, or keep the conversation unchanged"
            raise RequestRefused(reason, status=422, code="empty_summary")
        return self._end_item("completed")  # a summary that was cut off at the limit is still used

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        self._open_item = None  # part of a summary must not replace a conversation
        super()._end_as(status, **changes)


def _status_before_next(item: _ItemBuilder | None) -> ItemStatus:
    """The status that the current item gets when another item begins.

    A call that is still current has been cut off, because complete calls are closed at their end.
    """
    return "incomplete" if isinstance(item, _CallBuilder) else "completed"


class _ItemBuilder(abc.ABC):
    """An output item while it is generated, and the events that add to it.

    Some items consist of parts; here, they have only one, which contains the text.
    """

    id_prefix: ClassVar[str]
    text_event: ClassVar[str] = ""  # event type for deltas and for the whole text
    text_key: ClassVar[str] = "text"  # name of the field with the whole text in its last event
    part_event: ClassVar[str] = ""  # event type for the part; empty if the item has no parts
    index: ClassVar[Mapping[str, int]] = {}  # field with the index of the part

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abc.abstractmethod
    def to_item(self, status: ItemStatus) -> OutputItem:
        """Return the item in its current state."""

    def part(self) -> Any:
        """Return the part that contains the text so far."""
        return None

    def part_events(self, change: Literal["added", "done"]) -> list[Event]:
        """Return the event for the beginning or the end of the part, if the item has parts."""
        if not self.part_event:
            return []
        return [(f"{self.part_event}.{change}", {**self.index, "part": self.part()})]

    def append_text(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """Return the events for more text."""
        if not text and not logprobs:
            return []
        self.pieces.append(text)
        return [(f"{self.text_event}.delta", {**self.index, "delta": text})]

    def end_events(self) -> list[Event]:
        """Return the events before `output_item.done`."""
        whole_text = {**self.index, self.text_key: self.text}
        return [(f"{self.text_event}.done", whole_text), *self.part_events("done")]


class _MessageBuilder(_ItemBuilder):
    id_prefix = "msg"
    text_event = "output_text"
    part_event = "content_part"
    index: ClassVar[Mapping[str, int]] = {"content_index": 0}

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self._logprobs: list[Sequence[ContentLogprob]] = []

    def part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self._all_logprobs())

    def to_item(self, status: ItemStatus) -> MessageItem:
        content = () if status == "in_progress" else (self.part(),)
        return MessageItem(id=self.id, status=status, content=content)

    def append_text(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        if logprobs:
            self._logprobs.append(logprobs)
        events = super().append_text(text, logprobs)
        return [(kind, {**fields, "logprobs": logprobs}) for kind, fields in events]

    def end_events(self) -> list[Event]:
        (kind, whole_text), *others = super().end_events()
        return [(kind, {**whole_text, "logprobs": self._all_logprobs()}), *others]

    def _all_logprobs(self) -> list[ContentLogprob]:
        return list(itertools.chain.from_iterable(self._logprobs))


class _ThoughtBuilder(_ItemBuilder):
    """A thought that is shown as the content of its item."""

    id_prefix = "rs"
    text_event = "reasoning_text"
    part_event = "content_part"
    index: ClassVar[Mapping[str, int]] = {"content_index": 0}
    part_key: ClassVar[str] = "content"  # field of the item with the part
    sealed = ""  # `encrypted_content` of a complete thought; empty if not shown

    def part(self) -> ReasoningText | SummaryText:
        return ReasoningText(text=self.text)

    def to_item(self, status: ItemStatus) -> ReasoningItem:
        parts: dict[str, Any] = {self.part_key: ()}
        if status != "in_progress":
            parts = {self.part_key: (self.part(),)}
        return ReasoningItem(
            id=self.id, status=status, encrypted_content=self.sealed or UNSET, **parts
        )


class _SummaryBuilder(_ThoughtBuilder):
    """A thought that is shown as a summary, for clients that asked for one. It is not shortened."""

    text_event = "reasoning_summary_text"
    part_event = "reasoning_summary_part"
    index: ClassVar[Mapping[str, int]] = {"summary_index": 0}
    part_key = "summary"

    def part(self) -> SummaryText:
        return SummaryText(text=self.text)


class _CallBuilder(_ItemBuilder):
    id_prefix = "fc"
    text_event = "function_call_arguments"
    text_key = "arguments"

    def __init__(self, item_id: str, *, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id)
        self._tool = tool
        # the fields that do not change
        self._fixed_fields: dict[str, Any] = {
            "id": item_id,
            "call_id": call_id,
            "name": tool.name,
            "namespace": tool.namespace or UNSET,
        }

    def to_item(self, status: ItemStatus) -> OutputItem:
        return FunctionCallItem(arguments=self.text, status=status, **self._fixed_fields)

    def end_events(self) -> list[Event]:
        """Return the arguments, with the function's name."""
        return [(f"{self.text_event}.done", {"arguments": self.text, "name": self._tool.name})]


class _CustomCallBuilder(_CallBuilder):
    """A call of a custom tool. The model writes the tool's text input as JSON."""

    id_prefix = "ctc"
    text_event = "custom_tool_call_input"
    text_key = "input"

    def __init__(self, item_id: str, *, call_id: str, tool: ClientTool) -> None:
        super().__init__(item_id, call_id=call_id, tool=tool)
        self._decoder = CustomInput()

    def to_item(self, status: ItemStatus) -> CustomCallItem:
        return CustomCallItem(input=self.text, status=status, **self._fixed_fields)

    def append_text(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """Return the events for the text that can be decoded from the JSON so far."""
        return super().append_text(self._decoder.push(text))

    def end_events(self) -> list[Event]:
        """Return the events for the rest of the text and for the whole text."""
        last_delta = super().append_text(self._decoder.finish())
        return [*last_delta, *_ItemBuilder.end_events(self)]


class _CompactionBuilder(_ItemBuilder):
    """The compaction item. Its summary is not shown while it is being written."""

    id_prefix = "cmp"

    def __init__(self, item_id: str, *, seal: Callable[[str], str]) -> None:
        super().__init__(item_id)
        self._seal = seal

    def to_item(self, status: ItemStatus) -> CompactionItem:
        """Return the item. It contains the encrypted summary once the summary is complete."""
        sealed = "" if status == "in_progress" else self._seal(self.text)
        return CompactionItem(id=self.id, encrypted_content=sealed)

    def end_events(self) -> list[Event]:
        return []


class CustomInput:
    """Decodes the JSON arguments of a custom tool's call while they arrive.

    The results of `push` and `finish`, joined, are the call's `input`.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []  # fragments of JSON so far
        self._returned: list[str] = []  # texts returned so far
        self._undecoded = ""  # JSON that is not decoded yet
        self._is_in_text = False  # the beginning of the JSON, `{"input": "`, was read

    def push(self, fragment: str) -> str:
        """Return the text that another fragment of JSON adds."""
        self._arguments.append(fragment)
        self._undecoded += fragment
        if not self._is_in_text:
            opening = _INPUT_OPENING.match(self._undecoded)
            if opening is None:
                return ""
            self._is_in_text = True
            self._undecoded = self._undecoded[opening.end() :]
        match = _DECODABLE.match(self._undecoded)
        piece = match[0] if match else ""
        if not piece:
            return ""
        self._undecoded = self._undecoded[len(piece) :]
        return self._add_piece(json.loads(f'"{piece}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the text after the call has ended.

        Unexpected JSON is left unchanged.
        """
        arguments = "".join(self._arguments)
        try:
            decoded = json.loads(arguments, strict=False)
        except ValueError:
            decoded = None
        text = decoded.get("input") if isinstance(decoded, dict) else None
        if not isinstance(text, str):
            return "" if self._is_in_text else self._add_piece(arguments)
        returned = "".join(self._returned)
        text = _mended(text)
        return self._add_piece(text[len(returned) :]) if text.startswith(returned) else ""

    def _add_piece(self, text: str) -> str:
        text = _mended(text)
        self._returned.append(text)
        return text


def _mended(text: str) -> str:
    """Replace unpaired halves of surrogate pairs, which JSON cannot represent, with U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
