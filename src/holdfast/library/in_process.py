"""Link to a worker that runs on a thread of this process: for the library."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from holdfast.errors import WorkerUnavailable
from holdfast.front.link.event_stream import RequestEvent
from holdfast.wire.commands import (
    SHUT_DOWN,
    TELL_STATISTICS,
    Command,
    SequenceControl,
    SequenceRequest,
)
from holdfast.wire.events import (
    Event,
    Finished,
    FinishReason,
    LoadProgress,
    ModelInfo,
    Rejected,
    WorkerFailed,
    WorkerReady,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand

DEATH = "the engine's thread ended unexpectedly"
_open: set[InProcessClient] = set()
_lock = threading.Lock()
_watch: threading.Thread | None = None


class QueueInbox:
    """Inbox over a queue of this process.

    `deliver` is called on the device thread with the events of each step.
    """

    def __init__(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver = deliver

    def put(self, command: Command) -> None:
        """Hand a command to the device thread; any thread."""
        self._commands.put(command)

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one up to the timeout (0: polls)."""
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            commands.append(
                self._commands.get(block=timeout_seconds > 0, timeout=timeout_seconds or None)
            )
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """Give all events of one step to their readers."""
        if events:
            self._deliver(events)

    def close(self) -> None:
        """Nothing to let go of."""


class BlockingEventStream:
    """Iterator over the events of one request, for a plain thread.

    `close` (from any thread) cancels the request.
    """

    def __init__(self, request_id: RequestId, *, cancel: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._events: queue.SimpleQueue[RequestEvent | None] = queue.SimpleQueue()
        self._over = False

    def __iter__(self) -> BlockingEventStream:
        return self

    def __next__(self) -> RequestEvent:
        event = None if self._over else self._events.get()
        if event is None:
            raise StopIteration
        self._over = isinstance(event, Finished | Rejected)
        return event

    def push(self, event: RequestEvent) -> None:
        """Add an event from the worker; any thread."""
        self._events.put(event)

    def close(self) -> None:
        """Stop listening; tells the worker to stop if it has not finished."""
        if not self._over:
            self._over = True
            self._cancel(self.request_id)
            self._events.put(None)


class InProcessClient:
    """Starts a worker on a non-daemon device thread and speaks to it from plain threads: any of
    them may call any method.

    `run_worker` is the worker's whole life on its thread: load, serve the inbox until `SHUT_DOWN`,
    let go of the device.
    """

    def __init__(
        self,
        run_worker: Callable[[QueueInbox], object],
        *,
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        self._inbox = QueueInbox(self._deliver)
        self._on_progress = on_progress
        self._started: Future[WorkerReady | WorkerFailed] = Future()
        self._statistics: queue.SimpleQueue[Future[WorkerStatistics]] = queue.SimpleQueue()
        self._session_calls: dict[str, Future[SessionAnswer]] = {}
        self._lock = threading.Lock()
        self._streams: dict[RequestId, BlockingEventStream] = {}
        self._gone = ""
        self._thread = threading.Thread(
            target=self._run, args=(run_worker,), name="holdfast-device", daemon=False
        )
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        """What the worker knows of its model. Raises WorkerUnavailable before it is ready."""
        if self._started.done():
            outcome = self._started.result()
            if isinstance(outcome, WorkerReady):
                return outcome.model
        raise WorkerUnavailable("the model is not loaded")

    def wait_started(self) -> WorkerReady | WorkerFailed:
        """Block until the model serves or has failed to load."""
        return self._started.result()

    def submit(self, request: SequenceRequest) -> BlockingEventStream:
        """Send one sequence and iterate over its events."""
        stream = BlockingEventStream(request.request_id, cancel=self._cancel)
        with self._alive():
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._streams[request.request_id] = stream
            self._inbox.put(request)
        return stream

    def statistics(self) -> WorkerStatistics:
        """The worker's counters of now."""
        answer: Future[WorkerStatistics] = Future()
        with self._alive():
            self._statistics.put(answer)
            self._inbox.put(TELL_STATISTICS)
        return answer.result()

    def ask_session(self, command: SessionCommand) -> SessionAnswer:
        """Have a session command carried out.

        Raises WorkerUnavailable when the worker is gone, or dies meanwhile.
        """
        answer: Future[SessionAnswer] = Future()
        with self._alive():
            self._session_calls[command.call_id] = answer
            self._inbox.put(command)
        return answer.result()

    def close(self) -> None:
        """End the worker in order and wait until its thread has let go of the device."""
        self._inbox.put(SHUT_DOWN)
        self._thread.join()

    def _run(self, run_worker: Callable[[QueueInbox], object]) -> None:
        try:
            run_worker(self._inbox)
        finally:
            error = sys.exception()
            self._end("the engine is closed" if error is None else f"{DEATH}: {error}")

    def _end(self, gone: str) -> None:
        with self._lock:
            self._gone = gone
            streams, self._streams = self._streams, {}
            calls: list[Future[SessionAnswer] | Future[WorkerStatistics]] = [
                *self._session_calls.values()
            ]
            while not self._statistics.empty():
                calls.append(self._statistics.get())
        for call in calls:
            call.set_exception(WorkerUnavailable(gone))
        if not self._started.done():
            self._started.set_result(WorkerFailed(message=DEATH, fatal_input=False))
        for request_id, stream in streams.items():
            stream.push(
                Finished(
                    request_id=request_id,
                    reason=FinishReason.FAILED,
                    prompt_tokens=0,
                    completion_tokens=0,
                    error=gone,
                )
            )

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """While something is handed to the worker: it cannot end before it has it.

        Raises WorkerUnavailable if it has ended.
        """
        with self._lock:
            if self._gone:
                raise WorkerUnavailable(self._gone)
            yield

    def _cancel(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)
        self._inbox.put(SequenceControl(request_id=request_id, action="cancel"))

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RequestEvent):
                is_last = isinstance(event, Finished | Rejected)
                stream = (
                    self._streams.pop(event.request_id, None)
                    if is_last
                    else self._streams.get(event.request_id)
                )
                if stream is not None:
                    stream.push(event)
            elif isinstance(event, WorkerReady | WorkerFailed):
                self._started.set_result(event)
            elif isinstance(event, WorkerStatistics):
                if event.in_answer:
                    self._statistics.get_nowait().set_result(event)
            elif isinstance(event, SessionAnswer):
                if (call := self._session_calls.pop(event.call_id, None)) is not None:
                    call.set_result(event)
            else:
                self._on_progress(event)


def close_before_exit(engine: InProcessClient) -> None:
    """Close the engine when the main thread ends, unless `closed` comes first.

    Device threads are not daemons (MLX aborts when they are), so the interpreter waits for them
    before it runs any exit handler. The watch is one: it touches no device, and there is nothing to
    wait for once the main thread is gone and all is closed.
    """
    global _watch
    with _lock:
        _open.add(engine)
        if _watch is None:
            _watch = threading.Thread(
                target=_close_all_at_the_end, name="holdfast-at-exit", daemon=True
            )
            _watch.start()


def closed(engine: InProcessClient) -> None:
    """Close the engine now; nothing is left to be done at the end."""
    engine.close()
    with _lock:
        _open.discard(engine)


def _close_all_at_the_end() -> None:
    threading.main_thread().join()
    for engine in tuple(_open):
        engine.close()
