"""Executes step plans: one forward pass (as the layout has it), one vectorized draw.

Device thread only.

Steps can be pipelined: `dispatch` lays a step out lazily, with the tokens that the step before is
still drawing; it is launched when that one has ended. Building the graph of the next step thus
overlaps with computing this one, and nothing holds the KV buffers of a running step when the next
one starts, so they are updated in place. (Launching earlier copies every KV buffer once per step on
the CPU: measured 3.5 ms against 0.3 ms at 134 MB.)

Where a sequence is constrained, what it may draw depends on the token before, which the host has to
know. Then the forward pass is laid out and launched as ever, and the draw follows while it runs:
the token is taken, the mask filled, the draw laid out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from holdfast.errors import NoEmbeddings
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import RequestId, SamplingParams, TokenIds
from holdfast.worker.engine.constraints import Constraints, SequenceConstraint
from holdfast.worker.engine.host_sampling import Scores
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import KeepPolicy, Span, SpanResult, StepPlan
from holdfast.worker.engine.sampling import DrawnRows, advance, limits_of, sample, score_tokens
from holdfast.worker.engine.seams import LaterLogits, StepLogits
from holdfast.worker.engine.sequence import (
    EngineSequence,
    Kept,
    Prefix,
    SequenceSpan,
    keep_due,
    keep_everything,
)
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.live import LiveState, ModelForm

NOT_A_NUMBER = "the model's output is not a number at this position, or nothing is left to draw"
NOTHING_ALLOWED = "the grammar allows only tokens here that the request bans"
# of float32 logits that are there at a time; half as much more where the model computes in 16 bits
PIECE_BYTES = 32 << 20


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


def prompt_logprobs(
    logits: LaterLogits,
    token_ids: Sequence[int],
    *,
    top_logprobs: int,
    vocab_size: int,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of prompt tokens; logits: of the positions before each of them.

    Computed and read back a piece after the other, none of which has more logits than fit in
    `piece_bytes` or one row.
    """
    rows = max(1, piece_bytes // (4 * vocab_size))
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), rows):
        piece = token_ids[start : start + rows]
        scores = score_tokens(
            logits.of(start, start + len(piece)),
            mx.array(list(piece), dtype=mx.int32),
            top_logprobs=top_logprobs,
        )
        found.extend(_logprobs(scores, piece))
    return tuple(found)


def drawn_logprobs(drawn: DrawnRows, tokens: list[int]) -> list[TokenLogprob]:
    """The log-probability of every drawn row, with as many rivals as any row wants; empty when no
    row wants them.
    """
    return [] if drawn.scores is None else list(_logprobs(drawn.scores, tokens))


def _logprobs(scores: Scores, token_ids: Sequence[int]) -> Iterator[TokenLogprob]:
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    tops = _top_rows(scores.top_ids, scores.top_logprobs, rows=len(chosen))
    return (
        TokenLogprob(token_id, value, top)
        for token_id, value, top in zip(token_ids, chosen, tops, strict=True)
    )


