"""An answer: what to generate, the protocol's format, the explanation, and the writer of its stream."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
from msgspec import Struct
from starlette.types import Send

from holdfast.front.server.access import Caller
from holdfast.front.server.problem import Problem, problem_of
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.events import CacheOutcome, CacheReport
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    PromptProgress,
    TextKind,
    ThoughtEnder,
    TokenText,
    ToolCall,
    text_of,
    tool_calls_of,
)
from holdfast.wire.requests import GenerationRequest, SamplingParams

KEEP_ALIVE_SECONDS = 5.0  # checked this often: after 5 to 10 silent seconds the line is kept open
MOST_READY_BYTES = 64 << 10  # as much again may be in the socket's buffer
HEADER_GRACE_SECONDS = 0.5  # until then an early failure can still get its own status
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class TokenShown(Struct, frozen=True, kw_only=True):
    """A token and its text."""

    id: int
    text: str


class Difference(Struct, frozen=True, kw_only=True):
    """The first token of the prompt that differs from what is kept.

    `position` counts from 0, `before` is the text there.
    """

    position: int
    before: str
    stored: TokenShown
    prompt: TokenShown


class SecondsSpent(Struct, frozen=True, kw_only=True):
    """Where the time went.

    `lookup` and `waited_for_another` are parts of `queue`, `restore` of `queue` and `prefill`.
    """

    accept: float  # until the worker had taken the request: checks, template, tokenization
    queue: float
    lookup: float
    waited_for_another: float
    restore: float
    prefill: float
    # since the request came in, everything included; null when there was no text
    first_text: float | None


class Explanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one choice began from.

    `ram_tokens`, `disk_tokens` and `read_tokens` add up to `prompt_tokens`.

    `moved_tokens` and `shared_tokens` are parts of `ram_tokens`; the rest of those was copied.
    """

    index: int
    prompt_tokens: int
    ram_tokens: int
    moved_tokens: int  # stand where the answer before has left them
    shared_tokens: int  # stand where other sequences use them too
    disk_tokens: int
    read_tokens: int
    read_ahead_tokens: int  # of both, those that were read for this turn before it came
    unused_tokens: int  # further ones that are, or were, kept but could not be used
    put_back_tokens: int  # of earlier answers, which stand in the prompt as they were generated
    # of earlier answers, which the chat template or the client has left out of the prompt
    dropped_tokens: int
    reason: str
    explanation: str
    difference: Difference | None
    seconds: SecondsSpent
    # places in the schemas of tools, of keywords that the answer need not keep to
    unenforced: tuple[str, ...] = ()
    resumed: int = 0  # workers that died while they had it; the answer went on with the next one
    # of the answer's first choice: the same for the others, if there are any
    further_choices: list[Explanation] = []


def explanation_of(choices: list[Explanation]) -> Explanation | None:
    """The object for the explained choices of one answer; None when there are none."""
    if not choices:
        return None
    first, *further = sorted(choices, key=lambda choice: choice.index)
    return msgspec.structs.replace(first, further_choices=further)


def explain_choice(
    event: ChoiceFinished,
    *,
    put_back_tokens: int = 0,
    dropped_tokens: int = 0,
    accept_seconds: float,
    first_text_seconds: float | None,
    unenforced: tuple[str, ...] = (),
) -> Explanation:
    """What one choice began from. What the front itself knows is given."""
    memory, timings, difference = event.memory, event.timings, _difference(event)
    return Explanation(
        index=event.index,
        prompt_tokens=event.prompt_tokens,
        ram_tokens=memory.ram_tokens,
        moved_tokens=memory.moved_tokens,
        shared_tokens=memory.shared_tokens,
        disk_tokens=memory.disk_tokens,
        read_tokens=event.prompt_tokens - memory.cached_tokens,
        read_ahead_tokens=memory.read_ahead_tokens,
        unused_tokens=memory.unused_tokens,
        put_back_tokens=put_back_tokens,
        dropped_tokens=dropped_tokens,
        reason=memory.outcome.value,
        explanation=_in_words(event, difference, dropped_tokens=dropped_tokens),
        difference=difference,
        seconds=SecondsSpent(
            accept=accept_seconds,
            queue=timings.queue_seconds,
            lookup=memory.lookup_seconds,
            waited_for_another=memory.waited_seconds,
            restore=memory.restore_seconds,
            prefill=timings.prefill_seconds,
            first_text=first_text_seconds,
        ),
        unenforced=unenforced,
        resumed=event.resumptions,
    )


