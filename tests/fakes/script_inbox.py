"""An inbox without a link: a script determines what arrives between steps, and everything sent is
recorded.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.wire.cache_map import CacheMap
from holdfast.wire.commands import SHUT_DOWN, Command, SequenceControl
from holdfast.wire.events import (
    Accepted,
    Event,
    Finished,
    Rejected,
    Started,
    TokensGenerated,
    WorkerStatistics,
)
from holdfast.wire.sessions import SessionAnswer

LONGEST_POLL_SECONDS = 0.1  # a worker that waits longer is idle


def cancel(request_id: str) -> SequenceControl:
    return SequenceControl(action="cancel", request_id=request_id)


def pause(request_id: str) -> SequenceControl:
    return SequenceControl(action="pause", request_id=request_id)


def resume(request_id: str) -> SequenceControl:
    return SequenceControl(action="resume", request_id=request_id)


class ScriptInbox:
    """Returns one entry of the script per call; at the end, shuts down as soon as all requests have
    ended.

    in_turn: return an entry only after all requests of earlier ones have ended.
    """

    def __init__(
        self,
        script: Iterable[Sequence[Command]],
        *,
        on_receive: Callable[[], None] = lambda: None,
        in_turn: bool = False,
    ) -> None:
        self._script, self._in_turn = list(script), in_turn
        self._on_receive = on_receive
        self._asked: Counter[str] = Counter()
        self.events: list[Event] = []
        self.is_closed = False
        self.patience = 100_000
        self._nothing_comes = threading.Event()

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        self._on_receive()
        self.patience -= 1
        assert self.patience > 0, "the loop does not come to an end"
        if self._script and not (self._in_turn and self.open_requests()):
            commands = list(self._script.pop(0))
            self._asked.update(
                command.call_id for command in commands if hasattr(command, "call_id")
            )
            return commands
        if not self.open_requests() or timeout_seconds > LONGEST_POLL_SECONDS:
            return [SHUT_DOWN]
        self._nothing_comes.wait(timeout_seconds)
        return []

    def send(self, events: Sequence[Event]) -> None:
        assert not self.is_closed
        self.events += events

    def close(self) -> None:
        self.is_closed = True

    def open_requests(self) -> Counter[str]:
        """Requests without an end, and commands without an answer."""
        answered = Counter(
            event.call_id for event in self.events if isinstance(event, SessionAnswer | CacheMap)
        )
        return self._open() + (self._asked - answered)

    def _open(self) -> Counter[str]:
        accepted = Counter(event.request_id for event in self.events if isinstance(event, Accepted))
        return accepted - Counter(
            event.request_id for event in self.events if isinstance(event, Finished)
        )

    def of(self, request_id: str) -> list[Event]:
        """All events of one request."""
        return [event for event in self.events if getattr(event, "request_id", None) == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for event in self.of(request_id)
            if isinstance(event, TokensGenerated)
            for token in event.token_ids
        ]

    def finished(self, request_id: str) -> Finished:
        (finished,) = [event for event in self.of(request_id) if isinstance(event, Finished)]
        return finished

    def started(self, request_id: str) -> Started:
        (started,) = [event for event in self.of(request_id) if isinstance(event, Started)]
        return started

    def check_protocol(
        self, *, drawn_before: Mapping[str, int] | None = None, all_have_ended: bool = True
    ) -> None:
        """Accepted first, one Finished last; Rejected alone; counts agree. drawn_before: tokens
        drawn by other workers.
        """
        by_request: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if not isinstance(event, WorkerStatistics) and hasattr(event, "request_id"):
                by_request[event.request_id].append(event)
        for events in by_request.values():
            if isinstance(events[0], Rejected):
                assert len(events) == 1
                continue
            kinds = [type(event) for event in events]
            assert kinds[0] is Accepted
            assert kinds.count(Accepted) == 1
            assert kinds.count(Finished) <= 1
            if not all_have_ended and Finished not in kinds:
                continue
            assert kinds[-1] is Finished
            drawn = (drawn_before or {}).get(events[0].request_id, 0) + sum(
                len(event.token_ids) for event in events if isinstance(event, TokensGenerated)
            )
            assert events[-1].completion_tokens == drawn
