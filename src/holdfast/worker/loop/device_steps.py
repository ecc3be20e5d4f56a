"""Steps on an engine whose methods may raise anything: when a step fails, each sequence is tried again
alone.

The only two places at which a worker catches every exception are here, so that the fault of one
request never reaches another.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.sequences import LiveSequence

if TYPE_CHECKING:  # at run time these import MLX
    from holdfast.worker.engine.engine import Engine
    from holdfast.worker.engine.sequence import Kept

LEAST_RETRIED_TOKENS = 64  # a chunk that fails is not split into smaller pieces
FAILURES_OF_A_BROKEN_DEVICE = 3  # sequences in a row that failed alone

logger = logging.getLogger("holdfast.worker")


class DeviceFailed(Exception):
    """The model or the device raised something; only the request concerned is affected."""


class DeviceBroken(Exception):
    """The device computes nothing any more; only a new process can help."""


@contextmanager
def device_call() -> Iterator[None]:
    """Wrap calls that run a model: raises DeviceFailed for whatever they raise."""
    try:
        yield
    except Exception as error:
        raise DeviceFailed(str(error)) from error


@contextmanager
def costing_no_answer(
    message: str, *names: str, otherwise: Callable[[Exception], None] = lambda error: None
) -> Iterator[None]:
    """Log whatever is raised and call `otherwise`: no answer depends on the work in this context."""
    try:
        yield
    except Exception as error:
        logger.exception(message, *names)
        otherwise(error)


def _nothing_kept() -> Sequence[Kept]:
    return ()


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step between its dispatch and its results."""

    decided: StepPlan  # the scheduler's plan, which it expects back
    plan: StepPlan  # the dispatched part of it: without sequences that could not be opened
    sequences: tuple[LiveSequence, ...]  # in the order of `plan`
    attempts: tuple[int, ...]  # of the sequences, when it was dispatched
    started_at: float
    expected_seconds: float | None  # upper bound; None: nothing like it was measured
    collect: Callable[[], tuple[SpanResult, ...]] | None = None  # None: it was not dispatched
    take_kept: Callable[[], Sequence[Kept]] = _nothing_kept
    is_suspect: bool = False  # its dispatch raised, or the step before it failed

    def wanted(
        self, results: Sequence[SpanResult]
    ) -> Iterator[tuple[Span, LiveSequence, SpanResult]]:
        """The results of sequences whose state was not given up since."""
        for span, sequence, attempt, result in zip(
            self.plan.spans, self.sequences, self.attempts, results, strict=True
        ):
            if sequence.attempts == attempt:
                yield span, sequence, result

    def unhealthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """The sequences whose span failed."""
        return tuple(sequence for _, sequence, result in self.wanted(results) if result.failure)

    def healthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """The sequences whose span succeeded."""
        return tuple(sequence for _, sequence, result in self.wanted(results) if not result.failure)


def read_alone(engine: Engine, span: Span, *, chunk_tokens: int) -> SpanResult:
    """Prefill a freshly opened sequence up to the end of `span`.

    Returns the span's result, with the scores of everything before it. Raises what the engine does.
    """
    scores: list[TokenLogprob] = []
    start = 0
    end = span.start + span.tokens
    while True:
        tokens = min(chunk_tokens, end - start)
        is_last = start + tokens == end
        part = Span(
            request_id=span.request_id, start=start, tokens=tokens, draws=is_last and span.draws
        )
        (result,) = engine.collect(engine.dispatch(StepPlan(spans=(part,))))
        scores += result.prompt_logprobs
        if is_last or result.failure or result.refusal:
            return replace(result, prompt_logprobs=tuple(scores))
        start += tokens


class DeviceSteps:
    """Dispatches and collects steps. Device thread only."""

    def __init__(
        self,
        engine: Engine,
        *,
        retry_chunk_tokens: int,
        limit_chunks: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """retry_chunk_tokens: largest chunk of a retry. limit_chunks: called with the chunk size
        that worked after a larger one had failed.
        """
        self._engine = engine
        self._retry_chunk_tokens = retry_chunk_tokens
        self._limit_chunks = limit_chunks
        self._failures_in_a_row = 0

    def dispatch(self, flight: Flight) -> None:
        """Start a step; if that fails, the step is suspect."""
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

    def collect(self, flight: Flight, *, later: Flight | None) -> tuple[SpanResult, ...] | None:
        """Wait for a step. None if it failed: try its sequences alone, and those of the step
        dispatched after it (`later`), too.
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
                if later is not None:
                    later.is_suspect = True
            else:
                self._failures_in_a_row = 0
                return result
        self._engine.abandon_pending()
        return None

    def collect_last(self, flight: Flight) -> tuple[SpanResult, ...] | None:
        """Wait for the step under way at shutdown, before its arrays are freed. None if it failed."""
        if flight.collect is None:
            return None
        try:
            with device_call():
                return flight.collect()
        except DeviceFailed:
            logger.exception("the last step failed")
            return None

    def retry_alone(
        self, span: Span, *, reopen: Callable[[], None], was_alone: bool = False
    ) -> SpanResult:
        """Prefill one sequence alone, up to the end of a span that failed.

        The chunk is split into quarters, and if these fail, into sixteenths: it may have needed too
        much memory, or run into the GPU watchdog of macOS. The size that worked limits all later
        chunks if size was to blame: when the sequence was alone in its step (`was_alone`), or when
        a smaller size worked after a larger one had failed alone.

        reopen: opens the sequence again, with nothing computed. Raises DeviceBroken when nothing
        runs any more.
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
                "prompts are prefilled in chunks of at most %d tokens from now on: %d failed",
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
        try:
            with device_call():
                self._engine.check_device()
        except DeviceFailed as broken:  # the request is not to blame
            raise DeviceBroken(f"the device computes nothing any more: {broken}") from broken
        return SpanResult(
            request_id=span.request_id, failure=f"the model failed on this request: {failure}"
        )
