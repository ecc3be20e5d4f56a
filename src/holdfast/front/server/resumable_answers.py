"""Answers that outlive their client's connection: a retry gets the lost answer, and any number of
clients can follow a named answer (a stored response).

A client whose connection breaks in mid-answer sends its request again: SDKs do so automatically,
agents after an error. Generating the answer again would spend the same tokens twice. So an answer
that has lost its connection (a "lost answer") continues for a moment, then pauses, and is cancelled
if the request is not repeated in time.

A lost connection looks like a client that stopped reading on purpose, because its user pressed Stop
or because it wants several samples. Such a client wants a new answer. So an identical request gets
a lost answer only in two cases: sampling again would give the same tokens (temperature 0, or a
seed), or the request shows that it is a retry, by `x-stainless-retry-count` or an
`Idempotency-Key`. Two requests with the same key are one request: the second gets the answer of the
first, even while the first client still reads it or after it was delivered. Without a key, an
answer has only one reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from starlette.requests import Request

from holdfast.config import ServerSettings
from holdfast.errors import GenerationFailed, HoldfastError
from holdfast.front.records.responses import RecordKey
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.machine.clocks import AwakeTimer, awake_clock
from holdfast.wire.requests import SamplingParams

IDEMPOTENCY_HEADER = "idempotency-key"
# the number of the attempt, from 0, which OpenAI's and Anthropic's SDKs send every time
RETRY_HEADER = "x-stainless-retry-count"
MOST_BYTES = 32 << 20  # limit for all resumable answers together
MOST_LOST = 16  # maximum number of lost answers per sender
_LARGE_BODY_BYTES = 1 << 20  # a larger body is not kept while its answer is generated
_MOST_UNWRITTEN = 16  # maximum number of complete answers that the store could not write
_EVENT_BYTES = 150  # Python's overhead per event
# prefixes of the headers that influence the answer
_SHAPING_HEADERS = ("anthropic-", "x-holdfast-", "user-agent", IDEMPOTENCY_HEADER)


class RequestIdentity:
    """The identity of a request and its retries; the attempt number is not compared.

    The body is kept while a client waits for the answer. It is hashed only if the client is lost,
    since then the answer may be kept for long.
    """

    __slots__ = ("_body", "_digest", "attempt", "has_idempotency_key", "head", "sender")

    def __init__(
        self,
        head: bytes,
        body: bytes = b"",
        *,
        sender: str = "",
        has_idempotency_key: bool = False,
        attempt: int | None = None,
    ) -> None:
        """head: a hash of everything except the body, with the `Idempotency-Key` if there is one.
        sender: the sender's key or address.
        attempt: the number of the attempt, from 0; None: the client does not number its attempts.
        """
        # equal in equal identities; serves to look them up without a hash of the body
        self.head = (head, len(body), sender, has_idempotency_key)
        self._body: bytes | None = body
        self._digest = b""
        self.sender = sender
        self.has_idempotency_key = has_idempotency_key
        self.attempt = attempt

    def __hash__(self) -> int:
        return hash(self.head)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RequestIdentity) or self.head != other.head:
            return False
        if self._body is not None and other._body is not None:
            return self._body == other._body
        return self._body_digest() == other._body_digest()

    @property
    def is_retry(self) -> bool:
        """Whether the request says that it is a retry."""
        return self.has_idempotency_key or (self.attempt or 0) >= 1

    def free_body(self) -> None:
        """Keep only a hash of the body. Comparisons with other identities still work."""
        self._digest = self._body_digest()
        self._body = None

    def _body_digest(self) -> bytes:
        if self._body is None:
            return self._digest
        return hashlib.blake2b(self._body, digest_size=32).digest()


async def identity_of(
    request: Request, body: bytes, settings: ServerSettings
) -> RequestIdentity | None:
    """The identity of a request; None if the request cannot share its answer.

    The identity consists of sender, path, query, body, and the headers that influence the answer.
    Headers that differ between attempts (`x-stainless-retry-count`, `traceparent`) are left out.

    An answer cannot be shared if lost answers are not kept and the request has no
    `Idempotency-Key`.
    """
    has_idempotency_key = IDEMPOTENCY_HEADER in request.headers
    if not has_idempotency_key and not settings.reconnect_seconds:
        return None
    caller = caller_of(request)
    headers = [
        f"{name}: {value}"
        for name, value in sorted(request.headers.items())
        if name.startswith(_SHAPING_HEADERS) or "session" in name
    ]
    sender = caller.key_name or caller.server_key or caller.address
    # a key may have the name of an address or of the server's key
    sender_kind = "key" if caller.key_name else "server" if caller.server_key else "address"
    head = "\n".join(
        [sender_kind, sender, request.method, request.url.path, request.url.query, *headers]
    )
    attempt = request.headers.get(RETRY_HEADER, "")
    is_number = attempt.isascii() and attempt.isdigit() and len(attempt) < 10
    identity = RequestIdentity(
        hashlib.blake2b(head.encode("utf-8", "surrogateescape"), digest_size=32).digest(),
        body,
        sender=sender,
        has_idempotency_key=has_idempotency_key,
        attempt=int(attempt) if is_number else None,
    )
    if len(body) > _LARGE_BODY_BYTES:
        await asyncio.to_thread(identity.free_body)  # hashing releases the interpreter lock
    return identity


class NumberedEvent(NamedTuple):
    """The bytes of an event, and its number.

    To resume, a client names the number of the last event that it read.
    """

    number: int
    frame: bytes


class LogCursor:
    """The position of a follower (a client that reads a log). It lives as long as its iterator."""

    __slots__ = ("__weakref__", "place")

    def __init__(self) -> None:
        self.place = 0  # index of the next event to read, counted over all events of the log


class EventLog:
    """The events of one answer, which can be read from any position while more are added.

    A place is the index of an event in the order of arrival. An event's number is the one that
    clients see, and may skip values.

    Event loop's thread only.
    """

    def __init__(self) -> None:
        self.events: list[NumberedEvent] = []
        self.has_ended = False
        # why the answer failed; None: it is complete or has not ended yet
        self.error: HoldfastError | None = None
        self._freed = 0  # number of freed events; `events` begins after them
        self._cursors: weakref.WeakSet[LogCursor] = weakref.WeakSet()  # the readers
        self._changed = asyncio.Event()  # set and replaced at each change

    def add(self, event: NumberedEvent) -> None:
        """Add an event. Its number must be higher than all earlier numbers."""
        self.events.append(event)
        self._wake()

    def end(self, error: HoldfastError | None = None) -> None:
        """End the log, unless it has ended already. Followers that reach the end raise `error`."""
        if self.has_ended:
            return
        self.has_ended = True
        self.error = error
        self._wake()

    async def wait_for_first_event(self) -> None:
        """Wait for the first event."""
        while not self.events:
            await self._changed.wait()

    @property
    def has_followers(self) -> bool:
        """Whether a client reads the log."""
        return len(self._cursors) > 0

    @property
    def next_place(self) -> int:
        """The index of the next event: the number of events so far, including freed ones."""
        return self._freed + len(self.events)

    def free_read(self) -> list[NumberedEvent]:
        """Free and return the events that all followers have read.

        No new follower can read the log from its beginning afterwards.
        """
        slowest_place = min((cursor.place for cursor in self._cursors), default=self.next_place)
        freed = self.events[: slowest_place - self._freed]
        del self.events[: slowest_place - self._freed]
        self._freed = slowest_place
        return freed

    def drop_all(self) -> None:
        """Free all events, read or not."""
        self._freed = self.next_place
        self.events.clear()

    def events_after(self, number: int) -> AsyncIterator[bytes]:
        """Yield an empty opening, then all events with a number above `number` until the log ends.

        Waits for events that have not been added yet.
        """
        cursor = LogCursor()
        self._cursors.add(cursor)
        return self._read(cursor, number)

    async def _read(self, cursor: LogCursor, number: int) -> AsyncIterator[bytes]:
        """Yield what `events_after` promises, and advance this reader's `cursor`."""
        yield b""
        while True:
            changed = self._changed
            while self._freed <= cursor.place < self.next_place:
                event = self.events[cursor.place - self._freed]
                cursor.place += 1
                if event.number > number:
                    yield event.frame
            if self.has_ended:
                if self.error is not None:
                    raise self.error
                return
            await changed.wait()

    def _wake(self) -> None:
        """Wake all readers that wait for a change. Later readers wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


class Generating(Protocol):
    """A stream that generates an answer, as far as this file uses it."""

    sampling: SamplingParams

    def pause(self) -> None:
        """Stop generating until `unpause`."""
        ...

    def unpause(self) -> None:
        """Undo `pause`."""
        ...


class BufferedEvents(Enum):
    """Selects which events of an answer stay in memory."""

    ALL = "all"  # so that another request can get the answer
    UNREAD = "unread"  # only those that the followers have not read yet
    NONE = "none"


class ResumableAnswer(EventLog):
    """The events of an answer that a retry may get, and when the answer is paused or dropped.

    It holds the bytes that clients get. An `AnswerRecord` has only times and counts of an answer,
    for metrics and the log; the gateway's `_SessionAnswer` only says whether an answer still
    belongs to its session.

    Only use it in the event loop's thread.
    """

    def __init__(
        self, identity: RequestIdentity, plan: GenerationPlan, record: RequestRecord
    ) -> None:
        """identity: of the request, to recognize a retry.
        record: the log record of the request that generates the answer.
        """
        super().__init__()
        self.identity = identity
        requests, self.format = plan
        # whether the events are sent as a stream, or in one piece
        self.streams = any(request.streams for request in requests)
        self.choices = sum(request.choices for request in requests)  # of all prompts
        self.model = record.model
        self.request_id = record.request_id
        self.clients = 1  # connected clients: of the original request and of its retries
        self.buffered = BufferedEvents.ALL
        self.buffered_bytes = 0  # size of the buffered events
        # set when the answer has no client and no retry can get it, which ends its generation
        self.discarded = asyncio.Event()
        self.generation_ended = asyncio.Event()
        # generating it again would give the same answer
        self._is_repeatable = bool(requests) and all(
            each.sampling.seed is not None for each in requests
        )
        self._stream: Generating | None = None  # None: not generating yet
        self._timers: list[AwakeTimer] = []  # of calls that `schedule` has scheduled

    @property
    def is_accepted(self) -> bool:
        """Whether the model has accepted the request."""
        return self._stream is not None

    def mark_accepted(self, stream: Generating) -> None:
        """Note that the model has accepted the request and generates the answer in this stream.

        If no retry can get the answer, its events are not buffered.
        """
        self._stream = stream
        self._is_repeatable = self._is_repeatable or stream.sampling.temperature == 0
        numbers_attempts = self.identity.attempt is not None
        if not (self._is_repeatable or self.identity.has_idempotency_key or numbers_attempts):
            self.buffered = BufferedEvents.NONE

    def can_serve(self, request: RequestIdentity) -> bool:
        """Whether an identical request may get this answer."""
        if self.buffered is not BufferedEvents.ALL:
            return False
        if request.has_idempotency_key:
            return True
        return self.clients == 0 and (self._is_repeatable or request.is_retry)

    def schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` later, unless `cancel_timers` is called first.

        Time in which the machine sleeps does not count.
        """
        self._timers.append(awake_clock().call_later(seconds, callback))

    def cancel_timers(self) -> None:
        """Cancel everything that `schedule` has scheduled."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def pause(self) -> None:
        """Stop generating until a client wants the answer."""
        if self._stream is not None and not self.generation_ended.is_set():
            self._stream.pause()

    def unpause(self) -> None:
        """Undo `pause`."""
        if self._stream is not None and not self.generation_ended.is_set():
            self._stream.unpause()


class ResumableAnswers:
    """The answers that are being generated and those that a retry may get.

    A lost answer has no connected client, because its client disconnected before it had all. A
    delivered answer was read to its end; it is kept only if its request had an `Idempotency-Key`.
    Both are discarded after `server.reconnect_seconds`.

    Event loop's thread only.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_lost: int = MOST_LOST) -> None:
        self._answers: dict[ResumableAnswer, None] = {}  # all answers, the oldest first
        # the answers that a retry may get, by `RequestIdentity.head`
        self._by_head: dict[Hashable, list[ResumableAnswer]] = {}
        # answers that lost their client, in the order in which they lost it
        self._lost: dict[ResumableAnswer, None] = {}
        # delivered answers with an `Idempotency-Key`, in the order of delivery
        self._delivered: dict[ResumableAnswer, None] = {}
        self._most_bytes = most_bytes
        self._most_lost = most_lost
        self.buffered_bytes = 0
        # the answers that clients can name: running responses that will be stored, and complete
        # ones that could not be written
        self.named: dict[RecordKey, EventLog] = {}
        self._unwritten: deque[RecordKey] = deque()
        self.tasks: set[asyncio.Task[None]] = set()  # tasks of background answers

    def __len__(self) -> int:
        return len(self._answers)

    def begin(
        self, identity: RequestIdentity, plan: GenerationPlan, record: RequestRecord
    ) -> ResumableAnswer:
        """Register the answer to a new request. The caller must call `client_left` in the end."""
        answer = ResumableAnswer(identity, plan, record)
        self._answers[answer] = None
        self._by_head.setdefault(identity.head, []).append(answer)
        return answer

    def pause_lost(self) -> None:
        """Pause every lost answer, because a connected client waits for the model."""
        for answer in self._lost:
            answer.pause()

    async def cancel_lost(self) -> bool:
        """Cancel the lost answers and wait until they have left the worker.

        Returns whether there were any.
        """
        lost = [answer for answer in self._lost if not answer.generation_ended.is_set()]
        for answer in lost:
            self._discard(answer)
        for answer in lost:
            await answer.generation_ended.wait()
        return bool(lost)

    def claim(self, identity: RequestIdentity) -> ResumableAnswer | None:
        """Find the existing answer that a request gets, and add a client to it.

        Returns None if the request needs a new answer. Otherwise, the caller must call
        `client_left` in the end.
        """
        candidates = self._by_head.get(identity.head, ())
        matching = (
            each for each in candidates if each.can_serve(identity) and each.identity == identity
        )
        answer = next(matching, None)
        if answer is None:
            return None
        self._lost.pop(answer, None)
        self._delivered.pop(answer, None)
        answer.cancel_timers()
        answer.clients += 1
        answer.unpause()
        return answer

    def client_left(
        self,
        answer: ResumableAnswer,
        settings: ServerSettings,
        *,
        has_all: bool,
        is_stopping: bool = False,
    ) -> bool:
        """Note that a client of the answer is gone.

        Returns whether the answer has another client or a retry may still get it.

        has_all: whether the client received the whole answer.
        is_stopping: whether the server takes no new requests, so that no retry can come.
        """
        answer.clients -= 1
        if answer.clients:
            return True
        can_be_claimed = (
            answer.buffered is BufferedEvents.ALL and answer.error is None and answer.is_accepted
        )
        is_done = has_all and not answer.identity.has_idempotency_key
        if is_stopping or is_done or not can_be_claimed or not settings.reconnect_seconds:
            self._discard(answer)
            return False
        answer.identity.free_body()
        if has_all:
            self._delivered[answer] = None
        else:
            self._keep_lost(answer, settings)
        answer.schedule(settings.reconnect_seconds, partial(self._discard, answer))
        return True

    def mark_ended(self, answer: ResumableAnswer) -> None:
        """Note that the generation of an answer has ended, whether it is complete or not."""
        answer.generation_ended.set()
        # has no effect if the answer has ended already, as a complete or refused one has
        answer.end(GenerationFailed("the request failed; the server's log has the details"))
        if answer.error is not None:
            self._discard(answer)

    async def recording(
        self, answer: ResumableAnswer, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer, and `record` each. At their end, the answer ends, too."""
        try:
            async for frame in events:
                self.record(answer, frame)
                yield frame
        except HoldfastError as error:
            answer.end(error)
            raise
        answer.end()

    def record(self, answer: ResumableAnswer, frame: bytes) -> None:
        """Store an event in memory if a client may still read it and there is room."""
        if not frame or answer.buffered is BufferedEvents.NONE or answer.has_ended:
            return
        size = len(frame) + _EVENT_BYTES
        if not self._make_room(answer, size):
            return
        if answer.buffered is BufferedEvents.UNREAD and not answer.has_followers:
            return
        answer.buffered_bytes += size
        self.buffered_bytes += size
        answer.add(NumberedEvent(answer.next_place, frame))

    def keep_unwritten(self, name: RecordKey, log: EventLog) -> None:
        """Keep an answer in memory because its last event could not be written to the store.

        If there are too many of these answers, the oldest is dropped.
        """
        if len(self._unwritten) == _MOST_UNWRITTEN:
            self.named.pop(self._unwritten.popleft(), None)
        self._unwritten.append(name)
        self.named[name] = log

    async def close(self) -> None:
        """Cancel all background answers and wait for them; called when the server stops."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)

    def check_invariants(self) -> None:
        """Assert that counts are correct and within limits, and lost answers have no client."""
        assert sum(answer.buffered_bytes for answer in self._answers) == self.buffered_bytes, (
            "the total differs from the sum over all answers"
        )
        assert self.buffered_bytes <= self._most_bytes, (
            "more bytes are buffered than the limit allows"
        )
        for answer in self._answers:
            kept_bytes = sum(len(event.frame) + _EVENT_BYTES for event in answer.events)
            assert answer.buffered_bytes == kept_bytes, (
                "the bytes of an answer differ from the sum over its events"
            )
        findable = [answer for answers in self._by_head.values() for answer in answers]
        assert all(answer in self._answers for answer in findable), (
            "an answer that is not registered can be found by its identity"
        )
        without_client = [*self._lost, *self._delivered]
        assert all(answer in findable for answer in without_client), (
            "a lost or delivered answer cannot be found by its identity"
        )
        assert not any(answer.clients for answer in without_client), (
            "an answer that has a client counts as lost or delivered"
        )
        for sender in {answer.identity.sender for answer in self._lost}:
            assert len(self._lost_by(sender)) <= self._most_lost, (
                "one sender has too many lost answers"
            )

    def _keep_lost(self, answer: ResumableAnswer, settings: ServerSettings) -> None:
        """Keep an answer that lost its client. Its generation continues for
        `server.unattended_seconds`, then pauses.

        If the sender has too many lost answers, discards its oldest complete one, or its oldest.
        """
        lost_answers = self._lost_by(answer.identity.sender)
        if len(lost_answers) == self._most_lost:
            self._discard(next((each for each in lost_answers if each.has_ended), lost_answers[0]))
        self._lost[answer] = None
        answer.schedule(settings.unattended_seconds, answer.pause)

    def _lost_by(self, sender: str) -> list[ResumableAnswer]:
        return [answer for answer in self._lost if answer.identity.sender == sender]

    def _make_room(self, answer: ResumableAnswer, size: int) -> bool:
        """Make room for an event of `size` bytes. Returns False if there is no room, or if no one
        can want the event any more.

        First discards complete answers without a client, then frees what clients have read, of this
        answer and of others. If that is not enough, the answer ends with an error for followers.
        """
        for complete_answer in self._evictable():
            if self.buffered_bytes + size <= self._most_bytes:
                return True
            self._discard(complete_answer)
        if self.buffered_bytes + size <= self._most_bytes:
            return True
        self._keep_unread(answer)
        if not answer.has_followers:
            return False
        # these have no follower: their client gets each event as it is generated, so the buffered
        # ones only serve a possible retry
        for other in [each for each in self._answers if each.clients and not each.has_followers]:
            self._keep_unread(other)
        if self.buffered_bytes + size <= self._most_bytes:
            return True
        message = (
            "the answer is too long to be stored for a client that reads this slowly; please send "
            "the request again"
        )
        answer.end(GenerationFailed(message))
        self._drop_events(answer)
        return False

    def _evictable(self) -> Iterator[ResumableAnswer]:
        """The complete answers without a client, in the order of their eviction."""
        yield from tuple(self._delivered)
        yield from [answer for answer in self._lost if answer.has_ended]

    def _keep_unread(self, answer: ResumableAnswer) -> None:
        """Free the events that all followers have read.

        From now on, no other request can get the answer.
        """
        if answer.clients == 0:
            self._discard(answer)
            return
        self._stop_serving(answer)
        freed_bytes = sum(len(event.frame) + _EVENT_BYTES for event in answer.free_read())
        answer.buffered_bytes -= freed_bytes
        self.buffered_bytes -= freed_bytes

    def _discard(self, answer: ResumableAnswer) -> None:
        """Stop giving the answer to other requests. Its clients get it to its end; if it has none,
        it is dropped, which also ends its generation.
        """
        self._stop_serving(answer)
        if answer.clients:
            return
        self._drop_events(answer)
        self._answers.pop(answer, None)
        answer.discarded.set()

    def _stop_serving(self, answer: ResumableAnswer) -> None:
        """Make sure that no other request can get the answer, so that read events can be freed."""
        if answer.buffered is BufferedEvents.ALL:
            answer.buffered = BufferedEvents.UNREAD
        answer.cancel_timers()
        self._lost.pop(answer, None)
        self._delivered.pop(answer, None)
        candidates = self._by_head.get(answer.identity.head, [])
        if answer in candidates:
            candidates.remove(answer)
            if not candidates:
                del self._by_head[answer.identity.head]

    def _drop_events(self, answer: ResumableAnswer) -> None:
        """Free all buffered events of an answer, and buffer no more."""
        self.buffered_bytes -= answer.buffered_bytes
        answer.buffered_bytes = 0
        answer.buffered = BufferedEvents.NONE
        answer.drop_all()
