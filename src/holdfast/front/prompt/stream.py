"""The answer to one request: the events of its choices, merged, as an asynchronous iterator.

An `AnswerObserver` records the answers of a chat as its client sees them, so that their tokens can
be put back in the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.answers.choice import ChoiceText
from holdfast.front.answers.repetition import RepetitionGuard
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.front.prompt.known_answers import AnswerMeaning, meaning_of_deltas, meaning_of_text
from holdfast.front.prompt.prepare import Prepared
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, answer_reader, without_hidden
from holdfast.wire.events import FinishReason, Rejected
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    ThoughtEnder,
    ToolCallStarted,
    tool_calls_of,
)
from holdfast.wire.requests import ChatPrompt, GenerationRequest, TokenIds

_log = logging.getLogger(__name__)
# about 20 ms of reading: below, the hop to a thread costs more than it gives
_LONG_ANSWER_TOKENS = 2048
_MOST_READY = 64  # events of several choices that are taken from the link before they are asked for
Observe: TypeAlias = Callable[[OutputEvent], None]


class GenerationStream:
    """Events of an accepted request: text deltas, and exactly one `ChoiceFinished` per choice.

    For one consumer.

    `aclose` cancels what still runs, and so does cancelling a pending `__anext__`. A choice that
    failed raises GenerationFailed and cancels the others. Use `async with
    contextlib.aclosing(stream)`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        *,
        sources: Sequence[EventStream],
        intake_seconds: float = 0.0,
        observe: Observe = lambda event: None,
        repeated_thought_tokens: int = 0,
    ) -> None:
        """sources: of the request's sequences, in their order. repeated_thought_tokens: see
        `RepetitionGuard`.
        """
        self.request = request
        self.prompt_tokens = prepared.prompt_tokens
        self.intake_seconds = intake_seconds  # rendering and tokenization
        self.sampling = prepared.sequences[0].sampling
        # of earlier answers, as they were generated
        self.put_back_tokens = prepared.put_back_tokens
        # of earlier answers, which the prompt does not show
        self.dropped_tokens = prepared.dropped_tokens
        # the cache breakpoints of its client, in the prompt
        self.breakpoints = prepared.breakpoints
        self.unenforced = prepared.unenforced  # keywords of schemas, by their places
        self._observe = observe
        self._choices = tuple(prepared.choice(index) for index in range(len(sources)))
        self._sources = tuple(sources)
        self._thought_end = prepared.thought_end
        self._guards = tuple(RepetitionGuard(repeated_thought_tokens) for _ in sources)
        self._thought_ended_by: dict[int, ThoughtEnder] = {}  # by choice
        self._ready: deque[OutputEvent] = deque()
        self._pumps: list[asyncio.Task[None]] = []
        # for several choices: something is ready, or a pump has ended
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()  # for several choices: few enough events are ready
        self._has_room.set()
        self._closed = False
        self._held = AsyncExitStack()

    def hold(self, resources: AsyncExitStack) -> None:
        """Keep what the answer needs until it has ended: the lease of its model."""
        self._held = resources

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> OutputEvent:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            whole = False
            try:
                await (self._next_of_one() if len(self._choices) == 1 else self._next_of_many())
                whole = True
            finally:
                if not whole:
                    await self.aclose()
        event = self._ready.popleft()
        if len(self._ready) < _MOST_READY:
            self._has_room.set()
        if isinstance(event, ChoiceFinished) and event.completion_tokens > _LONG_ANSWER_TOKENS:
            await asyncio.to_thread(self._observe, event)  # it tokenizes the whole answer
        else:
            self._observe(event)
        return event

    async def accepted(self) -> None:
        """Wait until the worker has taken all choices.

        Raises what its refusal means; the caller closes the stream then.
        """
        for choice, source in zip(self._choices, self._sources, strict=True):
            event = await anext(source, None)
            if event is None:
                raise WorkerUnavailable(
                    "the worker ended before it took the request; please try again"
                )
            if isinstance(event, Rejected):
                raise refusal(event)
            self._ready.extend(choice.feed(event))

    def pause(self) -> None:
        """Stop generating until `go_on`. What was generated can still be read."""
        for source in self._sources:
            source.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        for source in self._sources:
            source.go_on()

    def end_thoughts(self) -> bool:
        """Have no choice think any more.

        Returns whether that can be done: the model needs a marker for a thought's end.
        """
        for index in range(len(self._sources)):
            self._end_thought(index, by="request")
        return self._thought_end is not None

    async def aclose(self) -> None:
        """Cancel what still runs and end the iteration. May be called twice."""
        self._closed = True
        self._ready.clear()
        for pump in self._pumps:
            pump.cancel()
        # first of all, so that nothing that interrupts the rest can leave a sequence running
        for source in self._sources:
            await source.aclose()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)
            self._pumps.clear()
        await self._held.aclose()

    async def _next_of_one(self) -> None:
        """Straight from the link: no task and no queue between."""
        choice, source = self._choices[0], self._sources[0]
        self._ready.extend(self._watched(choice.feed(await _next_event(source))))
        if choice.done:
            self._closed = True
            await source.aclose()
            await self._held.aclose()

    async def _next_of_many(self) -> None:
        if not self._pumps:
            pairs = zip(self._choices, self._sources, strict=True)
            self._pumps = [
                asyncio.create_task(self._pump(choice, source)) for choice, source in pairs
            ]
            for pump in self._pumps:
                pump.add_done_callback(lambda _: self._changed.set())
        self._changed.clear()
        ended = [pump for pump in self._pumps if pump.done()]
        for pump in ended:
            pump.result()  # raises what the pump raised
        if len(ended) == len(self._pumps):
            self._closed = True
            await self._held.aclose()
        else:
            await self._changed.wait()

    async def _pump(self, choice: ChoiceText, source: EventStream) -> None:
        while not choice.done:
            # what nobody reads stays in the link, which stops the worker when it is too much
            await self._has_room.wait()
            if events := choice.feed(await _next_event(source)):
                self._ready.extend(self._watched(events))
                self._changed.set()
                if len(self._ready) >= _MOST_READY:
                    self._has_room.clear()
        await source.aclose()

    def _watched(self, events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
        """The same events.

        A thought that goes round in circles is ended; the end of a choice says what ended its
        thoughts.
        """
        for event in events:
            if (
                isinstance(event, TextDelta)
                and event.kind == "reasoning"
                and self._guards[event.index].take(event.token_ids)
            ):
                self._end_thought(event.index, by="repetition")
            if isinstance(event, ChoiceFinished) and event.index in self._thought_ended_by:
                yield msgspec.structs.replace(
                    event, thought_ended_by=self._thought_ended_by[event.index]
                )
            else:
                yield event

    def _end_thought(self, index: int, *, by: ThoughtEnder) -> None:
        if (
            self._thought_end is None
            or index in self._thought_ended_by
            or self._choices[index].done
        ):
            return
        self._thought_ended_by[index] = by
        self._sources[index].limit_thoughts(self._thought_end)
        if by == "repetition":
            _log.info(
                "the thought of %s went round in circles and was ended", self.request.request_id
            )


async def _next_event(source: EventStream) -> RequestEvent:
    event = await anext(source, None)
    if event is None:
        raise GenerationFailed("the worker's stream ended without a word")
    return event


def refusal(event: Rejected) -> HoldfastError:
    """The error that a worker's refusal means to the client."""
    match event.kind:
        case "queue_full":
            return QueueFull(
                queued=event.queued,
                limit=event.queue_limit,
                retry_after_seconds=event.retry_after_seconds,
            )
        case "shutting_down":
            return WorkerUnavailable(event.message)
        case "too_large":
            return TooLargeForMemory(
                needed_bytes=event.needed_bytes, budget_bytes=event.budget_bytes
            )
        case "invalid":
            return InvalidRequest(event.message, field=event.field)


def observer(request: GenerationRequest, bundle: TokenizerBundle, prepared: Prepared) -> Observe:
    """What is to see all events of the answer to a request.

    Whoever continues a message gets back more than what is generated now.
    """
    if not isinstance(request.prompt, ChatPrompt) or prepared.opening is None:
        return lambda event: None
    opening_token_ids = tuple(bundle.tokenizer.encode(prepared.opening, add_special_tokens=False))
    prompt_ids = prepared.rules.prompt_token_ids
    if prompt_ids[len(prompt_ids) - len(opening_token_ids) :] != TokenIds.of(opening_token_ids):
        # what stands in front of the answer is in one token with what does not belong to it
        return lambda event: None
    return AnswerObserver(
        bundle=bundle,
        tools=request.prompt.tools,
        opening=prepared.opening,
        opening_token_ids=opening_token_ids,
        reads_calls=prepared.rules.reads_calls,
        tenant=request.tenant,
    ).observe()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerObserver:
    """Keeps the answers to one request."""

    bundle: TokenizerBundle
    tools: tuple[dict[str, Any], ...]
    opening: str  # what the prompt has behind the header of the answer
    opening_token_ids: tuple[int, ...]
    reads_calls: bool  # the client's view was parsed with calls, as the next turn will be
    tenant: str

    def observe(self) -> Observe:
        """What is to see all events of the answer."""
        deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)

        def observe(event: OutputEvent) -> None:
            if isinstance(event, ChoiceFinished):
                self._keep_arguments(deltas[event.index])
                self._keep(deltas.pop(event.index, []), event)
            elif not isinstance(event, PromptProgress):
                deltas[event.index].append(event)

        return observe

    def _keep_arguments(self, deltas: Sequence[OutputDelta]) -> None:
        for call in tool_calls_of(deltas):
            self.bundle.first_forms.arguments(call.arguments, call_id=call.id, tenant=self.tenant)

    def _keep(self, deltas: Sequence[OutputDelta], end: ChoiceFinished) -> None:
        said = meaning_of_deltas(deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        if said is None or not token_ids or self._has_hidden(token_ids):
            return
        tokenizer = self.bundle.tokenizer
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        opening = without_hidden(self.opening, self.bundle)
        # The client's events say all that the tokens say, except in these three cases.
        is_seen_whole = (
            self.reads_calls
            and end.stop_string is None
            and self._read_again(opening, end) == AnswerMeaning()
        )
        if not is_seen_whole and self._read_again(opening + text, end) != said:
            return
        # A call or a thought is rendered as the template has it, so that nobody knows yet what it
        # will be tokenized into.
        is_plain = text == said.content and not opening.strip()
        self.bundle.known_answers.add(
            said,
            (*self.opening_token_ids, *token_ids),
            call_ids=[delta.id for delta in deltas if isinstance(delta, ToolCallStarted)],
            is_as_tokenized=is_plain
            and token_ids == tokenizer.encode(text, add_special_tokens=False),
            tenant=self.tenant,
        )

    def _has_hidden(self, token_ids: Sequence[int]) -> bool:
        """Whether some tokens are special ones that the client did not see."""
        markers = self.bundle.dialect.markers.characters
        pieces = self.bundle.tokenizer.pieces
        return any(
            token_id not in markers and pieces.is_special(token_id) for token_id in {*token_ids}
        )

    def _read_again(self, text: str, end: ChoiceFinished) -> AnswerMeaning:
        """What the tokens say when all calls are read."""
        return meaning_of_text(
            self.bundle.dialect.markers.encode(text),
            answer_reader(self.tools, self.bundle),
            cut=end.reason is not FinishReason.STOP,
        )
