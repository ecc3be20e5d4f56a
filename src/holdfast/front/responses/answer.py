"""The answer of POST /v1/responses: the response object and its numbered events.

The whole answer is their fold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.front.openai.answers import content_logprobs
from holdfast.front.responses.output_items import (
    Event,
    ItemStatus,
    OutputItem,
    WrittenCall,
    WrittenCustomCall,
    WrittenItem,
    WrittenMessage,
    WrittenSummary,
    WrittenThought,
)
from holdfast.front.responses.tools import OfferedTools
from holdfast.front.server.answers import (
    KEEP_ALIVE_COMMENT,
    AnswerFormat,
    Explanation,
    TokenCounts,
    WholeChoice,
)
from holdfast.front.server.problem import Problem
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.wire.requests import SamplingParams

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
# code of a problem → the code that clients of the Responses API act upon
_FAILURES: Mapping[str, str] = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
    "model_unavailable": "server_is_overloaded",
    "request_too_large_for_memory": "invalid_prompt",
}


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0  # cache writes are not charged


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the output tokens."""

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
    """A response at one moment. From `instructions` on, it repeats the request."""

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
    truncation: Literal["disabled"] = "disabled"  # nothing is ever cut from an input
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


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream; its other fields depend on its type."""

    type: str
    sequence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What the client wants to see besides the text."""

    logprobs: bool = False
    sealed_thoughts: bool = False  # thoughts also as encrypted_content
    summaries: bool = False  # thoughts as summary instead of as content


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters as fields of a response object."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


