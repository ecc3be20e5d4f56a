"""Answers that outlive the connection of their client, so that the same request sent again gets them.

A client whose connection breaks in mid-answer sends its request again: SDKs do so by themselves, agents do it on an error.
Generated anew, the answer would cost the same tokens twice, and at a temperature above 0 it would be another one. So an answer
whose connection was lost goes on for a moment, then pauses, and is given up when nobody has come back for it.

When is a second identical request the first one sent again, and when is it a new one? Two agents may well ask the same thing at
the same time, and each wants an answer of its own. The lost connection tells them apart: only an answer that was not delivered
to its end is given away, and to one taker. Where client and server disagree about the end (the last bytes were sent and never
arrived), an `Idempotency-Key` says that two requests are one; such a request gets the answer whatever became of the first.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from starlette.requests import Request

from holdfast.config import ServerSettings
from holdfast.errors import GenerationFailed, HoldfastError
from holdfast.http.server.answers import AnswerPlan
from holdfast.http.server.caller import caller_of
from holdfast.http.server.extensions import tenant_in
from holdfast.http.server.running import EventLog, NumberedEvent
from holdfast.telemetry.request_log import RequestRecord

IDEMPOTENCY_HEADER = "idempotency-key"
MOST_BYTES = 32 << 20  # of all answers together, as they were sent
MOST_ABANDONED = 16  # answers that nobody waits for
_EVENT_BYTES = 150  # that Python adds to each event
_SHAPING_HEADERS = ("anthropic-", "x-holdfast-", "user-agent", IDEMPOTENCY_HEADER)


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What a request shares with the same request sent again."""

    digest: bytes
    has_key: bool  # an `Idempotency-Key`, which is in the digest


def identity_of(request: Request, body: bytes) -> RequestIdentity:
    """The identity of a request: its sender, path and body, and the headers that shape the answer.

    Headers that change from one attempt to the next (`x-stainless-retry-count`, `traceparent`) are not part of it.
    """
    caller = caller_of(request)
    headers = [
        f"{name}: {value}"
        for name, value in sorted(request.headers.items())
        if name.startswith(_SHAPING_HEADERS) or "session" in name
    ]
    sender = caller.key_name or caller.server_key or caller.address
    head = "\n".join([sender, tenant_in(request, cache_salt=""), request.method, request.url.path, *headers])
    digest = hashlib.blake2b(head.encode("utf-8", "surrogateescape") + b"\0" + body, digest_size=32).digest()
    return RequestIdentity(digest, has_key=IDEMPOTENCY_HEADER in request.headers)


class Pausable(Protocol):
    """What generates an answer."""

    def pause(self) -> None:
        """Have nothing more drawn until `go_on`."""
        ...

    def go_on(self) -> None:
        """Undo `pause`."""
        ...


class HeldAnswer(EventLog):
    """One answer from its first event on. Loop's thread only."""

    def __init__(self, identity: RequestIdentity, plan: AnswerPlan, record: RequestRecord) -> None:
        """record: of the request that it is made for."""
        super().__init__()
        self.identity = identity
        self.plan = plan
        self.record = record
        self.has_client = True  # the client that asked is still connected
        self.takers = 0  # requests that were given this answer and are still connected
        self.held_bytes = 0
        self.is_whole = True  # all of its events are kept
        self.given_up = asyncio.Event()
        self.is_over = asyncio.Event()  # nothing is generated for it any more
        self.stream: Pausable | None = None  # once the model has accepted the request
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for it."""
        return not self.has_client and not self.takers

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something unless `forget_timers` is called before."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act))

    def forget_timers(self) -> None:
        """Undo what `call_later` was to do."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def pause(self) -> None:
        """Generate nothing more until somebody wants it."""
        if self.stream is not None and not self.is_over.is_set():
            self.stream.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        if self.stream is not None and not self.is_over.is_set():
            self.stream.go_on()


