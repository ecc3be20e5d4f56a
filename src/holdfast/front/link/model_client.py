"""The front's link to a model, whichever worker serves it: requests outlive the workers that end
while they have them.

A request that a worker has taken along is sent to the next one, together with the tokens that it
has drawn so far. Which token comes at a position is decided by seed and position, so the stream
goes on with the tokens that it would have had. A session command without an answer is sent once
more; where the worker before may have done it, the failure of the second says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.errors import SessionFailure, WorkerUnavailable
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.front.link.isolation import Isolation
from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.commands import (
    ControlAction,
    ReadAheadRun,
    SequenceRequest,
    ThinkingBudget,
    ThoughtLimit,
)
from holdfast.wire.events import (
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Rejected,
    Started,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId, TokenIds, common_tokens
from holdfast.wire.sessions import OperationName, SessionAnswer, SessionCommand

MOST_READ_AHEAD = 8  # prompts that were read ahead, kept to tell the next worker
MOST_SENDINGS = 2  # of a session command: a worker that dies of one takes no third one with it
_IF_DONE_BEFORE: Final[Mapping[OperationName, SessionFailure]] = {
    "open": SessionFailure.EXISTS,
    "import": SessionFailure.EXISTS,
    "fork": SessionFailure.EXISTS,
    "close": SessionFailure.NOT_FOUND,
}
"""How a command fails that has been carried out already. All others may be repeated."""


@dataclass(slots=True, eq=False)
class _OpenCommand:
    command: SessionCommand
    answer: asyncio.Future[SessionAnswer]
    sendings: int = 0
    is_sent: bool = False  # to the worker of now

    def end(self, answer: SessionAnswer) -> None:
        if not self.answer.done():  # else nobody waits any more
            self.answer.set_result(answer)

    def fail(self, message: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(WorkerUnavailable(message))


@dataclass(slots=True, eq=False)
class _OpenRequest:
    request: SequenceRequest
    stream: EventStream
    is_sent: bool = False  # to the worker of now
    is_held: bool = False  # by that worker, for others to run alone
    counted_tokens: int = 0  # that it had when the last worker ended

    @property
    def new_tokens(self) -> int:
        """Tokens that it has drawn since the last worker ended."""
        return len(self.stream.token_ids) - self.counted_tokens

    @property
    def runs(self) -> bool:
        """Whether the worker may be computing it, or has it in its queue."""
        return self.is_sent and not self.is_held and not self.stream.is_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the end of a worker met; nothing, if it only loaded."""

    requests: tuple[SequenceRequest, ...] = ()  # that it had, oldest first
    drawn_tokens: tuple[int, ...] = ()  # of each of them
    had_progress: bool = False  # some answer had grown or ended since the worker before it ended
    refused: tuple[RequestId, ...] = ()  # that will not be sent to another one