class ResponseAnswer(AnswerFormat):
    """AnswerFormat of a response.

    seal: makes the encrypted_content of a thought.
    record: called with each event and its number, in a whole answer too, except for repeated status
        events. At the
        last event `response` is final.
    """

    def __init__(
        self,
        response: ResponseObject,
        *,
        tools: OfferedTools,
        shows: Shows,
        seal: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.response = response  # as it stands; final from the last event on
        self.record: Callable[[int, bytes], None] = lambda number, event: None
        # by item id: thoughts that their item does not show as content
        self.hidden_thoughts: dict[str, str] = {}
        self._tools = tools
        self._shows = shows
        self._seal = seal
        self._done: list[OutputItem] = []
        self._now: WrittenItem | None = None
        self._next_number = 0
        self._told_status = ""
        self._end: EndWord = "stop"

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    def sampled_by(self, sampling: SamplingParams) -> None:
        """Show the sampling parameters in use, the model's defaults included."""
        self._change(**sampling_fields(sampling))

    def keep_alive(self) -> bytes:
        """`response.in_progress` or `response.queued` again: clients count events, not bytes."""
        return self._created() + self._status_event()

    def keep_alive_of_follower(self) -> bytes:
        """A comment: an event has a number, and only one of the followers would see it."""
        return KEEP_ALIVE_COMMENT

    def opening(self, *, prompt_tokens: int) -> bytes:
        """The events before the first item."""
        begun = self._created()
        if self.response.status == "queued":
            if self._told_status != "queued":
                begun += self._status_event()
            self._change(status="in_progress")
        return begun + self._status_event()

    def delta(self, event: OutputDelta) -> bytes:
        """The events of text, reasoning and calls."""
        if isinstance(event, TextDelta):
            return self._text(event) if event.text or event.logprobs else b""
        if isinstance(event, ToolCallStarted):
            tool = self._tools.client_tool(event.name)
            kind = WrittenCustomCall if tool.is_custom else WrittenCall
            closed = self._closed(_status_before_next(self._now))
            return closed + self._added(kind(id=self._new_id(kind), call_id=event.id, tool=tool))
        if isinstance(self._now, WrittenCall):
            if isinstance(event, ToolArgumentsDelta):
                return self._item_events(self._now, self._now.more(event.text))
            if isinstance(event, ToolCallFinished):
                return self._closed("completed")
        return b""

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of the last item."""
        return self._finished(event.finish_reason)

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The last event, with the final response object."""
        self._conclude(counts, explanation)
        return self._event(self.response.status, response=self.response)

    def broken(self, problem: Problem) -> bytes:
        """The last event of a response that failed."""
        begun = self._created()
        default = "server_error" if problem.status >= 500 else "invalid_prompt"
        code = _FAILURES.get(problem.code, default)
        self._end_as("failed", error=ResponseFailure(code=code, message=problem.message))
        return begun + self._event("failed", response=self.response)

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The final response object, made by the same events."""
        self.opening(prompt_tokens=counts.prompt_tokens)
        for delta in choices[0].deltas:
            self.delta(delta)
        self._finished(choices[0].finish_reason)
        self.closing(counts, explanation)
        return msgspec.json.encode(self.response)

    def cancel(self) -> None:
        """End the response as it is.

        The API has no event for that, so the last one says incomplete.
        """
        self._end_as("cancelled")
        self._event("incomplete", response=self.response)

    def _text(self, event: TextDelta) -> bytes:
        kind: type[WrittenItem] = WrittenThought
        if event.kind == "text":
            kind = WrittenMessage
        elif self._shows.summaries:
            kind = WrittenSummary
        item = self._now
        begun = b""
        if type(item) is not kind:
            closed = self._closed(_status_before_next(item))
            item = kind(id=self._new_id(kind))
            begun = closed + self._added(item)
        shows_logprobs = self._shows.logprobs and event.kind == "text"
        logprobs = content_logprobs(event.logprobs) if shows_logprobs else ()
        return begun + self._item_events(item, item.more(event.text, logprobs))

    def _finished(self, end: EndWord) -> bytes:
        self._end = end
        return self._closed("incomplete" if end == "length" else _status_before_next(self._now))

    def _conclude(self, counts: TokenCounts, explanation: Explanation | None) -> None:
        usage = ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens),
            total_tokens=counts.prompt_tokens + counts.completion_tokens,
        )
        changes: dict[str, Any] = {"usage": usage}
        if explanation is not None:
            changes["holdfast"] = explanation
        if self._end == "length":
            self._end_as("incomplete", incomplete_details=IncompleteDetails(), **changes)
        else:
            self._end_as("completed", completed_at=int(time.time()), **changes)

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        if self._now is not None:
            self._done.append(self._now.item("incomplete"))
            self._now = None
        self._change(status=status, output=tuple(self._done), **changes)

    def _change(self, **changes: Any) -> None:
        self.response = msgspec.structs.replace(self.response, **changes)

    def _new_id(self, kind: type[WrittenItem]) -> str:
        return f"{kind.id_prefix}_{self.id.removeprefix('resp_')}{len(self._done):02x}"

    def _added(self, item: WrittenItem) -> bytes:
        self._now = item
        added = self._event(
            "output_item.added", output_index=len(self._done), item=item.item("in_progress")
        )
        return added + self._item_events(item, item.beginning())

    def _closed(self, status: ItemStatus) -> bytes:
        """End the current item, if there is one.

        A call that was cut off gets no `done` event: some clients would run it.
        """
        item = self._now
        self._now = None
        if item is None:
            return b""
        if isinstance(item, WrittenThought):
            if isinstance(item, WrittenSummary):
                self.hidden_thoughts[item.id] = item.text
            if self._shows.sealed_thoughts:
                item.sealed = self._seal(item.text)
        is_told = status == "completed" or not isinstance(item, WrittenCall)
        events = self._item_events(item, item.ending()) if is_told else b""
        whole = item.item(status)
        if is_told:
            events += self._event("output_item.done", output_index=len(self._done), item=whole)
        self._done.append(whole)
        return events

    def _item_events(self, item: WrittenItem, events: Sequence[Event]) -> bytes:
        place = {"item_id": item.id, "output_index": len(self._done)}
        return b"".join([self._event(kind, **place, **fields) for kind, fields in events])

    def _created(self) -> bytes:
        if self._next_number:
            return b""
        return self._event("created", response=self.response)

    def _status_event(self) -> bytes:
        status = self.response.status
        is_news = status != self._told_status
        self._told_status = status
        return self._event(status, is_news, response=self.response)

    def _event(self, kind: str, is_recorded: bool = True, /, **fields: Any) -> bytes:
        """An event. Numbers count from 0, over recorded and other events."""
        number = self._next_number
        self._next_number += 1
        data = msgspec.json.encode(
            {"type": f"response.{kind}", "sequence_number": number, **fields}
        )
        event = b"event: response.%b\ndata: %b\n\n" % (kind.encode(), data)
        if is_recorded:
            self.record(number, event)
        return event


def _status_before_next(item: WrittenItem | None) -> ItemStatus:
    """The status of an item when another one follows. A complete call was closed before."""
    return "incomplete" if isinstance(item, WrittenCall) else "completed"
