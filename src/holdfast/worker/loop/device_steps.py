"""Running steps on an engine that may raise anything at any time: a step that fails is tried again,
each sequence alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.parts import Step, StepEngine
from holdfast.worker.loop.sequences import Flight

logger = logging.getLogger("holdfast.worker")
LEAST_RETRIED_TOKENS = 64  # a chunk that fails is not tried in smaller pieces than this
# sequences in a row, each run alone, without one success between them
FAILURES_OF_A_BROKEN_DEVICE = 3


class DeviceFailed(Exception):
    """A model or the device raised something; the cause says what.

    Harms those only whose call it was.
    """


class DeviceBroken(Exception):
    """Nothing runs on the device any more; only a new process can help."""


@contextmanager
def device_call() -> Iterator[None]:
    """For what runs a model.

    Raises DeviceFailed for whatever that raises: it must not end the other requests.
    """
    try:
        yield
    except Exception as error:
        raise DeviceFailed(str(error)) from error


@contextmanager
def costing_no_answer(
    message: str, *names: str, otherwise: Callable[[Exception], None] = lambda error: None
) -> Iterator[None]:
    """Log whatever is raised, and do `otherwise`: nobody's answer depends on what is done in this
    context.
    """
    try:
        yield
    except Exception as error:
        logger.exception(message, *names)
        otherwise(error)


def read_alone(engine: StepEngine[Step], span: Span, *, chunk_tokens: int) -> SpanResult:
    """Read a freshly opened sequence up to the end of `span`.

    The result stands for the span's, with the scores of all before it.

    Raises what the engine raises.
    """
    scores: list[TokenLogprob] = []
    start, end = 0, span.start + span.tokens
    while True:
        tokens = min(chunk_tokens, end - start)
        is_last = start + tokens == end
        part = Span(
            request_id=span.request_id, start=start, tokens=tokens, draws=is_last and span.draws
        )
        (given,) = engine.collect(engine.dispatch(StepPlan(spans=(part,))))
        scores += given.prompt_logprobs
        if is_last or given.failure or given.refusal:
            return replace(given, prompt_logprobs=tuple(scores))
        start += tokens


class DeviceSteps(Generic[Step]):
    """Dispatches and collects. Device thread only."""

    def __init__(
        self,
        engine: StepEngine[Step],
        *,
        retry_chunk_tokens: int,
        limit_chunks: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """retry_chunk_tokens: largest chunk of a retry. limit_chunks: told the size that worked
        after a larger one had failed.
        """
        self._engine, self._retry_chunk_tokens, self._limit_chunks = (
            engine,
            retry_chunk_tokens,
            limit_chunks,
        )
        self._failures_in_a_row = 0

    def dispatch(self, flight: Flight) -> None:
        """Start a step; one that cannot be dispatched is suspect."""
        if not flight.sequences:
            return
        try:
            with device_call():
                pending = self._engine.dispatch(flight.plan)
        except DeviceFailed:
            logger.exception(
                "a step of %d spans could not be dispatched; each is tried alone",
                len(flight.sequences),
            )
            flight.is_suspect = True
        else:
            flight.collect = functools.partial(self._engine.collect, pending)
            flight.take_kept = functools.partial(self._engine.take_kept, pending)

    def collect(self, flight: Flight, *, behind: Flight | None) -> tuple[SpanResult, ...] | None:
        """Wait for a step.

        None when it failed: its sequences have to be tried alone, and so have those of the step
        behind it.
        """
        if not flight.sequences:
            return ()
        if flight.collect is not None and not flight.is_suspect:
            try:
                with device_call():
                    result = flight.collect()
            except DeviceFailed:
                logger.exception(
                    "a step of %d spans failed; each is tried alone", len(flight.sequences)
                )
                if behind is not None:
                    behind.is_suspect = True
            else:
                self._failures_in_a_row = 0
                return result
        self._engine.abandon_pending()
        return None

    def collect_last(self, flight: Flight) -> tuple[SpanResult, ...] | None:
        """Let the step under way end before its arrays are dropped.

        None when it failed; nobody waits for it.
        """
        if flight.collect is None:
            return None
        try:
            with device_call():
                return flight.collect()
        except DeviceFailed:
            logger.exception("the last step failed")
            return None

    def _check_device(self) -> None:
        """Who failed is not to blame when nothing can be computed at all. Raises DeviceBroken then."""
        try:
            with device_call():
                self._engine.check_device()
        except DeviceFailed as failure:
            raise DeviceBroken(f"the device computes nothing any more: {failure}") from failure

    def retry_alone(
        self, span: Span, *, reopen: Callable[[], None], was_alone: bool = False
    ) -> SpanResult:
        """Read one sequence alone, up to the end of a span that failed.

        Raises DeviceBroken when nothing runs any more.

        The chunk is split into quarters, and if these fail, into sixteenths: it may have needed too
        much memory, or run into the GPU watchdog of macOS. The size that worked limits all later
        chunks if size was to blame: when the sequence was alone in its step (`was_alone`), or when
        a smaller size worked after a larger one had failed alone.

        reopen: opens the sequence anew, with nothing read.
        """
        sizes = self._retry_sizes(span)
        for tokens in sizes:
            try:
                with device_call():
                    reopen()
                    result = read_alone(self._engine, span, chunk_tokens=tokens)
            except DeviceFailed as failure:
                logger.exception(
                    "request %s fails alone too, in chunks of %d tokens", span.request_id, tokens
                )
                if tokens == sizes[-1]:
                    return self._failed_alone(span, failure)
                self._engine.abandon_pending()
            else:
                break
        self._failures_in_a_row = 0
        if tokens < span.tokens and (was_alone or tokens < sizes[0]):
            logger.warning(
                "prompts are read in chunks of at most %d tokens from now on: %d failed",
                tokens,
                span.tokens,
            )
            self._retry_chunk_tokens = tokens
            self._limit_chunks(tokens)
        return result

    def _retry_sizes(self, span: Span) -> tuple[int, ...]:
        if span.tokens <= LEAST_RETRIED_TOKENS:
            return (self._retry_chunk_tokens,)
        first = max(min(span.tokens, self._retry_chunk_tokens) // 4, LEAST_RETRIED_TOKENS)
        second = max(first // 4, LEAST_RETRIED_TOKENS)
        return (first, second) if second < first else (first,)

    def _failed_alone(self, span: Span, failure: DeviceFailed) -> SpanResult:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_OF_A_BROKEN_DEVICE:
            raise DeviceBroken(
                f"{self._failures_in_a_row} requests in a row failed on the device: {failure}"
            ) from failure
        self._check_device()
        return SpanResult(
            request_id=span.request_id, failure=f"the model failed on this request: {failure}"
        )