def _difference(event: ChoiceFinished) -> Difference | None:
    where, texts = event.memory.divergence, event.divergent
    if where is None or texts is None:
        return None
    return Difference(
        position=where.position,
        before=texts.before,
        stored=TokenShown(id=where.stored_token_id, text=texts.stored),
        prompt=TokenShown(id=where.prompt_token_id, text=texts.prompt),
    )


_WORDS = {
    CacheOutcome.COMPLETE: "The whole prompt was in the cache; the last token is always recomputed.",
    CacheOutcome.NEW_TOKENS: "All that is kept of this beginning was used; the prompt goes on behind it.",
    CacheOutcome.NOTHING_STORED: (
        "Nothing is kept for this model and tenant. Other weights, another number format or codec, "
        "another API key, "
        "X-Holdfast-Tenant or cache_salt have memories of their own."
    ),
    CacheOutcome.SCORED: "Something of all of the prompt's tokens was asked for (log-probabilities, a mean): all had to be read.",
    CacheOutcome.FAILED: "The memory failed on this request, so all of its prompt was read. The server's log says more.",
    CacheOutcome.OFF: "The server keeps nothing for this model: its layout does not allow it.",
}


def _in_words(event: ChoiceFinished, difference: Difference | None, *, dropped_tokens: int) -> str:
    memory = event.memory
    said = [_WORDS.get(memory.outcome) or _lost_in_words(memory)]
    if difference is not None:
        said.append(
            f"The prompt differs from the cached prompt at token {difference.position:,}, after "
            f"{difference.before!r}: "
            f"cached {difference.stored.text!r}, now {difference.prompt.text!r}."
        )
    if dropped_tokens:
        said.append(
            "The model's chat template, or the client, leaves parts of earlier answers out, such "
            "as thinking: "
            f"{dropped_tokens:,} tokens that were generated are not in the prompt as they were."
        )
    if memory.read_ahead_tokens:
        said.append(
            f"{memory.read_ahead_tokens:,} tokens were read for this turn before it came, while "
            "there was nothing else to do."
        )
    if memory.waited_for_another:
        said.append("It waited until another request had read the same beginning.")
    if event.resumptions:
        said.append(
            "A worker died in the middle of it; another one went on where that had stopped."
        )
    return " ".join(sentence for sentence in said if sentence)


def _lost_in_words(memory: CacheReport) -> str:
    more = f"{memory.unused_tokens:,} more tokens"
    match memory.outcome:
        case CacheOutcome.NO_BOUNDARY:
            return (
                f"{more} are kept, but this model can go on only where its state was saved; the "
                "last such place was used."
            )
        case CacheOutcome.EVICTED:
            return (
                f"{more} were kept, but had to make room for others; store.ram_bytes and "
                "store.disk_bytes say how much is kept."
            )
        case CacheOutcome.UNREADABLE:
            return (
                f"{more} were kept in files that are damaged or gone. They are not used; the "
                "prompt was read instead."
            )
        case CacheOutcome.FORGOTTEN:
            return f"{more} were kept, but somebody had them deleted."
        case _:
            return ""  # the difference says it


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Exact token counts of one answer. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # part of prompt_tokens that was not read again
    reasoning_tokens: int = 0  # part of completion_tokens
    # of any choice; None: no thought was ended in the middle
    thought_ended_by: ThoughtEnder | None = None
    # where the prompt has the cache breakpoints of its client, ascending
    breakpoints: tuple[PinnedPrefix, ...] = ()


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is sent in one piece."""

    deltas: list[OutputDelta] = field(default_factory=list)
    finish_reason: EndWord = "stop"
    end: ChoiceFinished | None = None  # its last event, once it has come

    def text(self, kind: TextKind = "text") -> str:
        """All of its text of one kind."""
        return text_of(self.deltas, kind)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Its calls of tools, in order."""
        return tool_calls_of(self.deltas)

    @property
    def logprobs(self) -> list[TokenText]:
        """Those of all its tokens, in order."""
        return [token for delta in self.deltas for token in delta.logprobs]


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # what every reader of server-sent events passes over


