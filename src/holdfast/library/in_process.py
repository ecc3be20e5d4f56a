"""How the library starts its worker on a thread of this process and exchanges messages with it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from holdfast.errors import WorkerUnavailable
from holdfast.front.link.event_stream import RequestEvent
from holdfast.wire.commands import (
    SHUT_DOWN,
    TELL_STATISTICS,
    Command,
    Question,
    SequenceControl,
    SequenceRequest,
)
from holdfast.wire.events import (
    Answer,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Rejected,
    WorkerFailed,
    WorkerReady,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId

DEATH = "the engine's thread ended unexpectedly"
_open_clients: set[InProcessClient] = set()  # to close before the interpreter exits
_open_clients_lock = threading.Lock()
_exit_watch: threading.Thread | None = None  # None: nothing was opened yet


class QueueInbox:
    """The worker's inbox, implemented with a queue."""

    def __init__(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """on_events: called on the device thread with the events of each step."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_events = on_events

    def put(self, command: Command) -> None:
        """Send a command. Any thread."""
        self._commands.put(command)

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """Return all waiting commands.

        If there is none, wait for one until the timeout (0: do not wait).
        """
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            commands.append(
                self._commands.get(block=timeout_seconds > 0, timeout=timeout_seconds or None)
            )
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """Pass on all events of one step. Called by the worker."""
        if events:
            self._on_events(events)

    def close(self) -> None:
        """Does nothing: the protocol `Inbox` requires it, but a queue needs no closing."""


class BlockingEventStream:
    """Iterates over the events of one request and blocks until each arrives."""

    def __init__(self, request_id: RequestId, *, cancel: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._events: queue.SimpleQueue[RequestEvent | None] = queue.SimpleQueue()
        self._is_over = False

    def __iter__(self) -> BlockingEventStream:
        return self

    def __next__(self) -> RequestEvent:
        event = None if self._is_over else self._events.get()
        if event is None:
            raise StopIteration
        self._is_over = isinstance(event, Finished | Rejected)
        return event

    def push(self, event: RequestEvent) -> None:
        """Add an event from the worker. Any thread."""
        self._events.put(event)

    def close(self) -> None:
        """End the iteration, and cancel the request unless it has finished. Any thread."""
        if not self._is_over:
            self._is_over = True
            self._cancel(self.request_id)
            self._events.put(None)


class InProcessClient:
    """Runs a worker on a thread of this process. Any thread may call any method."""

    def __init__(self, run_worker: Callable[[QueueInbox], object]) -> None:
        """run_worker: loads the model, serves the inbox until `SHUT_DOWN`, releases the device."""
        self._inbox = QueueInbox(self._deliver_events)
        # completes when the model is loaded or has failed to load
        self._started: Future[WorkerReady | WorkerFailed] = Future()
        # one for each question, in the order of the questions
        self._statistics_answers: queue.SimpleQueue[Future[WorkerStatistics]] = queue.SimpleQueue()
        self._call_answers: dict[str, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._streams: dict[RequestId, BlockingEventStream] = {}
        self._end_reason = ""  # why the worker has ended; empty while it runs
        self._thread = threading.Thread(
            target=self._run, args=(run_worker,), name="holdfast-device", daemon=False
        )
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        """The loaded model, as its worker reports it.

        Raises WorkerUnavailable before it is loaded.
        """
        if self._started.done():
            outcome = self._started.result()
            if isinstance(outcome, WorkerReady):
                return outcome.model
        raise WorkerUnavailable("the model is not loaded")

    def wait_started(self) -> WorkerReady | WorkerFailed:
        """Block until the model is loaded or has failed to load."""
        return self._started.result()

    def submit(self, request: SequenceRequest) -> BlockingEventStream:
        """Send one sequence and return its events."""
        stream = BlockingEventStream(request.request_id, cancel=self._cancel)
        with self._while_alive():
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._streams[request.request_id] = stream
            self._inbox.put(request)
        return stream

    def statistics(self) -> WorkerStatistics:
        """Ask the worker for its current statistics."""
        answer: Future[WorkerStatistics] = Future()
        with self._while_alive():
            self._statistics_answers.put(answer)
            self._inbox.put(TELL_STATISTICS)
        return answer.result()

    def call(self, command: Question) -> Answer:
        """Send a command that the worker answers once.

        Raises WorkerUnavailable if the worker has ended, or ends before it answers.
        """
        answer: Future[Answer] = Future()
        with self._while_alive():
            self._call_answers[command.call_id] = answer
            self._inbox.put(command)
        return answer.result()

    def close(self) -> None:
        """Shut the worker down and wait until it has released the device."""
        self._inbox.put(SHUT_DOWN)
        self._thread.join()

    def _run(self, run_worker: Callable[[QueueInbox], object]) -> None:
        """Run the worker on its thread. When it ends, end all open requests and calls."""
        try:
            run_worker(self._inbox)
        finally:
            error = sys.exception()
            self._fail_open_calls("the engine is closed" if error is None else f"{DEATH}: {error}")

    def _fail_open_calls(self, reason: str) -> None:
        """Fail all requests and calls, because the worker has ended. reason: for the messages."""
        with self._lock:
            self._end_reason = reason
            streams, self._streams = self._streams, {}
            calls: list[Future[Any]] = [*self._call_answers.values()]
            while not self._statistics_answers.empty():
                calls.append(self._statistics_answers.get())
        for call in calls:
            call.set_exception(WorkerUnavailable(reason))
        if not self._started.done():
            self._started.set_result(WorkerFailed(message=DEATH, fatal_input=False))
        for request_id, stream in streams.items():
            stream.push(
                Finished(
                    request_id=request_id,
                    reason=FinishReason.FAILED,
                    prompt_tokens=0,
                    completion_tokens=0,
                    error=reason,
                )
            )

    @contextlib.contextmanager
    def _while_alive(self) -> Iterator[None]:
        """Keep the worker alive while a command is sent.

        Raises WorkerUnavailable if the worker has ended.
        """
        with self._lock:
            if self._end_reason:
                raise WorkerUnavailable(self._end_reason)
            yield

    def _cancel(self, request_id: RequestId) -> None:
        """Drop the stream of a request, and tell the worker to stop generating."""
        self._streams.pop(request_id, None)
        self._inbox.put(SequenceControl(request_id=request_id, action="cancel"))

    def _deliver_events(self, events: Sequence[Event]) -> None:
        """Pass each event to its stream or call. Runs on the device thread."""
        for event in events:
            if isinstance(event, RequestEvent):
                stream = self._streams.get(event.request_id)
                if isinstance(event, Finished | Rejected):
                    self._streams.pop(event.request_id, None)
                if stream is not None:
                    stream.push(event)
            elif isinstance(event, WorkerReady | WorkerFailed):
                self._started.set_result(event)
            elif isinstance(event, WorkerStatistics) and event.in_answer:
                self._statistics_answers.get_nowait().set_result(event)
            elif isinstance(event, Answer):
                call = self._call_answers.pop(event.call_id, None)
                if call is not None:
                    call.set_result(event)


def close_before_exit(client: InProcessClient) -> None:
    """Close the client when the main thread ends, unless `close_now` is called before.

    Device threads are not daemons, because MLX would abort the process at exit. So the interpreter
    waits for them before it runs any exit handler. That is why a daemon thread, which touches no
    device, watches the main thread.
    """
    global _exit_watch
    with _open_clients_lock:
        _open_clients.add(client)
        if _exit_watch is None:
            _exit_watch = threading.Thread(
                target=_close_all_at_exit, name="holdfast-at-exit", daemon=True
            )
            _exit_watch.start()


def close_now(client: InProcessClient) -> None:
    """Close the client, so that it need not be closed at exit."""
    client.close()
    with _open_clients_lock:
        _open_clients.discard(client)


def _close_all_at_exit() -> None:
    threading.main_thread().join()
    for client in tuple(_open_clients):
        client.close()