def _top_rows(
    ids: mx.array | None, values: mx.array | None, *, rows: int
) -> list[tuple[tuple[int, float], ...]]:
    if ids is None or values is None:
        return [()] * rows
    id_rows: list[list[int]] = ids.tolist()  # type: ignore[assignment]
    value_rows: list[list[float]] = values.tolist()  # type: ignore[assignment]
    return [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(id_rows, value_rows, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCosts:
    """Bytes that a sequence's live state takes, for each token and once; and in which form it can
    be kept.
    """

    bytes_per_token: int
    fixed_bytes: int
    # of what can be kept of a sequence; None when its layers have no snapshot form
    form: ModelForm | None


class Engine:
    """Live sequences of one model, advanced step by step."""

    def __init__(
        self, runner: Runner, *, vocab_size: int, constraints: Constraints | None = None
    ) -> None:
        """constraints: of what sequences may draw; None: of a model that takes no grammars."""
        self._runner, self._vocab_size = runner, vocab_size
        self._constraints = constraints or Constraints(None, vocab_size=vocab_size)
        self._sequences: dict[RequestId, EngineSequence] = {}
        # the first is launched, the others are laid out behind it
        self._under_way: deque[PendingStep] = deque()

    @property
    def runs_ahead(self) -> bool:
        """Whether it pays to dispatch a step before the last one is collected.

        On a CPU it does not: launching takes almost as long as the step itself, since MLX lets only
        a few tasks wait.
        """
        return mx.default_device() != mx.Device(mx.cpu)

    @property
    def embedding_dimensions(self) -> int:
        """Of a prompt that is pooled; 0: the model's hidden states cannot be reached."""
        return self._runner.hidden_size

    @property
    def mixes_chunks(self) -> bool:
        """Whether prompt chunks share a forward pass with decoding rows."""
        return self._runner.mixes_chunks

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        prefix: Prefix | None = None,
        keep: KeepPolicy | None = None,
    ) -> LiveState:
        """Begin a sequence, or begin it again after a preemption with the tokens that it had
        generated.

        prefix: what to begin from; the tokens that the returned state holds are not to be read.
        keep: what to copy out while it runs. Raises SnapshotMismatch when the prefix does not fit
        the model, InvalidRequest when the grammar is none or the model cannot embed; the sequence
        is not open then.
        """
        assert request.request_id not in self._sequences, f"sequence {request.request_id} is open"
        if request.pooling is not None and not self.embedding_dimensions:
            raise NoEmbeddings
        live = LiveState(self._runner.fresh_layers())
        sequence = EngineSequence.begin(
            request, live=live, vocab_size=self._vocab_size, generated=generated
        )
        sequence.constraint = self._constraints.of(request, generated=generated)
        # now that nothing of the request can be wrong any more: what is taken over is gone
        if prefix is not None:
            sequence.start_from(prefix)
        sequence.live.reserve(capacity_tokens)
        sequence.keep = keep
        self._sequences[request.request_id] = sequence
        return sequence.live

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Reserve more room; the next append begins another buffer, or copies once where layers
        keep to one.
        """
        self._sequences[request_id].live.reserve(capacity_tokens)

    def limit_thoughts(
        self, request_id: RequestId, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        """Give an open sequence another thinking budget.

        No step with a span of it may be under way.

        generated: all tokens that it has drawn.
        """
        sequence = self._sequences[request_id]
        sequence.constraint = self._constraints.with_budget(
            sequence.constraint, budget, generated=generated
        )

    def close(self, request_id: RequestId) -> None:
        """Drop a sequence and its state.

        Steps that are under way may still hold it; their results for it are to be ignored.
        """
        del self._sequences[request_id]

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Lay out a step, and launch it when nothing else is under way; does not wait.

        Behind a step with constrained sequences that is not launched nothing can be laid out: their
        tokens are not drawn yet.
        """
        assert all(ahead.undrawn is None for ahead in self._under_way), (
            "the step before is not drawn yet"
        )
        spans = [SequenceSpan(self._sequences[span.request_id], span) for span in plan.spans]
        logits = self._runner.forward(spans, StepContext())
        pending = self._draw(spans, logits)
        self._pool(pending, logits.hidden)
        for each in spans:
            self._keep_due(each, pending)
            pending.outputs.extend(each.sequence.live.arrays())
        self._trim_the_others(pending)
        self._under_way.append(pending)
        if len(self._under_way) == 1:
            launch(pending)
            self._draw_late(pending)
        return pending

    def collect(self, pending: PendingStep) -> tuple[SpanResult, ...]:
        """Wait for a step, launch the one that was laid out behind it, and return the results, one
        per span.
        """
        assert self._under_way[0] is pending, "steps are collected in the order of their dispatch"
        try:
            prompt_logprobs = self._wait(pending)
        finally:
            self._under_way.popleft()
            if self._under_way:
                launch(self._under_way[0])
        results = tuple(results_of(pending, prompt_logprobs))
        tell_constraints(pending, results)
        if self._under_way:
            self._draw_late(self._under_way[0])
        return results

    def take_kept(self, pending: PendingStep) -> list[Kept]:
        """The snapshots that a collected step has made, evaluated."""
        kept, pending.kept = pending.kept, []
        return kept

    def keep_rest(self, request_id: RequestId) -> Kept | None:
        """Copy out what has not been kept of a sequence that is about to be closed; does not wait.

        None when its layers have no snapshot form.
        """
        sequence = self._sequences[request_id]
        if sequence.live.tokens == 0 or sequence.live.is_foreign:
            return None
        kept = keep_everything(sequence)
        mx.async_eval(list(kept.arrays()))  # type: ignore[no-untyped-call]
        return kept

    def _keep_due(self, each: SequenceSpan, pending: PendingStep) -> None:
        sequence = each.sequence
        sequence.live.tokens = each.span.start + each.span.tokens
        if sequence.keep is None:
            return
        kept = keep_due(sequence, sequence.keep)
        if kept is not None:
            pending.kept.append(kept)
            pending.outputs.extend(kept.arrays())

    def _trim_the_others(self, pending: PendingStep) -> None:
        """A sequence that pauses lets go of the states of those it last decoded with; some may have
        ended.
        """
        busy = {id(each.sequence) for each in pending.spans}
        for sequence in self._sequences.values():
            if not sequence.is_trimmed and id(sequence) not in busy:
                sequence.trim()
                pending.outputs.extend(sequence.live.arrays())

    def check_device(self) -> None:
        """Compute something that is known.

        Raises what the device raises, RuntimeError when it is wrong.
        """
        ones = mx.ones((16, 16))
        if (ones @ ones).sum().item() != 16**3:
            raise RuntimeError("the device does not compute any more")

    def abandon_pending(self) -> None:
        """Forget steps that were laid out but cannot be collected because one of them failed."""
        self._under_way.clear()

    def measure_costs(self) -> KVCosts:
        """What one sequence keeps, measured on a short one; device thread only."""
        self._read_once("costs", tokens=3)
        live = self._sequences["costs"].live
        costs = KVCosts(
            bytes_per_token=sum(leaf.bytes_per_token() for leaf in live.leaves),
            fixed_bytes=sum(leaf.fixed_bytes() for leaf in live.leaves),
            form=live.form(),
        )
        self.close("costs")
        return costs

    def measure_step(self, tokens: int) -> tuple[int, int]:
        """What a step takes beside weights and KV that reads so many tokens: bytes at its peak, and
        bytes kept for the next one.

        Compiles the kernels that prompts need on the way.
        """
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self._read_once("step", tokens=tokens)
        self.close("step")
        return max(0, mx.get_peak_memory() - before), mx.get_cache_memory()

    def _read_once(self, request_id: RequestId, *, tokens: int) -> None:
        """Open a sequence whose prompt is any tokens, and read it in one step."""
        request = SequenceRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(tuple(1 + index % 3 for index in range(tokens))),
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        self.open(request, capacity_tokens=tokens)
        plan = StepPlan(spans=(Span(request_id=request_id, start=0, tokens=tokens, draws=True),))
        self.collect(self.dispatch(plan))

    def _draw(self, spans: list[SequenceSpan], logits: StepLogits) -> PendingStep:
        """Draw where it is wanted, and note what of the prompts is to be scored."""
        drawing = [each for each in spans for _ in each.wanted_rows]
        pending = PendingStep(
            spans=spans,
            drawing=drawing,
            undrawn=None,
            drawn=None,
            scored=logits.scored,
            pooled={},
            kept=[],
            outputs=[scored.source for scored in logits.scored.values()],
        )
        if logits.drawn is not None and not any(each.sequence.constraint for each in drawing):
            self._draw_rows(pending, logits.drawn)
        elif logits.drawn is not None:
            pending.undrawn = logits.drawn
            pending.outputs.append(logits.drawn)
        return pending

    def _pool(self, pending: PendingStep, hidden: Mapping[RequestId, mx.array]) -> None:
        """Take in the hidden states of prompts that are to be pooled."""
        for each in pending.spans:
            sequence, request_id = each.sequence, each.span.request_id
            if request_id in hidden:
                sequence.pool(hidden[request_id])
                assert sequence.pooled is not None
                pending.outputs.append(sequence.pooled)
                if each.ends_prompt:
                    pending.pooled[request_id] = sequence.embedding()

    def _draw_late(self, pending: PendingStep) -> None:
        """Draw in a launched step that has constrained sequences, since it is known now what they
        have drawn before.
        """
        if pending.undrawn is not None:
            logits, pending.undrawn = pending.undrawn, None
            self._draw_rows(pending, logits)
            launch(pending)

    def _draw_rows(self, pending: PendingStep, logits: mx.array) -> None:
        states = [each.sequence.sampler for each in pending.drawing]
        constraints = [each.sequence.constraint for each in pending.drawing]
        limits = limits_of(constraints, words_per_row=self._constraints.words_per_row)
        drawn = pending.drawn = sample(logits, states, limits)
        advance(states, drawn.tokens)
        for row, each in enumerate(pending.drawing):
            each.sequence.drawn, each.sequence.drawn_row = drawn.tokens, row
        pending.outputs.extend(drawn.arrays())

    def _wait(self, pending: PendingStep) -> dict[RequestId, tuple[TokenLogprob, ...]]:
        """Returns the scores of prompts: before the next step is launched, lest what was drawn here
        waits for it.
        """
        if pending.outputs:
            launch(pending)
        if pending.drawn is not None:
            mx.eval(pending.drawn.tokens)
        mx.synchronize()
        scored, pending.scored = pending.scored, {}
        return {
            each.span.request_id: prompt_logprobs(
                scored[each.span.request_id],
                each.scored_tokens,
                top_logprobs=each.sequence.request.top_logprobs,
                vocab_size=self._vocab_size,
            )
            for each in pending.spans
            if each.span.request_id in scored
        }
