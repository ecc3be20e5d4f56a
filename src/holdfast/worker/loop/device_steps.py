"""Runs steps on an engine whose methods may raise any exception: when a step fails, each of its
sequences is tried again alone.

The only two places where a worker catches all exceptions are here (`device_call`, `log_failure`), so
that a failure of one request never affects another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.sequences import LiveSequence

if TYPE_CHECKING:  # these modules import MLX, which is not needed here at run time
    from holdfast.worker.engine.engine import Engine, PendingStep

LEAST_RETRIED_TOKENS = 64  # smallest piece into which a failed chunk is split
FAILURES_OF_A_BROKEN_DEVICE = 3  # sequences in a row that failed alone

logger = logging.getLogger("holdfast.worker")


class DeviceFailed(Exception):
    """The model or the device raised an exception. It affects only the requests of that call."""


class DeviceBroken(Exception):
    """The device no longer computes anything; only a new worker process can help."""


@contextmanager
def device_call() -> Iterator[None]:
    """Wrap calls that run a model: any exception is raised as DeviceFailed."""
    try:
        yield
    except Exception as error:
        raise DeviceFailed(str(error)) from error


@contextmanager
def log_failure(
    message: str, *arguments: str, otherwise: Callable[[Exception], None] = lambda error: None
) -> Iterator[None]:
    """A context for work that no answer depends on: exceptions are logged, but not raised.

    message, arguments: the log message and the arguments to format it with.
    otherwise: called with the exception after it is logged.
    """
    try:
        yield
    except Exception as error:
        logger.exception(message, *arguments)
        otherwise(error)


@dataclass(slots=True, kw_only=True)
class DispatchedStep:
    """A step from its dispatch until its results are processed."""

    scheduled: StepPlan  # the scheduler's plan, to be reported back to it
    plan: StepPlan  # the dispatched part of that plan: without sequences that failed to open
    sequences: tuple[LiveSequence, ...]  # in the order of `plan`
    attempts: tuple[int, ...]  # `LiveSequence.attempts` of each sequence at the dispatch
    started_at: float
    expected_seconds: float | None  # upper bound; None: no similar step was measured
    pending: PendingStep | None = None  # None: not dispatched
    # whether its dispatch raised, or the step before it failed: it is not collected, but its
    # sequences are tried alone
    is_suspect: bool = False

    def current_results(
        self, results: Sequence[SpanResult]
    ) -> Iterator[tuple[Span, LiveSequence, SpanResult]]:
        """Yield the results of sequences whose state was not given up since the dispatch."""
        for span, sequence, attempt, result in zip(
            self.plan.spans, self.sequences, self.attempts, results, strict=True
        ):
            if sequence.attempts == attempt:
                yield span, sequence, result

    def unhealthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """The sequences that failed in this step."""
        return tuple(
            sequence for _, sequence, result in self.current_results(results) if result.failure
        )

    def healthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """The sequences that did not fail in this step."""
        return tuple(
            sequence for _, sequence, result in self.current_results(results) if not result.failure
        )


def prefill_alone(engine: Engine, span: Span, *, chunk_tokens: int) -> SpanResult:
    """Prefill a freshly opened sequence up to the end of `span`.

    Returns the span's result, including the scores of all earlier tokens. Raises the engine's
    exceptions.
    """
    scores: list[TokenLogprob] = []
    start = 0
    end = span.start + span.tokens
    while True:
        tokens = min(chunk_tokens, end - start, engine.longest_span(span.request_id, start))
        tokens = max(tokens, engine.shortest_span(span.request_id, start))
        is_last = start + tokens == end
        chunk = Span(
            request_id=span.request_id, start=start, tokens=tokens, samples=is_last and span.samples
        )
        (result,) = engine.collect(engine.dispatch(StepPlan(spans=(chunk,))))
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
        """retry_chunk_tokens: the largest chunk of a retry. limit_chunks: called with the chunk
        size that worked after a larger chunk failed.
        """
        self._engine = engine
        self._retry_chunk_tokens = retry_chunk_tokens
        self._limit_chunks = limit_chunks
        self._failures_in_a_row = 0

    def dispatch(self, step: DispatchedStep) -> None:
        """Dispatch a step; if that fails, mark the step as suspect."""
        if not step.sequences:
            return
        try:
            with device_call():
                step.pending = self._engine.dispatch(step.plan)
        except DeviceFailed:
            logger.exception(
                "a step of %d spans could not be dispatched; each span is tried alone",
                len(step.sequences),
            )
            step.is_suspect = True

    def collect(
        self, step: DispatchedStep, *, later: DispatchedStep | None
    ) -> tuple[SpanResult, ...] | None:
        """Wait for a step. Returns None if it failed: then the caller must try its sequences alone,
        and also those of the step dispatched after it (`later`).
        """
        if not step.sequences:
            return ()
        if step.pending is not None and not step.is_suspect:
            try:
                with device_call():
                    result = self._engine.collect(step.pending)
            except DeviceFailed:
                logger.exception(
                    "a step of %d spans failed; each span is tried alone", len(step.sequences)
                )
                if later is not None:
                    later.is_suspect = True
            else:
                self._failures_in_a_row = 0
                return result
        self._engine.abandon_pending()
        return None

    def collect_last(self, step: DispatchedStep) -> tuple[SpanResult, ...] | None:
        """At shutdown, wait for a step before its arrays are freed. Returns None if it failed."""
        if step.pending is None:
            return None
        try:
            with device_call():
                return self._engine.collect(step.pending)
        except DeviceFailed:
            logger.exception("the last step failed")
            return None

    def retry_alone(
        self, span: Span, *, reopen: Callable[[], None], was_alone: bool = False
    ) -> SpanResult:
        """Prefill one sequence alone, up to the end of a span that failed.

        The span is split into quarters, and if these fail, into sixteenths, because it may have
        needed too much memory, or too much time for the GPU watchdog of macOS. The size that worked
        limits all later chunks if the size was the cause of the failure: when the sequence was
        alone in its step (`was_alone`), or when a larger size failed alone before.

        reopen: reopens the sequence without any computed state. Raises DeviceBroken if the device
        no longer works.
        """
        chunk_sizes = self._retry_chunk_sizes(span)
        for tokens in chunk_sizes:
            try:
                with device_call():
                    reopen()
                    result = prefill_alone(self._engine, span, chunk_tokens=tokens)
            except DeviceFailed as failure:
                logger.exception(
                    "request %s also fails alone, in chunks of %d tokens", span.request_id, tokens
                )
                if tokens == chunk_sizes[-1]:
                    return self._failed_alone(span, failure)
                self._engine.abandon_pending()
            else:
                break
        self._failures_in_a_row = 0
        if tokens < span.tokens and (was_alone or tokens < chunk_sizes[0]):
            logger.warning(
                "prompts are now prefilled in chunks of at most %d tokens, because a chunk of %d "
                "tokens failed",
                tokens,
                span.tokens,
            )
            self._retry_chunk_tokens = tokens
            self._limit_chunks(tokens)
        return result

    def _retry_chunk_sizes(self, span: Span) -> tuple[int, ...]:
        """The chunk sizes, in tokens, to try one after the other for a span that failed."""
        if span.tokens <= LEAST_RETRIED_TOKENS:
            return (self._retry_chunk_tokens,)
        quarter = max(min(span.tokens, self._retry_chunk_tokens) // 4, LEAST_RETRIED_TOKENS)
        sixteenth = max(quarter // 4, LEAST_RETRIED_TOKENS)
        return (quarter, sixteenth) if sixteenth < quarter else (quarter,)

    def _failed_alone(self, span: Span, failure: DeviceFailed) -> SpanResult:
        """The result of a span that failed in a separate step. Raises DeviceBroken if the device
        is to blame.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_OF_A_BROKEN_DEVICE:
            raise DeviceBroken(
                f"{self._failures_in_a_row} requests in a row failed on the device: {failure}"
            ) from failure
        try:
            with device_call():
                self._engine.check_device()
        except DeviceFailed as broken:  # the request is not to blame
            raise DeviceBroken(f"the device no longer computes anything: {broken}") from broken
        return SpanResult(
            request_id=span.request_id, failure=f"the model failed on this request: {failure}"
        )