class ModelClient:
    """See `EngineClient`.

    Who keeps the workers of the model tells it when one has come or gone. Loop's thread only.
    """

    def __init__(self, *, unread_bytes: int) -> None:
        """unread_bytes: how much of one sequence may wait here to be read; then it is paused."""
        self._unread_bytes = unread_bytes
        self._open: dict[RequestId, _OpenRequest] = {}  # oldest first
        self._asked: dict[str, _OpenCommand] = {}  # by call, oldest first
        self._worker: WorkerLink | None = None
        self._info: ModelInfo | None = None
        self._end = ""  # why nothing can be served any more
        self._has_ended_any = False  # since a worker was lost
        self._isolation = Isolation()
        # that no request has begun from
        self._read_ahead: deque[ReadAheadRun] = deque(maxlen=MOST_READ_AHEAD)
        self.resumed = 0  # streams that have gone on with another worker

    @property
    def info(self) -> ModelInfo:
        """What the last worker knew of its model.

        Raises WorkerUnavailable before the first one is ready.
        """
        if self._info is None:
            raise WorkerUnavailable("the model is not loaded yet; please try again")
        return self._info

    @property
    def is_serving(self) -> bool:
        """Whether a worker serves the model now."""
        return self._worker is not None and self._worker.is_open

    @property
    def open_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def worker(self) -> WorkerLink:
        """The link to the worker that serves now. Raises WorkerUnavailable when there is none."""
        if self._worker is None or not self._worker.is_open:
            raise WorkerUnavailable(
                self._end or "the worker process of the model is being replaced; please try again"
            )
        return self._worker

    def submit(self, request: SequenceRequest) -> EventStream:
        """Send one sequence, now or as soon as there is a worker; see `EngineClient`.

        Raises ValueError for an id in use.
        """
        if self._end:
            raise WorkerUnavailable(self._end)
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = EventStream(
            request.request_id,
            control=self._steer,
            limit_thoughts=self._limit_thoughts,
            unread_bytes=self._unread_bytes,
            prompt_tokens=len(request.prompt_token_ids),
        )
        self._open[request.request_id] = _OpenRequest(request, stream)
        self._send_what_may_run()
        return stream

    async def statistics(self) -> WorkerStatistics:
        """See `EngineClient`."""
        return await self.worker.statistics()

    async def ask_session(self, command: SessionCommand) -> SessionAnswer:
        """See `EngineClient`."""
        if self._end:
            raise WorkerUnavailable(self._end)
        asked = _OpenCommand(command, asyncio.get_running_loop().create_future())
        self._asked[command.call_id] = asked
        try:
            self._send_commands()
            return _of_last_sending(await asked.answer, asked)
        finally:
            self._asked.pop(command.call_id, None)

    def deliver(self, events: Sequence[Event]) -> None:
        """Give each event to its stream; events of requests that nobody reads any more are dropped."""
        for event in events:
            if not isinstance(event, RequestEvent):
                if (
                    isinstance(event, SessionAnswer)
                    and (asked := self._asked.pop(event.call_id, None)) is not None
                ):
                    asked.end(event)
                continue
            opened = self._open.get(event.request_id)
            if opened is None:
                continue
            if isinstance(event, Finished | Rejected):
                del self._open[event.request_id]
                self._has_ended_any |= (
                    isinstance(event, Finished) and not opened.request.is_idle_work
                )
            if isinstance(event, Started | Finished):
                self._note_read_ahead(opened.request, event)
            opened.stream.push(event)
        if self._isolation.alone is not None:
            self._look_at_who_runs_alone(self._isolation.alone)

    def begin_with(self, worker: WorkerLink) -> int:
        """A worker serves from now on: send it what is open, first what earlier ones had.

        Returns how many streams go on.
        """
        self._worker, self._info = worker, worker.info
        resumed = sum(opened.stream.was_accepted for opened in self._open.values())
        self.resumed += resumed
        for run in self._read_ahead:
            worker.note_read_ahead(run)
        self._send_what_may_run()
        return resumed

    def lose_worker(self) -> Loss:
        """The worker has ended, by itself or by force. What it had is sent to the next one."""
        self._worker = None
        self._end_idle_work()
        self._take_commands_back()
        had = [opened for opened in self._open.values() if opened.is_sent]
        had_progress = self._has_ended_any or any(opened.new_tokens for opened in had)
        refused = self._isolation.worker_died(
            {opened.request.request_id: opened.new_tokens for opened in had if opened.runs},
            had_progress=had_progress,
            open_requests=self._open.keys(),
        )
        for opened in had:
            opened.is_sent = opened.is_held = False
            opened.counted_tokens = len(opened.stream.token_ids)
        self._has_ended_any = False
        if refused is not None:
            self._refuse(refused)
        return Loss(
            requests=tuple(opened.request for opened in had),
            drawn_tokens=tuple(len(opened.stream.token_ids) for opened in had),
            had_progress=had_progress,
            refused=() if refused is None else (refused,),
        )

    def end_all(self, message: str) -> None:
        """No worker will come in time: each open stream ends with one FAILED, each command with
        WorkerUnavailable.
        """
        opened, self._open = self._open, {}
        self._isolation = Isolation()
        for each in opened.values():
            each.stream.fail(message)
        asked, self._asked = self._asked, {}
        for call in asked.values():
            call.fail(message)

    def close(self, message: str) -> None:
        """No worker will ever come again."""
        self._worker, self._end = None, message
        self.end_all(message)

    def _note_read_ahead(self, request: SequenceRequest, event: Started | Finished) -> None:
        """Remember a prompt that was read ahead, and forget those that a request has begun from or
        has read itself.
        """
        token_ids = request.prompt_token_ids
        if not request.is_idle_work:
            for run in tuple(self._read_ahead):
                if (
                    run.tenant == request.tenant
                    and common_tokens(run.token_ids.packed, token_ids.packed) > run.start
                ):
                    self._read_ahead.remove(run)
        elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
            start = event.memory.cached_tokens
            self._read_ahead.append(
                ReadAheadRun(tenant=request.tenant, token_ids=token_ids, start=start)
            )

    def _end_idle_work(self) -> None:
        """What nobody waits for is not sent again: it may have been what the worker died of."""
        for opened in [each for each in self._open.values() if each.request.is_idle_work]:
            del self._open[opened.request.request_id]
            opened.stream.fail("the worker that was to read it has ended")

    def _take_commands_back(self) -> None:
        for asked in tuple(self._asked.values()):
            asked.is_sent = False
            if asked.sendings == MOST_SENDINGS:
                del self._asked[asked.command.call_id]
                asked.fail(
                    f"the worker process of the model ended {MOST_SENDINGS} times while it had "
                    "this command, which is not tried "
                    "again; what it was to do may be done. The server's log and `holdfast doctor` "
                    "say how it ended"
                )

    def _send_commands(self) -> None:
        """Those that the worker of now does not have; none beside a request that is to run alone."""
        if self._worker is None or not self._worker.is_open or self._isolation.alone is not None:
            return
        for asked in self._asked.values():
            if not asked.is_sent:
                # it has just gone: the next one gets it
                with contextlib.suppress(WorkerUnavailable):
                    self._worker.send_session(asked.command)
                    asked.is_sent = True
                    asked.sendings += 1

    def _refuse(self, request_id: RequestId) -> None:
        opened = self._open.pop(request_id)
        deaths = opened.stream.resumptions + 1
        opened.stream.fail(
            f"the worker process of the model died {deaths} times while it had this request, the "
            "last time while the request ran "
            "alone; it is not tried again. The server's log and `holdfast doctor` say how the "
            "worker died",
            is_deadly=True,
        )

    def _send_what_may_run(self) -> None:
        """All that is open; while requests are tried alone, one of those.

        A suspect that nobody reads waits for its trial.
        """
        if self._worker is None or not self._worker.is_open or self._isolation.alone is not None:
            return
        able = [
            request_id for request_id, opened in self._open.items() if not opened.stream.is_paused
        ]
        alone = self._isolation.next_of(able)
        for request_id, opened in self._open.items():
            if request_id != alone and (
                alone is not None or self._isolation.is_untried(request_id)
            ):
                self._hold(opened)
        if alone is not None:
            self._let_run(self._open[alone])
            return
        for request_id, opened in self._open.items():
            if not self._isolation.is_untried(request_id):
                self._let_run(opened)
        self._send_commands()

    def _hold(self, opened: _OpenRequest) -> None:
        """Have the worker, if it has this request, set it aside for another one to run alone."""
        if opened.is_held or not opened.is_sent:
            return
        opened.is_held = True
        if not opened.stream.is_paused:
            self.worker.steer(opened.request.request_id, "pause")

    def _let_run(self, opened: _OpenRequest) -> None:
        """Send a request that the worker does not have; have it go on with one that it holds."""
        worker, stream = self.worker, opened.stream
        if opened.is_held:
            opened.is_held = False
            if not stream.is_paused:
                worker.steer(stream.request_id, "resume")
        if opened.is_sent:
            return
        if opened.stream.was_accepted:
            stream.resume()
        with contextlib.suppress(WorkerUnavailable):  # it has just gone: the next one gets it
            worker.submit(_continued(opened))
            opened.is_sent = True
        if stream.is_paused:
            worker.steer(stream.request_id, "pause")

    def _look_at_who_runs_alone(self, request_id: RequestId) -> None:
        """Let others run once this one has drawn enough, has ended, or is not read."""
        opened = self._open.get(request_id)
        if opened is None or opened.new_tokens >= self._isolation.tokens_to_pass:
            self._isolation.has_passed(request_id)
        elif opened.stream.is_paused:
            self._isolation.interrupt_trial()
        else:
            return
        self._send_what_may_run()

    def _limit_thoughts(self, request_id: RequestId, budget: ThinkingBudget) -> None:
        """From now on, at the next worker too."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        opened.request = msgspec.structs.replace(opened.request, thinking_budget=budget)
        if self._worker is not None and opened.is_sent:
            self._worker.limit_thoughts(ThoughtLimit(request_id=request_id, budget=budget))

    def _steer(self, request_id: RequestId, action: ControlAction) -> None:
        """What the reader of a stream wants."""
        opened = self._open.get(request_id)
        if opened is None:
            return  # it has ended
        if action == "cancel":
            del self._open[request_id]
        if (
            self._worker is not None
            and opened.is_sent
            and not (opened.is_held and action != "cancel")
        ):
            self._worker.steer(request_id, action)
        if self._isolation.alone == request_id and action != "resume":
            self._look_at_who_runs_alone(request_id)
        if action == "resume" and self._isolation.is_untried(request_id):
            self._send_what_may_run()


def _of_last_sending(answer: SessionAnswer, asked: _OpenCommand) -> SessionAnswer:
    """The answer to a command, of which an earlier worker may have done what this one was asked
    for.
    """
    if (
        asked.sendings == 1
        or answer.failure is None
        or answer.failure is not _IF_DONE_BEFORE.get(asked.command.operation)
    ):
        return answer
    note = (
        "the worker process ended while it had this command, so it may be this very command that "
        "has done it"
    )
    return msgspec.structs.replace(answer, message=f"{answer.message}; {note}")


def _continued(opened: _OpenRequest) -> SequenceRequest:
    """A request as the next worker is to have it: behind the tokens that were drawn, and without
    what was said already.
    """
    if not opened.stream.token_ids:
        return opened.request
    return msgspec.structs.replace(
        opened.request,
        generated_token_ids=TokenIds.of(opened.stream.token_ids),
        want_prompt_logprobs=False,
    )
