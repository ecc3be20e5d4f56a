"""The answer of POST /v1/responses, streamed and whole: the response object as it grows, and its
numbered events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.front.openai.chat import content_logprobs
from holdfast.front.responses.output_items import (
    Event,
    WrittenCall,
    WrittenCustomCall,
    WrittenItem,
    WrittenMessage,
    WrittenSummary,
    WrittenThought,
)
from holdfast.front.responses.shapes import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
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

_FAILURES: Mapping[str, str] = {  # code of a problem → the one that clients of Responses act upon
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
    "model_unavailable": "server_is_overloaded",
    "request_too_large_for_memory": "invalid_prompt",
}
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What a client wants to see of an answer beside its text."""

    logprobs: bool = False
    sealed_thoughts: bool = False  # thoughts also in a form that can be brought back
    summaries: bool = False  # thoughts as summary, not as they are


def told_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Fields of a response object."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def unheard(number: int, event: bytes) -> None:
    """What hears the events of a response that nobody comes back to."""


class ResponseAnswer(AnswerFormat):
    """AnswerFormat of a response.

    seal: makes of a thought what clients bring back. hear: is told each event with its number as it
    is made, also of a whole answer; at the last one `response` is final: completed, incomplete,
    failed or cancelled.
    """

    def __init__(
        self,
        response: ResponseObject,
        *,
        tools: OfferedTools,
        shows: Shows,
        seal: Callable[[str], str] = lambda _: "",
        hear: Callable[[int, bytes], None] = unheard,
    ) -> None:
        self._response, self._tools, self._shows, self._seal, self._hear = (
            response,
            tools,
            shows,
            seal,
            hear,
        )
        self._done: list[OutputItem] = []
        self._thoughts: dict[str, str] = {}  # by the id of the item
        self._now: WrittenItem | None = None
        self._next_number = 0
        self._end: EndWord = "stop"

    @property
    def id(self) -> str:
        """The response's."""
        return self._response.id

    @property
    def response(self) -> ResponseObject:
        """The response object as it stands: the final one from its last event on."""
        return self._response

    @property
    def thoughts(self) -> Mapping[str, str]:
        """The thoughts in the output, by the id of their item, however they are shown."""
        return self._thoughts

    def sampled_by(self, sampling: SamplingParams) -> None:
        """The response tells the sampling parameters that were used, whether they were asked for or
        are the model's own.
        """
        self._response = msgspec.structs.replace(self._response, **told_sampling(sampling))

    def keep_alive(self) -> bytes:
        """`response.in_progress` again, or `response.queued`: clients count events, not bytes."""
        return self._begun() + self._event(self._response.status, response=self._response)

    def keep_alive_of_follower(self) -> bytes:
        """A comment: an event would have a number, and only one of those who follow would get it."""
        return KEEP_ALIVE_COMMENT

    def opening(self, *, prompt_tokens: int) -> bytes:
        """The response is there, and is being worked on."""
        begun = self._begun()
        if self._response.status == "queued":
            begun += (
                b"" if self._next_number > 1 else self._event("queued", response=self._response)
            )
            self._response = msgspec.structs.replace(self._response, status="in_progress")
        return begun + self.keep_alive()

    def delta(self, event: OutputDelta) -> bytes:
        """News of the answer."""
        if isinstance(event, TextDelta):
            return self._text(event) if event.text or event.logprobs else b""
        if isinstance(event, ToolCallStarted):
            tool = self._tools.client_tool(event.name)
            kind = WrittenCustomCall if tool.is_custom else WrittenCall
            closed = self._closed(_status_before(self._now))
            return closed + self._added(kind(id=self._new_id(kind), call_id=event.id, tool=tool))
        if isinstance(self._now, WrittenCall):
            if isinstance(event, ToolArgumentsDelta):
                return self._events(self._now, self._now.more(event.text))
            if isinstance(event, ToolCallFinished):
                return self._closed("completed")
        return b""

    def _text(self, event: TextDelta) -> bytes:
        kind = (
            WrittenMessage
            if event.kind == "text"
            else WrittenSummary
            if self._shows.summaries
            else WrittenThought
        )
        item, begun = self._now, b""
        if type(item) is not kind:
            closed = self._closed(_status_before(item))
            item = kind(id=self._new_id(kind))
            begun = closed + self._added(item)
        logprobs = (
            content_logprobs(event.logprobs)
            if self._shows.logprobs and event.kind == "text"
            else ()
        )
        return begun + self._events(item, item.more(event.text, logprobs))

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of the last item."""
        return self._finished(event.finish_reason)

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The whole response object; nothing follows it."""
        self._conclude(counts, explanation)
        return self._event(self._response.status, response=self._response)

    def broken(self, problem: Problem) -> bytes:
        """The response failed; nothing follows."""
        begun = self._begun()
        code = _FAILURES.get(
            problem.code, "server_error" if problem.status >= 500 else "invalid_prompt"
        )
        self._end_as("failed", error=ResponseFailure(code=code, message=problem.message))
        return begun + self._event("failed", response=self._response)

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The response object as JSON, grown from the same events."""
        self.opening(prompt_tokens=counts.prompt_tokens)
        for delta in choices[0].deltas:
            self.delta(delta)
        self._finished(choices[0].finish_reason)
        self.closing(counts, explanation)
        return _encode(self._response)

    def cancel(self) -> bytes:
        """Nobody waits for the rest: it stays as it is.

        The API has no event of that name; this one ends a stream.
        """
        self._end_as("cancelled")
        return self._event("incomplete", response=self._response)

    def _finished(self, end: EndWord) -> bytes:
        self._end = end
        return self._closed("incomplete" if end == "length" else _status_before(self._now))

    def _conclude(self, counts: TokenCounts, explanation: Explanation | None) -> None:
        usage = ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens),
            total_tokens=counts.prompt_tokens + counts.completion_tokens,
        )
        told = msgspec.UNSET if explanation is None else explanation
        if self._end == "length":
            self._end_as(
                "incomplete", incomplete_details=IncompleteDetails(), usage=usage, holdfast=told
            )
        else:
            self._end_as("completed", completed_at=int(time.time()), usage=usage, holdfast=told)

    def _end_as(self, status: ResponseStatus, **changes: Any) -> None:
        if self._now is not None:
            self._done.append(self._now.item("incomplete"))
            self._now = None
        self._response = msgspec.structs.replace(
            self._response, status=status, output=tuple(self._done), **changes
        )

    def _new_id(self, kind: type[WrittenItem]) -> str:
        return f"{kind.id_prefix}_{self.id.removeprefix('resp_')}{len(self._done):02x}"

    def _begun(self) -> bytes:
        return self._event("created", response=self._response) if self._next_number == 0 else b""

    def _added(self, item: WrittenItem) -> bytes:
        self._now = item
        added = self._event(
            "output_item.added", output_index=len(self._done), item=item.item("in_progress")
        )
        return added + self._events(item, item.beginning())

    def _closed(self, status: ItemStatus) -> bytes:
        """The end of the item that is being written, if there is one.

        A call that was cut is never said to be done: there are clients that would run it.
        """
        item, self._now = self._now, None
        if item is None:
            return b""
        is_told = status == "completed" or not isinstance(item, WrittenCall)
        if isinstance(item, WrittenThought):
            self._thoughts[item.id] = item.text
            item.sealed = self._seal(item.text) if self._shows.sealed_thoughts else ""
        said = self._events(item, item.ending()) if is_told else b""
        whole = item.item(status)
        if is_told:
            said += self._event("output_item.done", output_index=len(self._done), item=whole)
        self._done.append(whole)
        return said

    def _events(self, item: WrittenItem, events: Sequence[Event]) -> bytes:
        place = {"item_id": item.id, "output_index": len(self._done)}
        return b"".join(self._event(kind, **place, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """One event. Their numbers count from 0."""
        number, self._next_number = self._next_number, self._next_number + 1
        data = _encode({"type": f"response.{kind}", "sequence_number": number, **fields})
        event = b"event: response.%b\ndata: %b\n\n" % (kind.encode(), data)
        self._hear(number, event)
        return event


def _status_before(item: WrittenItem | None) -> ItemStatus:
    """What becomes of an item when another one follows: calls are told when they are complete."""
    return "incomplete" if isinstance(item, WrittenCall) else "completed"
