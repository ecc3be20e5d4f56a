"""The front's client of one model. Its requests outlive the workers that serve them.

When a worker dies, its open requests are sent to the next worker, together with the tokens
generated so far. The token at a position depends only on seed and position, so the stream continues
with the same tokens as without the death. A session command without an answer is sent once more. If
it then fails, the error says so if the first worker may already have carried it out.

A request that killed workers is remembered: the same request is refused immediately when it is sent
again.

A dying worker does not say which request killed it. `Isolation` finds that request: those that ran
during too many deaths are *suspects*. Each suspect runs alone for a while, which is its *trial*.

*Read-ahead* is idle work: an idle worker prefills the expected next prompt of a conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.errors import SessionFailure, WorkerUnavailable
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.commands import (
    Question,
    ReadAheadRun,
    SequenceControl,
    SequenceRequest,
    ThoughtLimit,
)
from holdfast.wire.events import (
    Answer,
    BudgetChanged,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    PrefillFinished,
    Rejected,
)
from holdfast.wire.requests import RequestId, ServiceClass, TokenIds, common_tokens
from holdfast.wire.sessions import OperationName, SessionAnswer, SessionCommand

# maximum number of read-ahead prompts that are remembered, so that the next worker can count them
# in its figures
MOST_READ_AHEAD = 8
MOST_SENDINGS = 2  # of a session command: a command that killed two workers is not sent to a third
_FAILURE_IF_REPEATED: Final[Mapping[OperationName, SessionFailure]] = {
    "open": SessionFailure.EXISTS,
    "import": SessionFailure.EXISTS,
    "fork": SessionFailure.EXISTS,
    "close": SessionFailure.NOT_FOUND,
}
"""The failure of a repeated command that shows that it may already have been carried out.

Commands that are not listed here can be repeated without harm.
"""

# deaths during one request, after fewer than FEW_TOKENS new tokens each
DEATHS_WITHOUT_PROGRESS = 3
DEATHS_WITH_PROGRESS = 12  # deaths during one request, even if it generated many tokens
FEW_TOKENS = 8
REMEMBERED_SECONDS = 3600.0  # how long a request that killed workers stays refused
MOST_REMEMBERED = 256
DEATHS_ALONE = 2  # deaths in a row of a request that runs alone, until it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the end of a worker interrupted. Empty if the worker was still loading."""

    requests: tuple[SequenceRequest, ...] = ()  # oldest first
    generated_tokens: tuple[int, ...] = ()  # new tokens of each of these requests
    # whether an answer has grown or ended since the previous worker ended
    had_progress: bool = False
    refused: tuple[RequestId, ...] = ()  # requests that are not sent to another worker


