"""A step that was laid out and not yet collected, and what is read back from it.

Device thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import RequestId
from holdfast.worker.engine.constraints import SequenceConstraint
from holdfast.worker.engine.head_seam import LaterLogits
from holdfast.worker.engine.plan import SpanResult
from holdfast.worker.engine.sampling import DrawnRows
from holdfast.worker.engine.scoring import drawn_logprobs
from holdfast.worker.engine.sequence import Kept, SequenceSpan

NOT_A_NUMBER = "the model's output is not a number at this position, or nothing is left to draw"
NOTHING_ALLOWED = "the grammar allows only tokens here that the request bans"


@dataclass(slots=True)
class PendingStep:
    """A step that was laid out and not yet collected."""

    spans: list[SequenceSpan]
    drawing: list[SequenceSpan]  # of each row in `drawn` the span
    # logits of what cannot be drawn before the tokens of the step before are known
    undrawn: mx.array | None
    drawn: DrawnRows | None
    scored: Mapping[RequestId, LaterLogits]  # of prompts
    pooled: dict[RequestId, mx.array]  # of prompts that are read to their end: float32 [hidden]
    kept: list[Kept]  # snapshots that the step makes
    outputs: list[mx.array]  # what has to be computed, live state included; emptied at launch


def launch(pending: PendingStep) -> None:
    """Start what a step has to compute; does not wait."""
    mx.async_eval(pending.outputs)  # type: ignore[no-untyped-call]
    pending.outputs = []  # so that the next step finds the KV buffers held by nobody else


def tell_constraints(pending: PendingStep, results: Sequence[SpanResult]) -> None:
    """What a collected step has drawn decides what may be drawn next."""
    for each, given in zip(pending.spans, results, strict=True):
        if each.sequence.constraint is not None:
            for token_id in given.token_ids:
                each.sequence.constraint.take(token_id)


def results_of(
    pending: PendingStep, prompt_logprobs: Mapping[RequestId, tuple[TokenLogprob, ...]]
) -> Iterator[SpanResult]:
    """What a step gave that has been waited for, span by span."""
    draws = _draws(pending)
    for each in pending.spans:
        request_id = each.span.request_id
        result, scored = (
            draws.get(request_id) or _embedded(pending, request_id),
            prompt_logprobs.get(request_id, ()),
        )
        if any(math.isnan(entry.logprob) for entry in scored):
            yield SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
        else:
            yield replace(result, prompt_logprobs=scored)


def _embedded(pending: PendingStep, request_id: RequestId) -> SpanResult:
    if request_id not in pending.pooled:
        return SpanResult(request_id=request_id)
    values = np.array(pending.pooled[request_id])
    if not np.isfinite(values).all():
        return SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
    length = np.linalg.norm(values.astype(np.float64))
    normalized = values / length if length else values
    return SpanResult(request_id=request_id, embedding=normalized.astype(np.float32).tobytes())


def _draws(pending: PendingStep) -> dict[RequestId, SpanResult]:
    """What each drawing span drew, read back from the device."""
    if pending.drawn is None:
        return {}
    tokens: list[int] = pending.drawn.tokens.tolist()  # type: ignore[assignment]
    healthy: list[bool] = pending.drawn.ok.tolist()  # type: ignore[assignment]
    empty = _empty_rows(pending.drawn)
    logprobs = drawn_logprobs(pending.drawn, tokens)
    results = {}
    for row, each in enumerate(pending.drawing):
        request, refusal = (
            each.sequence.request,
            _refusal(each.sequence.constraint, is_empty=row in empty),
        )
        if refusal:
            results[request.request_id] = SpanResult(request_id=request.request_id, refusal=refusal)
            continue
        if not healthy[row]:
            results[request.request_id] = SpanResult(
                request_id=request.request_id, failure=NOT_A_NUMBER
            )
            continue
        wanted: tuple[TokenLogprob, ...] = ()
        if request.want_logprobs:
            score = logprobs[row]
            wanted = (
                TokenLogprob(score.token_id, score.logprob, score.top[: request.top_logprobs]),
            )
        results[request.request_id] = SpanResult(
            request_id=request.request_id, token_ids=(tokens[row],), logprobs=wanted
        )
    return results


def _empty_rows(drawn: DrawnRows) -> list[int]:
    flags: list[bool] = [] if drawn.empty is None else drawn.empty.tolist()  # type: ignore[assignment]
    return [row for row, is_empty in enumerate(flags) if is_empty]


def _refusal(constraint: SequenceConstraint | None, *, is_empty: bool) -> str:
    if constraint is None:
        return ""
    return constraint.failure or (
        NOTHING_ALLOWED if is_empty and constraint.matcher is not None else ""
    )