class StreamFormat(abc.ABC):
    """What the writer of a stream must know of it, whatever its events are."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    def keep_alive(self) -> bytes:
        """What keeps the line open while nothing comes, before the opening too; empty where there
        is no such thing.
        """
        return KEEP_ALIVE_COMMENT

    def keep_alive_of_follower(self) -> bytes:
        """The same for one of several clients of the stream: nothing that counts as an event of it."""
        return self.keep_alive()

    @abc.abstractmethod
    def broken(self, problem: Problem) -> bytes:
        """The end of a stream that was begun and then failed."""


class AnswerFormat(StreamFormat):
    """How one answer looks: the events of a stream, each complete as the protocol frames it, or the
    whole as JSON.
    """

    def sampled_by(self, sampling: SamplingParams) -> None:
        """The request is accepted, and its answer is drawn like this."""

    def opening(self, *, prompt_tokens: int) -> bytes:
        """What comes before the first text; may be empty."""
        return b""

    @abc.abstractmethod
    def delta(self, event: OutputDelta) -> bytes:
        """News of a choice: text, reasoning, calls. Empty where the protocol says nothing of it."""

    def progress(self, event: PromptProgress) -> bytes:
        """How far the prompt is read; empty unless the client has asked for it, and the protocol
        has a form for it.
        """
        return b""

    @abc.abstractmethod
    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""

    @abc.abstractmethod
    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The end of a stream: token counts and explanation as far as the client asked for them,
        and the end mark.
        """

    @abc.abstractmethod
    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole answer as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """A checked request: what to generate, and the form of the answer."""

    requests: Sequence[GenerationRequest]  # one per prompt
    form: AnswerFormat
    streams: bool = False
    choices_per_prompt: int = 1
    explains: bool = False  # the answer is to say what was found of the prompt in the cache
    cache_salt: str = ""  # what is kept under it is there for requests with the same one only
    session_id: str | None = None  # as the body has it, unchecked; the header goes before it
    session_key: str = ""  # names the session where neither does; any text
    can_wait: bool = False  # nobody waits for the answer, as the body has it
    caller: Caller = field(default_factory=Caller)
    time_limit_seconds: float = 0.0  # for all of it, waiting included; 0: none


class EventWriter:
    """Writes the events of one answer in order; while nothing comes, it keeps the line open as the
    dialect does that.
    """

    def __init__(
        self,
        send: Send,
        form: StreamFormat,
        events: AsyncIterator[bytes],
        *,
        request_id: str = "",
        keep_alive: Callable[[], bytes] | None = None,
    ) -> None:
        """events: the first is the answer's opening, which may be empty. request_id: goes into the
        event of an error.

        keep_alive: in place of the form's.
        """
        self._send, self._form, self._events, self._request_id = send, form, events, request_id
        self._keep_alive = keep_alive or form.keep_alive
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._taken = asyncio.Event()
        self._wake = asyncio.Event()
        self._quiet = False
        self._started = False
        self._is_detached = False
        self._has_read_all = False
        self._is_sending = False

    @property
    def has_sent_all(self) -> bool:
        """Whether all events have been handed to the connection.

        Many clients close it when they have read the last one.
        """
        return self._has_read_all and not self._ready and not self._is_sending

    def detach(self) -> None:
        """The client is gone: read the events to their end all the same, and write nothing more."""
        self._is_detached = True
        self._ready.clear()
        self._ready_bytes = 0
        self._taken.set()

    async def run(self) -> None:
        """Write until the events end. Raises their error when nothing has been sent by then."""
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._wake.set())
        self._tick_in(HEADER_GRACE_SECONDS)
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                if not reader.done():
                    await self._flush()
            if (error := reader.exception()) is not None:
                if not self._started:
                    raise error
                self._ready.append(
                    self._form.broken(replace(problem_of(error), request_id=self._request_id))
                )
            await self._flush(more=False)
        finally:
            self._timer.cancel()
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(self) -> None:
        # it is written with what follows, but at once to a client that has its headers already
        is_opening = True
        async for event in self._events:
            if event and not self._is_detached:
                self._ready.append(event)
                self._ready_bytes += len(event)
                if self._started or not is_opening:
                    self._wake.set()
            is_opening = False
            while self._ready_bytes >= MOST_READY_BYTES:  # the client has left so much unread
                self._taken.clear()
                await self._taken.wait()
        self._has_read_all = True

    async def _flush(self, *, more: bool = True) -> None:
        if self._is_detached:
            return
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._form.stream_type.encode()), *_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if not self._ready and more:
            self._ready.append(self._keep_alive())
        body = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        self._taken.set()
        self._quiet = False
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._is_sending = False

    def _tick_in(self, seconds: float) -> None:
        # one per stream: it costs nothing per token
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        # Writes at the end of a silent interval: headers and opening the first time, what keeps the
        # line open from then on.
        if self._is_detached:
            return
        if self._quiet or not self._started:
            self._wake.set()
        self._quiet = True
        self._tick_in(KEEP_ALIVE_SECONDS)