class ModelClient:
    """Implements `WorkerClient`. `SupervisedWorker` tells it when a worker has come or gone.

    Only use it on the event loop's thread.
    """

    def __init__(
        self,
        *,
        unread_bytes: int,
        on_info: Callable[[ModelInfo], None] = lambda info: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """unread_bytes: see `EventStream`. on_info: called when a worker has reported its model, or
        that its KV budget has changed.
        """
        self._unread_bytes = unread_bytes
        self._on_info = on_info
        self._open_requests: dict[RequestId, _OpenRequest] = {}  # oldest first
        # how many requests with this id were cancelled that the worker has not ended yet
        self._cancelled: Counter[RequestId] = Counter()
        self._open_commands: dict[str, _OpenCommand] = {}  # by call id, oldest first
        self._worker: WorkerLink | None = None
        self._info: ModelInfo | None = None
        self._end_reason = ""  # why the model cannot be served any more; empty while it can
        self._has_ended_any = False  # whether a request has ended since a worker was lost
        self._isolation = Isolation()
        self._clock = clock
        # digests of the requests that killed workers, and when each was refused, oldest first
        self._refused_digests: dict[bytes, float] = {}
        # prompts prefilled in advance that no request has used yet
        self._read_ahead: deque[ReadAheadRun] = deque(maxlen=MOST_READ_AHEAD)

    @property
    def info(self) -> ModelInfo:
        """The model as the last worker reported it.

        Raises WorkerUnavailable before the first worker is ready.
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
        """The number of requests that have not ended."""
        return len(self._open_requests)

    @property
    def worker(self) -> WorkerLink:
        """The link to the current worker. Raises WorkerUnavailable if there is none."""
        if self._worker is None or not self._worker.is_open:
            raise WorkerUnavailable(
                self._end_reason
                or "the worker process of the model is being replaced; please try again"
            )
        return self._worker

    def submit(self, request: SequenceRequest) -> EventStream:
        """Send one sequence, now or as soon as there is a worker; see `WorkerClient`.

        Raises ValueError if the request id is in use.
        """
        if self._end_reason:
            raise WorkerUnavailable(self._end_reason)
        if request.request_id in self._open_requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = EventStream(
            request.request_id,
            control=self._control,
            unread_bytes=self._unread_bytes,
            prompt_tokens=len(request.prompt_token_ids),
        )
        if self._is_deadly(request):
            stream.fail(
                "this request killed the worker process of the model, and is refused for an hour, or "
                "until the model is loaded again. The server's log and `holdfast doctor` say how "
                "the worker died",
                is_deadly=True,
            )
            return stream
        open_request = self._open_requests[request.request_id] = _OpenRequest(request, stream)
        if not self._isolation.is_over:
            self._send_requests()
        elif self._worker is not None and self._worker.is_open:
            _send_or_resume(open_request, self._worker)
        return stream

    async def call(self, command: Question) -> Answer:
        """Send a command, and once more if the worker dies; see `WorkerClient`."""
        if self._end_reason:
            raise WorkerUnavailable(self._end_reason)
        open_command = _OpenCommand(command, asyncio.get_running_loop().create_future())
        self._open_commands[command.call_id] = open_command
        try:
            self._send_commands()
            if isinstance(command, SessionCommand) and command.operation == "close":
                self._detach_from_session(command)
            return _with_repetition_note(await open_command.answer, open_command)
        finally:
            self._open_commands.pop(command.call_id, None)

    def _detach_from_session(self, command: SessionCommand) -> None:
        """Detach the open requests of a session that is being closed, so that they continue without
        it, even on another worker.
        """
        session_key = (command.session_id, command.scope)
        for open_request in self._open_requests.values():
            request = open_request.request
            if (request.session_id, request.scope) == session_key:
                open_request.request = request.without_session(forget=command.forget)

    def deliver_events(self, events: Sequence[Event]) -> None:
        """Pass each event to its stream. Events of closed streams are dropped."""
        for event in events:
            if not isinstance(event, RequestEvent):
                if isinstance(event, Answer) and event.call_id in self._open_commands:
                    self._open_commands.pop(event.call_id).end(event)
                elif isinstance(event, BudgetChanged) and self._info is not None:
                    self._use_info(self._info.with_budget(event))
                continue
            if event.request_id in self._cancelled:  # not of a later request with the same id
                if isinstance(event, Finished | Rejected):
                    self._cancelled -= Counter((event.request_id,))  # drops an id at zero
                continue
            open_request = self._open_requests.get(event.request_id)
            if open_request is None:
                continue
            if isinstance(event, Finished | Rejected):
                del self._open_requests[event.request_id]
                self._has_ended_any |= (
                    isinstance(event, Finished) and not open_request.request.is_idle_work
                )
            if isinstance(event, PrefillFinished | Finished):
                self._remember_read_ahead(open_request.request, event)
            open_request.stream.push(event)
        if self._isolation.alone is not None:
            self._judge_trial(self._isolation.alone)

    def use_worker(self, worker: WorkerLink, info: ModelInfo) -> int:
        """Use this worker from now on: send it all open requests, oldest first.

        Returns the number of streams that continue.
        """
        self._worker = worker
        self._use_info(info)
        resumed = sum(
            open_request.stream.was_accepted for open_request in self._open_requests.values()
        )
        for run in self._read_ahead:
            worker.send(run)
        self._send_requests()
        return resumed

    def _use_info(self, info: ModelInfo) -> None:
        """Keep what a worker has reported about the model, and pass it on."""
        self._info = info
        self._on_info(info)

    def worker_lost(self) -> Loss:
        """Record that the worker has exited. Its requests will be sent to the next worker."""
        self._worker = None
        self._cancelled.clear()
        # not sent again: no client waits for it, and it may have killed the worker
        for open_request in [
            each for each in self._open_requests.values() if each.request.is_idle_work
        ]:
            del self._open_requests[open_request.request.request_id]
            open_request.stream.fail(
                "the worker process died while it prefilled this prompt in advance"
            )
        self._reclaim_commands()
        sent_requests = [
            open_request for open_request in self._open_requests.values() if open_request.is_sent
        ]
        had_progress = self._has_ended_any or any(
            open_request.new_tokens for open_request in sent_requests
        )
        refused = self._isolation.worker_died(
            {
                open_request.request.request_id: open_request.new_tokens
                for open_request in sent_requests
                if open_request.may_be_running
            },
            open_requests=self._open_requests.keys(),
        )
        for open_request in sent_requests:
            open_request.is_sent = open_request.is_paused_for_trial = False
            open_request.counted_tokens = len(open_request.stream.token_ids)
        self._has_ended_any = False
        if refused is not None:
            self._refuse_deadly(refused)
        return Loss(
            requests=tuple(open_request.request for open_request in sent_requests),
            generated_tokens=tuple(
                len(open_request.stream.token_ids) for open_request in sent_requests
            ),
            had_progress=had_progress,
            refused=() if refused is None else (refused,),
        )

    def end_all(self, message: str) -> None:
        """Give up waiting for a worker.

        Ends each open stream with FAILED, and each command with WorkerUnavailable.
        """
        requests = tuple(self._open_requests.values())
        commands = tuple(self._open_commands.values())
        self._open_requests.clear()
        self._open_commands.clear()
        self._isolation = Isolation()
        for open_request in requests:
            open_request.stream.fail(message)
        for open_command in commands:
            open_command.fail(message)

    def close(self, message: str) -> None:
        """Refuse everything from now on, because no worker will ever come again."""
        self._worker = None
        self._end_reason = message
        self.end_all(message)

    def _remember_read_ahead(
        self, request: SequenceRequest, event: PrefillFinished | Finished
    ) -> None:
        """Remember a prompt that was prefilled in advance, until a request shares its tokens."""
        token_ids = request.prompt_token_ids
        if not request.is_idle_work:
            for run in tuple(self._read_ahead):
                is_in_scope = run.scope == request.scope
                if (
                    is_in_scope
                    and common_tokens(run.token_ids.packed, token_ids.packed) > run.start
                ):
                    self._read_ahead.remove(run)
        elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:  # not cancelled
            start = event.cache_report.cached_tokens
            self._read_ahead.append(ReadAheadRun(**request.scope, token_ids=token_ids, start=start))

    def _reclaim_commands(self) -> None:
        """Have the commands without an answer sent again, unless they killed too many workers."""
        for open_command in tuple(self._open_commands.values()):
            open_command.is_sent = False
            if open_command.sendings == MOST_SENDINGS:
                del self._open_commands[open_command.command.call_id]
                open_command.fail(
                    f"the worker process of the model died {MOST_SENDINGS} times while it had this "
                    "command; it is not tried again, and may have been carried out. The server's "
                    "log and `holdfast doctor` say how the worker died"
                )

    def _send_commands(self) -> None:
        """Send the commands that the worker does not have, unless a request has to run alone."""
        if self._worker is None or self._isolation.alone is not None:
            return
        for open_command in self._open_commands.values():
            if not open_command.is_sent and self._worker.send(open_command.command):
                open_command.is_sent = True
                open_command.sendings += 1

    def _refuse_deadly(self, request_id: RequestId) -> None:
        """Fail a request that killed workers, and refuse the same request from now on."""
        open_request = self._open_requests.pop(request_id)
        deaths = open_request.stream.resumptions + 1
        open_request.stream.fail(
            f"the worker process of the model died {deaths} times while it had this request, the "
            f"last {DEATHS_ALONE} times while the request ran alone; it is not tried again. The "
            "server's log and `holdfast doctor` say how the worker died",
            is_deadly=True,
        )
        while len(self._refused_digests) >= MOST_REMEMBERED:
            del self._refused_digests[next(iter(self._refused_digests))]
        self._refused_digests[_digest(open_request.request)] = self._clock()
        for other in [
            each for each in self._open_requests.values() if self._is_deadly(each.request)
        ]:
            del self._open_requests[other.request.request_id]  # the same request, sent concurrently
            other.stream.fail(
                "another request with the same prompt killed the worker process of the model",
                is_deadly=True,
            )

    def _is_deadly(self, request: SequenceRequest) -> bool:
        """Whether a request like this one was refused within the last hour for killing workers."""
        if not self._refused_digests:
            return False
        oldest = self._clock() - REMEMBERED_SECONDS
        self._refused_digests = {
            digest: refused_at
            for digest, refused_at in self._refused_digests.items()
            if refused_at > oldest
        }
        return _digest(request) in self._refused_digests

    def _send_requests(self) -> None:
        """Send all open requests. While there are suspects, send only the one that runs alone.

        A suspect whose stream is not read waits for its trial.
        """
        worker = self._worker
        if worker is None or not worker.is_open or self._isolation.alone is not None:
            return
        trial_id: RequestId | None = None
        if not self._isolation.is_over:
            readable = [
                request_id
                for request_id, open_request in self._open_requests.items()
                if not open_request.stream.is_paused
            ]
            trial_id = self._isolation.start_next_trial(readable)

        def may_run(request_id: RequestId) -> bool:
            if trial_id is not None:
                return request_id == trial_id
            return not self._isolation.is_untried(request_id)

        for request_id, open_request in self._open_requests.items():
            if not may_run(request_id):
                _pause_for_trial(open_request, worker)
        for request_id, open_request in self._open_requests.items():
            if may_run(request_id):
                _send_or_resume(open_request, worker)
        self._send_commands()

    def _judge_trial(self, request_id: RequestId) -> None:
        """Let other requests run once the request that runs alone has generated enough tokens, has
        ended, or is not read.
        """
        open_request = self._open_requests.get(request_id)
        if open_request is None or open_request.new_tokens >= self._isolation.tokens_to_pass:
            self._isolation.trial_passed(request_id)
        elif open_request.stream.is_paused:
            self._isolation.interrupt_trial()
        else:
            return
        self._send_requests()

    def _control(self, command: SequenceControl | ThoughtLimit) -> None:
        """Carry out a command from the consumer of a stream."""
        open_request = self._open_requests.get(command.request_id)
        if open_request is None:
            return  # the request has ended
        if isinstance(command, ThoughtLimit):  # the next worker needs it too
            open_request.request = msgspec.structs.replace(
                open_request.request, thinking_budget=command.budget
            )
            if self._worker is not None and open_request.is_sent:
                self._worker.send(command)
            return
        request_id = command.request_id
        action = command.action
        if action == "cancel":
            del self._open_requests[request_id]
            if self._worker is not None and open_request.is_sent:
                self._cancelled[request_id] += 1
        # the worker already has it paused; `_send_or_resume` resumes it when it may run
        is_held_for_trial = open_request.is_paused_for_trial and action != "cancel"
        if self._worker is not None and open_request.is_sent and not is_held_for_trial:
            self._worker.send(command)
        if self._isolation.alone == request_id and action != "resume":
            self._judge_trial(request_id)
        if action == "resume" and self._isolation.is_untried(request_id):
            self._send_requests()


@dataclass(slots=True, eq=False)
class _OpenCommand:
    """A command without an answer so far."""

    command: Question
    answer: asyncio.Future[Answer]
    sendings: int = 0  # how many workers it was sent to
    is_sent: bool = False  # to the current worker

    def end(self, answer: Answer) -> None:
        if not self.answer.done():  # otherwise nobody waits for the answer any more
            self.answer.set_result(answer)

    def fail(self, message: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(WorkerUnavailable(message))


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that has not ended, and its stream."""

    request: SequenceRequest
    stream: EventStream
    is_sent: bool = False  # whether the current worker has it
    is_paused_for_trial: bool = False  # paused here so that another request can run alone
    counted_tokens: int = 0  # tokens generated before the current worker started

    @property
    def new_tokens(self) -> int:
        """Tokens generated since the last worker died."""
        return len(self.stream.token_ids) - self.counted_tokens

    @property
    def may_be_running(self) -> bool:
        """Whether the worker may be computing this request, or has it in its queue."""
        return self.is_sent and not self.is_paused_for_trial and not self.stream.is_paused


def _digest(request: SequenceRequest) -> bytes:
    """A digest that two requests share if the device does the same work for both up to the first
    token. It leaves out the seed, the length of the answer, and bookkeeping.
    """
    computed = msgspec.structs.replace(
        request,
        request_id="",
        max_tokens=0,
        sampling=msgspec.structs.replace(request.sampling, seed=0),
        session_id="",
        is_alternative=False,
        branch_points=(),
        service=ServiceClass(),
        generated_token_ids=TokenIds(),
        predicted_token_ids=TokenIds(),
        is_kept=True,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(computed), digest_size=32).digest()


def _pause_for_trial(open_request: _OpenRequest, worker: WorkerLink) -> None:
    """Have the worker pause a request, so that another one runs alone."""
    if open_request.is_paused_for_trial or not open_request.is_sent:
        return
    open_request.is_paused_for_trial = True
    if not open_request.stream.is_paused:
        worker.send(SequenceControl(request_id=open_request.stream.request_id, action="pause"))


def _send_or_resume(open_request: _OpenRequest, worker: WorkerLink) -> None:
    """Send a request that the worker does not have, or resume one that is held."""
    stream = open_request.stream
    if open_request.is_paused_for_trial:
        open_request.is_paused_for_trial = False
        if not stream.is_paused:
            worker.send(SequenceControl(request_id=stream.request_id, action="resume"))
    if open_request.is_sent:
        return
    request = open_request.request
    if stream.was_accepted:
        stream.resume()
    if stream.token_ids:
        request = msgspec.structs.replace(
            request, generated_token_ids=TokenIds.of(stream.token_ids), want_prompt_logprobs=False
        )
    open_request.is_sent = worker.send(request)
    if stream.is_paused:
        worker.send(SequenceControl(request_id=stream.request_id, action="pause"))


def _with_repetition_note(answer: Answer, open_command: _OpenCommand) -> Answer:
    """Add a note to the answer if an earlier worker may already have carried out the command."""
    if not isinstance(answer, SessionAnswer) or not isinstance(
        open_command.command, SessionCommand
    ):
        return answer
    if open_command.sendings == 1 or answer.failure is None:
        return answer
    if answer.failure is not _FAILURE_IF_REPEATED.get(open_command.command.operation):
        return answer
    note = (
        "an earlier worker process died while it had this command, and may already have carried it "
        "out"
    )
    return msgspec.structs.replace(answer, message=f"{answer.message}; {note}")


class Isolation:
    """Decides which request has to run alone, because workers died while it ran, and which request
    is refused.

    A request is a suspect after three workers died during it, each before it had eight new tokens,
    or after twelve, even if it progresses each time: a request that kills each worker after two
    tokens makes progress with each of them. A suspect runs alone until it has generated more than
    twice the tokens that the last dead worker generated for it; each further trial is twice as
    long. If two workers in a row die during the trial, it is refused, and the deaths so far count
    against no other request. One death proves nothing: something else may have killed the worker.

    So the number of deaths that one request can cause is bounded. A suspect whose stream is not read
    cannot be tried: it waits, and the others run.
    """

    def __init__(self) -> None:
        self._records: dict[RequestId, _Record] = {}  # of the open requests
        self._untried_suspects: list[
            RequestId
        ] = []  # suspects that wait for their trial, likeliest first
        self.alone: RequestId | None = None  # the request that runs alone now

    @property
    def is_over(self) -> bool:
        """Whether no request has to run alone, neither now nor later."""
        return self.alone is None and not self._untried_suspects

    def is_untried(self, request_id: RequestId) -> bool:
        """Whether the request still has to run alone before it may run with others."""
        return request_id in self._untried_suspects

    @property
    def tokens_to_pass(self) -> int:
        """The number of tokens that the request running alone has to generate."""
        assert self.alone is not None
        record = self._records[self.alone]
        return (2 * record.tokens_per_worker[-1] + 1) << record.passed_trials

    def worker_died(
        self, generated_tokens: Mapping[RequestId, int], *, open_requests: Collection[RequestId]
    ) -> RequestId | None:
        """Record the death of a worker. Returns the request to refuse, or None.

        generated_tokens: for each request that ran, the number of tokens that this worker generated
            for it. The front cannot tell a queued request from a running one, so queued requests
            count, too.
        open_requests: all requests that have not ended; the others are forgotten.
        """
        self._records = {each: self._records.get(each, _Record()) for each in open_requests}
        self._untried_suspects = [each for each in self._untried_suspects if each in open_requests]
        for request_id, tokens in generated_tokens.items():
            self._records[request_id].tokens_per_worker.append(tokens)
        alone = self.alone
        self.alone = None
        if alone is not None and alone in generated_tokens:
            return self._died_alone(alone)
        suspects = [each for each in generated_tokens if self._records[each].is_suspect]
        self._untried_suspects = sorted(
            dict.fromkeys([*self._untried_suspects, *suspects]),
            key=lambda each: self._records[each].likelihood_order,
        )
        return None

    def _died_alone(self, request_id: RequestId) -> RequestId | None:
        """Record a death during a trial. Returns the request if that was one too many."""
        record = self._records[request_id]
        record.deaths_alone += 1
        if record.deaths_alone < DEATHS_ALONE:
            self._untried_suspects.insert(0, request_id)
            return None
        for each in self._records.values():
            each.tokens_per_worker.clear()
        self._untried_suspects.clear()
        return request_id

    def start_next_trial(self, candidates: Collection[RequestId]) -> RequestId | None:
        """Choose the next suspect among `candidates`, which runs alone from now on.

        Returns None if there is no such suspect; then all requests that are not suspects may run.
        """
        self.alone = next((each for each in self._untried_suspects if each in candidates), None)
        if self.alone is not None:
            self._untried_suspects.remove(self.alone)
        return self.alone

    def trial_passed(self, request_id: RequestId) -> None:
        """Record that the request running alone has generated `tokens_to_pass`, or has ended."""
        assert self.alone == request_id
        self.alone = None
        self._records[request_id] = _Record(
            passed_trials=self._records[request_id].passed_trials + 1
        )

    def interrupt_trial(self) -> None:
        """Stop the trial of the request running alone, because its stream is not read.

        It is tried again once its stream is read.
        """
        assert self.alone is not None
        self._untried_suspects.append(self.alone)
        self.alone = None


@dataclass(slots=True)
class _Record:
    """What `Isolation` knows of one request since it last passed a trial."""

    # tokens that each worker that died during it had generated for it, the last worker's last
    tokens_per_worker: list[int] = field(default_factory=list)
    deaths_alone: int = 0  # workers that died while only this request ran
    passed_trials: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the request must run alone, because workers died while it ran."""
        early_deaths = sum(tokens < FEW_TOKENS for tokens in self.tokens_per_worker)
        return (
            early_deaths >= DEATHS_WITHOUT_PROGRESS
            or len(self.tokens_per_worker) >= DEATHS_WITH_PROGRESS
        )

    @property
    def likelihood_order(self) -> tuple[int, bool, int]:
        """Sort key that puts the likeliest culprit first: it has not passed a trial, it generated
        tokens (otherwise it may have been queued), and only a few.
        """
        tokens = sum(self.tokens_per_worker)
        return self.passed_trials, tokens == 0, tokens