class HeldAnswers:
    """The answers that are being made, and those that were not delivered to their end. Loop's thread only."""

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_abandoned: int = MOST_ABANDONED) -> None:
        self._by_identity: dict[RequestIdentity, list[HeldAnswer]] = {}
        self._abandoned: dict[HeldAnswer, None] = {}  # the longest abandoned first
        self._most_bytes, self._most_abandoned = most_bytes, most_abandoned
        self.held_bytes = 0

    def __len__(self) -> int:
        return sum(len(answers) for answers in self._by_identity.values())

    def begin(self, identity: RequestIdentity, plan: AnswerPlan, record: RequestRecord) -> HeldAnswer:
        """An answer is being made for the client that asked."""
        answer = HeldAnswer(identity, plan, record)
        self._by_identity.setdefault(identity, []).append(answer)
        return answer

    def make_way(self) -> None:
        """Somebody else wants an answer: what nobody waits for pauses."""
        for answer in self._abandoned:
            answer.pause()

    async def end_abandoned(self) -> bool:
        """Give up what nobody waits for, and wait until it has left the worker. Returns whether there was any."""
        abandoned = [answer for answer in self._abandoned if not answer.is_over.is_set()]
        for answer in abandoned:
            self._give_up(answer)
        for answer in abandoned:
            await answer.is_over.wait()
        return bool(abandoned)

    def take(self, identity: RequestIdentity) -> HeldAnswer | None:
        """The answer that a request gets in place of a new one. Whoever takes it has to `leave` it."""
        for answer in self._by_identity.get(identity, ()):
            if answer.is_whole and (answer.is_abandoned or answer.identity.has_key):
                self._abandoned.pop(answer, None)
                answer.forget_timers()
                answer.takers += 1
                answer.record.is_aborted = False
                answer.go_on()
                return answer
        return None

    def leave(self, answer: HeldAnswer, settings: ServerSettings, *, has_all: bool, is_alone: bool) -> None:
        """A taker is gone. has_all: with the whole answer. is_alone: nobody else wants an answer now."""
        answer.takers -= 1
        if has_all and not answer.identity.has_key:
            self._forget(answer)
        elif answer.is_abandoned:
            self._abandon(answer, settings, is_alone=is_alone)

    def lose_client(self, answer: HeldAnswer, settings: ServerSettings, *, is_alone: bool) -> bool:
        """The client that asked is gone before the end. Returns whether the answer is made all the same."""
        answer.has_client = False
        if answer.takers:
            return True
        if not answer.is_whole or answer.stream is None or not settings.reconnect_seconds:
            self._forget(answer)
            return False
        self._abandon(answer, settings, is_alone=is_alone)
        return True

    def end(self, answer: HeldAnswer, settings: ServerSettings) -> None:
        """Nothing more is generated for an answer, which has come to its end or not."""
        answer.is_over.set()
        if not answer.has_ended:
            answer.end(GenerationFailed("the request failed; the server's log has the details"))
        was_delivered = answer.has_client
        answer.has_client = False
        can_be_taken = answer.error is None and answer.is_whole
        if not can_be_taken or (was_delivered and not answer.identity.has_key):
            self._forget(answer)
        elif was_delivered and not answer.takers:
            self._hold(answer, settings)

    async def recorded(self, answer: HeldAnswer, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same events, each of which is kept as it passes."""
        try:
            async for frame in events:
                self.keep(answer, frame)
                yield frame
        except HoldfastError as error:
            answer.end(error)
            raise
        answer.end()

    def keep(self, answer: HeldAnswer, frame: bytes) -> None:
        """Keep one more event. An answer for which there is no room can be given to nobody else."""
        if not frame or not answer.is_whole:
            return
        size = len(frame) + _EVENT_BYTES
        while self.held_bytes + size > self._most_bytes and (ended := self._oldest_that_ended()) is not None:
            self._forget(ended)
        if self.held_bytes + size > self._most_bytes and not answer.takers:
            self._drop_events(answer)
            return
        answer.held_bytes += size
        self.held_bytes += size
        answer.add(NumberedEvent(len(answer.events), frame))

    def check_invariants(self) -> None:
        """Assert that what is counted is there, and that nobody waits for what is abandoned."""
        held = [answer for answers in self._by_identity.values() for answer in answers]
        assert sum(answer.held_bytes for answer in held) == self.held_bytes, "bytes are counted that nobody holds"
        assert all(answer.is_abandoned for answer in self._abandoned), "somebody waits for an answer that is abandoned"
        assert all(answer in held for answer in self._abandoned), "an answer is abandoned and nowhere held"
        assert len(self._abandoned) <= self._most_abandoned, "too many answers are abandoned"

    def _abandon(self, answer: HeldAnswer, settings: ServerSettings, *, is_alone: bool) -> None:
        answer.record.is_aborted = True
        if answer.error is not None:
            self._forget(answer)
            return
        self._hold(answer, settings)
        if is_alone:
            answer.call_later(settings.unattended_seconds, answer.pause)
        else:
            answer.pause()

    def _hold(self, answer: HeldAnswer, settings: ServerSettings) -> None:
        """Wait for somebody to take it, for so long."""
        if len(self._abandoned) == self._most_abandoned:
            self._give_up(next(iter(self._abandoned)))
        self._abandoned[answer] = None
        answer.forget_timers()
        answer.call_later(settings.reconnect_seconds, partial(self._give_up, answer))

    def _give_up(self, answer: HeldAnswer) -> None:
        answer.given_up.set()
        self._forget(answer)

    def _oldest_that_ended(self) -> HeldAnswer | None:
        return next((answer for answer in self._abandoned if answer.has_ended), None)

    def _drop_events(self, answer: HeldAnswer) -> None:
        self.held_bytes -= answer.held_bytes
        answer.held_bytes = 0
        answer.is_whole = False
        answer.events.clear()
        if answer.is_abandoned:
            self._give_up(answer)

    def _forget(self, answer: HeldAnswer) -> None:
        answer.forget_timers()
        self._abandoned.pop(answer, None)
        same = self._by_identity.get(answer.identity, [])
        if answer not in same:
            return
        same.remove(answer)
        if not same:
            del self._by_identity[answer.identity]
        self.held_bytes -= answer.held_bytes
        answer.held_bytes = 0
        answer.is_whole = False
