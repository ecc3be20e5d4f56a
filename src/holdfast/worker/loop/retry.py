"""Reading one sequence alone and from its beginning, after a step that it was part of has failed."""

from __future__ import annotations

from dataclasses import replace

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.parts import Step, StepEngine


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
