"""Executes step plans: the forward passes of the layout, and sampling for all rows together.

Device thread only.

Steps can be pipelined. `dispatch` builds the graph of a step lazily, with tokens that the previous
step is still sampling, and the step is launched when the previous one has ended. So building the
graph of the next step overlaps with computing this one. Since nothing holds the KV buffers of a
finished step when the next one starts, these buffers are updated in place. (Launching earlier would
copy every KV buffer once per step on the CPU: 3.5 ms instead of 0.3 ms, measured with 134 MB.)

The mask of a constrained sequence depends on its previous token, which the host has to know. If a
step contains such a sequence, its forward pass is laid out and launched as usual; while it runs,
the host reads the previous tokens, fills the mask and lays out the sampling.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from holdfast.errors import InvalidRequest, NoEmbeddings
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import TokenLogprob
from holdfast.wire.images import ImageAnswer, ImageCommand
from holdfast.wire.requests import RequestId, SamplingParams, TokenIds
from holdfast.worker.engine.backend import Scores
from holdfast.worker.engine.constraints import Constraints, SequenceConstraint
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import BLOCK_TOKENS, KeepPolicy, Span, SpanResult, StepPlan
from holdfast.worker.engine.sampling import (
    NO_LIMITS,
    DrawnRows,
    limits_of,
    sample,
    score_tokens,
)
from holdfast.worker.engine.seams import LaterLogits, StepLogits
from holdfast.worker.engine.sequence import (
    EngineSequence,
    Prefix,
    SequenceSpan,
    keep_due,
    keep_everything,
)
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.live import Conversion, LiveState, ModelForm, Snapshot, shared_beginning
from holdfast.worker.vision.images import WorkerImages

_NO_IMAGES = "this model cannot be given images"
NOT_A_NUMBER = "the model's output is not a number at this position, or no token is left to sample"
NOTHING_ALLOWED = "the grammar allows only tokens here that the request's logit_bias bans"
# bytes of float32 logits that exist at the same time while prompts are scored; 50 % more if the
# model computes in 16 bits
PIECE_BYTES = 32 << 20


@dataclass(slots=True)
class PendingStep:
    """A step that was laid out but is not collected yet."""

    spans: list[SequenceSpan]
    drawing: list[SequenceSpan]  # the spans that sample, in the order of their rows in `drawn`
    undrawn: mx.array | None  # logits to sample from once the previous step's tokens are known
    drawn: DrawnRows | None
    scored: Mapping[RequestId, LaterLogits]  # logits that score prompts
    pooled: dict[RequestId, mx.array]  # embeddings of prompts that end in this step: fp32 [hidden]
    kept: dict[RequestId, tuple[Snapshot, ...]]  # what the step copies for the cache
    outputs: list[mx.array]  # arrays to compute, including live state; emptied at launch
    is_computed: bool  # by the forward pass itself: there is nothing to wait for

    def rows(self) -> Iterator[tuple[SequenceSpan, range]]:
        """The spans that sample, each with its rows in `drawn`."""
        start = 0
        for each in self.drawing:
            rows = range(start, start + len(each.wanted_rows))
            start = rows.stop
            yield each, rows

    def launch(self) -> None:
        """Start computing the step; does not wait."""
        mx.async_eval(self.outputs)  # type: ignore[no-untyped-call]
        self.outputs = []  # so that nothing holds the KV buffers when the next step starts


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCosts:
    """The memory that the live state of a sequence takes.

    form: the types and shapes of its snapshots, before they are quantized; None if the state cannot
        be snapshotted.
    """

    bytes_per_token: int
    fixed_bytes: int
    form: ModelForm | None


class Engine:
    """Live sequences of one model, advanced step by step."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        constraints: Constraints | None = None,
    ) -> None:
        """constraints: None for a model that does not support grammars."""
        self._runner = runner
        self._vocab_size = vocab_size
        self._constraints = constraints or Constraints(None, vocab_size=vocab_size)
        self.images: WorkerImages | None = None  # None: the model cannot be given images
        self._sequences: dict[RequestId, EngineSequence] = {}
        # dispatched steps that are not collected yet; only the first is launched
        self._under_way: deque[PendingStep] = deque()

    @property
    def runs_ahead(self) -> bool:
        """Whether to dispatch a step before the previous one is collected.

        Running ahead does not pay on a CPU: there, launching takes almost as long as the step
        itself, because MLX queues only a few tasks.
        """
        return self._runner.backend.runs_ahead

    @property
    def embedding_dimensions(self) -> int:
        """The size of an embedding; 0 if the model's hidden states cannot be reached."""
        return self._runner.hidden_size

    @property
    def mixes_chunks(self) -> bool:
        """Whether prefill chunks share a forward pass with decoding rows."""
        return self._runner.mixes_chunks

    def indivisible(self, request: SequenceRequest) -> tuple[tuple[int, int], ...]:
        """The parts of a prompt, from start to end, that one span each must contain as a whole:
        images whose tokens attend to each other in both directions.
        """
        if self.images is None or not self.images.attends_both_ways:
            return ()
        return tuple((image.start, image.end) for image in request.images)

    def shortest_span(self, request_id: RequestId, start: int) -> int:
        """How many tokens a span of a prompt must have at least, beginning at position `start`."""
        parts = self.indivisible(self._sequences[request_id].request)
        return next((end - start for first, end in parts if first <= start < end), 1)

    def longest_span(self, request_id: RequestId, start: int) -> int:
        """How many tokens a span of a sequence may have at most, beginning at position `start`."""
        sequence = self._sequences[request_id]
        if sequence.live.is_quantized and self.cuts_at_blocks:
            return BLOCK_TOKENS - start % BLOCK_TOKENS
        edges = itertools.chain(*self.indivisible(sequence.request))
        return min((edge - start for edge in edges if edge > start), default=sys.maxsize)

    @property
    def speculation_refused(self) -> str:
        """Why drafted tokens cannot be verified with this model; empty if they can."""
        return self._runner.speculation_refused

    @property
    def repeats_accepted(self) -> bool:
        """Whether accepted tokens are computed again when others of the same draft are rejected."""
        return self._runner.repeats_accepted

    def draft(self, request_id: RequestId, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The first tokens of a draft that the next span of a decoding sequence may have, or the
        tokens that its grammar forces. No pending step may contain the sequence.
        """
        if self.speculation_refused:
            return ()
        sequence = self._sequences[request_id]
        if token_ids and max(token_ids) >= self._vocab_size:  # of a draft model with more logits
            end = next(at for at, token in enumerate(token_ids) if token >= self._vocab_size)
            token_ids = token_ids[:end]
        assert min(token_ids, default=0) >= 0, "an image key was drafted"
        if sequence.constraint is not None:
            token_ids = sequence.constraint.draft(token_ids)
        if sequence.live.is_quantized:
            # the current block is not quantized yet, so only its tokens can be dropped
            token_ids = token_ids[: BLOCK_TOKENS - 1 - sequence.live.tokens % BLOCK_TOKENS]
        return token_ids

    @property
    def cuts_at_blocks(self) -> bool:
        """Whether spans must not cross borders of quantized blocks; see `Runner.cuts_at_blocks`."""
        return self._runner.cuts_at_blocks

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        kv_bits: KVBits = "native",
        prefix: Prefix | None = None,
        keep: KeepPolicy | None = None,
    ) -> LiveState:
        """Open a sequence, or reopen it after a preemption with the tokens that it had generated.

        Returns the sequence's live state; the tokens that it already has need no prefill. kv_bits:
        how keys and values are held. prefix: cached state to start from, with the same `kv_bits`.
        keep: when to copy state for the prefix cache. Raises
        SnapshotMismatch if the prefix does not fit the model, and InvalidRequest if the grammar is
        invalid or the model cannot embed; then the sequence is not open.
        """
        assert request.request_id not in self._sequences, f"sequence {request.request_id} is open"
        if request.pooling is not None and not self.embedding_dimensions:
            raise NoEmbeddings
        live = LiveState(self._runner.fresh_layers(kv_bits))
        sequence = EngineSequence.begin(
            request, live=live, vocab_size=self._vocab_size, generated=generated
        )
        sequence.constraint = self._constraints.of(request, generated=generated)
        # Last, because a live state that is moved here would be lost if the request were refused
        # later.
        if prefix is not None:
            sequence.start_from(prefix)
        if request.images:
            if self.images is None:
                raise InvalidRequest(_NO_IMAGES)
            sequence.images = self.images.open(request)
        sequence.live.reserve(capacity_tokens)
        sequence.keep = keep
        self._sequences[request.request_id] = sequence
        return sequence.live

    @property
    def image_reuse_refused(self) -> str:
        """Why prompts with images must not be cached; empty if they may."""
        return "" if self.images is None else self.images.info.reuse_refused

    def lacks_images(self, span: Span) -> bool:
        """Whether features of images in a span are not computed yet."""
        images = self._sequences[span.request_id].images
        return images is not None and images.lacks(span.start, span.tokens)

    def may_provide_images(self, request_id: RequestId, start: int, tokens: int) -> bool:
        """Whether the images in a part of an open sequence's prompt have features, or cannot be
        used. Computes those of one image between two calls of `poll_images`, and begins to process
        others.
        """
        images = self._sequences[request_id].images
        if self.images is None or images is None:
            return True
        return self.images.may_provide(images, start=start, tokens=tokens)

    def has_all_images(self, request_id: RequestId, *, end: int) -> bool:
        """Whether all images of an open sequence before a position are processed."""
        images = self._sequences[request_id].images
        return self.images is None or images is None or self.images.has_all(images, end=end)

    def provide_images(self, span: Span) -> None:
        """Compute the features of the images in a span that are not computed yet. `dispatch` does
        that, too; doing it before keeps the time out of that of the step. Waits for the device.
        Raises InvalidRequest if an image cannot be used.
        """
        images = self._sequences[span.request_id].images
        if self.images is not None and images is not None:
            self.images.provide(images, start=span.start, tokens=span.tokens)

    def measure_images(self, command: ImageCommand) -> ImageAnswer | None:
        """How the model sees the images of a command. Does not wait, and
        returns None until all are processed.
        """
        if self.images is None:
            return ImageAnswer(
                call_id=command.call_id, failures=dict.fromkeys(command.images, _NO_IMAGES)
            )
        return self.images.answer(command)

    def prepare_images(self, request: SequenceRequest, *, start: int, prepared: set[str]) -> bool:
        """See `WorkerImages.prepare`."""
        if self.images is None:
            return False
        return self.images.prepare(request, start=start, prepared=prepared)

    def has_unprepared_images(
        self, request: SequenceRequest, *, start: int, prepared: Container[str]
    ) -> bool:
        """Whether a prompt has images, from a position on, that are not prepared and lack
        features.
        """
        if self.images is None or not request.images:
            return False
        return bool(self.images.unprepared(request, start=start, prepared=prepared))

    @property
    def is_reading_images(self) -> bool:
        """Whether images are being processed in another process."""
        return self.images is not None and self.images.is_busy

    def poll_images(self) -> None:
        """Take processed images, and end the image process when it is idle. Call it before each
        step.
        """
        if self.images is not None:
            self.images.tend()

    def close_images(self) -> None:
        """End the image process."""
        if self.images is not None:
            self.images.close()

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Reserve capacity for this many tokens of a sequence."""
        self._sequences[request_id].live.reserve(capacity_tokens)

    def follow(self, request_id: RequestId, *, generated: Sequence[int], kept_tokens: int) -> None:
        """Make `generated` the answer of a sequence, in place of its own samples: its state
        keeps the first `kept_tokens` tokens, which must be part of both. No pending step may contain
        the sequence.
        """
        sequence = self._sequences[request_id]
        live = sequence.live
        live.rewind(live.tokens - kept_tokens)
        fresh = EngineSequence.begin(
            sequence.request, live=live, vocab_size=self._vocab_size, generated=tuple(generated)
        )
        sequence.known = fresh.known
        sequence.sampler = fresh.sampler
        sequence.drawn = None

    def limit_thoughts(
        self, request_id: RequestId, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        """Give an open sequence a new thinking budget. No pending step may contain the sequence.

        generated: all tokens that the sequence has generated.
        """
        sequence = self._sequences[request_id]
        sequence.constraint = self._constraints.with_budget(
            sequence.constraint, budget, generated=generated
        )

    def conversions(
        self, request_ids: Iterable[RequestId], kv_bits: KVBits
    ) -> Iterator[tuple[tuple[RequestId, ...], Conversion]]:
        """Yield sets of open sequences that can be quantized now, with the effect on memory: first
        single sequences, then groups that share tokens; the longest first in each part. Sequences
        that `quantize` cannot convert are left out.
        """
        able: dict[RequestId, LiveState] = {}
        groups: dict[object, tuple[RequestId, ...]] = {}
        for request_id in request_ids:
            live = self._sequences[request_id].live
            if live.can_quantize():
                able[request_id] = live
                beginning = shared_beginning(live) or request_id
                groups[beginning] = (*groups.get(beginning, ()), request_id)
        singles = [(request_id,) for request_id in able]
        for kind in (singles, [group for group in groups.values() if len(group) > 1]):
            counted = [
                (each, Conversion.of([able[name] for name in each], BITS[kv_bits])) for each in kind
            ]
            yield from sorted(counted, key=lambda each: each[1].tokens, reverse=True)

    def quantize(self, request_id: RequestId, kv_bits: KVBits) -> tuple[int, int]:
        """Quantize the keys and values of an open sequence. From then on, none of its state is
        copied for the prefix cache, because what it computes depends on when it was quantized.
        Waits for the device. No pending step may contain the sequence.

        Returns the bytes of its state before and after. If the device fails, see `is_whole`.
        """
        sequence = self._sequences[request_id]
        sequence.trim()
        before = sum(array.nbytes for array in sequence.live.arrays())
        sequence.live.quantize(self._runner.fresh_layers(kv_bits))
        sequence.keep = None
        return before, sum(array.nbytes for array in sequence.live.arrays())

    def is_whole(self, request_id: RequestId) -> bool:
        """Whether an open sequence can continue; False if `quantize` has lost its state."""
        return self._sequences[request_id].live.is_whole

    def close(self, request_id: RequestId) -> None:
        """Drop a sequence. The caller must ignore its results in steps that are still pending."""
        del self._sequences[request_id]

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Lay out a step, and launch it if no other step is under way; does not wait.

        Must not be called while the tokens of the previous step are not sampled yet, because this
        step needs them.
        """
        assert all(ahead.undrawn is None for ahead in self._under_way), (
            "the tokens of the previous step are not sampled yet"
        )
        spans = [SequenceSpan(self._sequences[span.request_id], span) for span in plan.spans]
        for span in plan.spans:
            self.provide_images(span)
        for each in spans:
            if each.span.drafted and self._runner.repeats_accepted:
                each.sequence.saved = each.sequence.live.saved()
        logits = self._runner.forward(spans, StepContext())
        for each in spans:
            each.sequence.repeated = ()
            if each.sequence.images is not None:
                each.sequence.images.forget_before(each.span.start + each.span.certain_tokens)
        pending = self._draw(spans, logits)
        self._pool(pending, logits.hidden)
        for each in spans:
            self._keep_due(each, pending)
            if not pending.is_computed:
                pending.outputs.extend(each.sequence.live.arrays())
        self._trim_the_others(pending)
        self._under_way.append(pending)
        if len(self._under_way) == 1:
            pending.launch()
            self._draw_late(pending)
        return pending

    def collect(self, pending: PendingStep) -> tuple[SpanResult, ...]:
        """Wait for a step, launch the next one, and return the results, one per span."""
        assert self._under_way[0] is pending, "steps are collected in the order of their dispatch"
        try:
            prompt_logprobs = self._wait(pending)
        finally:
            self._under_way.popleft()
            if self._under_way:
                self._under_way[0].launch()
        results = list(_results_of(pending, prompt_logprobs))
        _accept(pending, results)
        for each, result in zip(pending.spans, results, strict=True):
            if each.sequence.constraint is not None:
                for token_id in result.token_ids:
                    each.sequence.constraint.take(token_id)
        if self._under_way:
            self._draw_late(self._under_way[0])
        return tuple(results)

    def take_kept(self, pending: PendingStep) -> dict[RequestId, tuple[Snapshot, ...]]:
        """Return the evaluated snapshots of a collected step, blocks before states; a second call
        returns none.
        """
        kept = pending.kept
        pending.kept = {}
        return kept

    def keep_rest(self, request_id: RequestId) -> tuple[Snapshot, ...] | None:
        """Copy the part of a sequence's state that is not copied yet, because the sequence is about
        to be closed: blocks, and then its state. Does not wait.

        Returns None if the sequence is empty or its layers lack a snapshot form.
        """
        sequence = self._sequences[request_id]
        if sequence.live.tokens == 0 or sequence.live.is_foreign:
            return None
        kept = keep_everything(sequence)
        mx.async_eval([each.outputs for each in kept])  # type: ignore[no-untyped-call]
        return kept

    def check_device(self) -> None:
        """Check a computation with a known result. Raises the device's error, or RuntimeError if
        the result is wrong.
        """
        ones = mx.ones((16, 16))
        if (ones @ ones).sum().item() != 16**3:
            raise RuntimeError("the device no longer computes correctly")

    def abandon_pending(self) -> None:
        """Forget all pending steps, because one of them failed."""
        self._under_way.clear()

    # -- measurements

    def measure_costs(self, kv_bits: KVBits = "native") -> KVCosts:
        """Measure the memory of a sequence with these bits by running a short one."""
        self._read_once("costs", tokens=3, kv_bits=kv_bits)
        live = self._sequences["costs"].live
        costs = KVCosts(
            bytes_per_token=live.bytes_per_token(),
            fixed_bytes=live.fixed_bytes(),
            form=live.form(),
        )
        self.close("costs")
        return costs

    def measure_step(self, tokens: int) -> tuple[int, int]:
        """Run a step that prefills this many tokens. Returns its peak memory in addition to weights
        and KV, and the memory that MLX caches for the next step, in bytes.

        Also compiles the kernels for prefill.
        """
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self._read_once("step", tokens=tokens)
        self.close("step")
        return max(0, mx.get_peak_memory() - before), mx.get_cache_memory()

    def _read_once(self, request_id: RequestId, *, tokens: int, kv_bits: KVBits = "native") -> None:
        """Open a sequence with a prompt of arbitrary tokens, and prefill it in one step."""
        request = SequenceRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(tuple(1 + index % 3 for index in range(tokens))),
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        self.open(request, capacity_tokens=tokens, kv_bits=kv_bits)
        plan = StepPlan(spans=(Span(request_id=request_id, start=0, tokens=tokens, draws=True),))
        self.collect(self.dispatch(plan))

    # -- the parts of a step

    def _draw(self, spans: list[SequenceSpan], logits: StepLogits) -> PendingStep:
        pending = PendingStep(
            spans=spans,
            drawing=[each for each in spans if each.wanted_rows],
            undrawn=None,
            drawn=None,
            scored=logits.scored,
            pooled={},
            kept={},
            outputs=[scored.source for scored in logits.scored.values()],
            is_computed=logits.is_computed,
        )
        if logits.drawn is None:
            return pending
        if any(each.sequence.constraint for each in pending.drawing):
            pending.undrawn = logits.drawn
            pending.outputs.append(logits.drawn)
        else:
            self._draw_rows(pending, logits.drawn)
        return pending

    def _draw_late(self, pending: PendingStep) -> None:
        """Sample in a launched step whose constraints had to wait for the previous tokens."""
        if pending.undrawn is not None:
            logits = pending.undrawn
            pending.undrawn = None
            self._draw_rows(pending, logits)
            pending.launch()

    def _draw_rows(self, pending: PendingStep, logits: mx.array) -> None:
        states = [
            state
            for each in pending.drawing
            for state in each.sequence.sampler.ahead(each.span.drafted)
        ]
        limits = NO_LIMITS
        if any(each.sequence.constraint for each in pending.drawing):
            limits = limits_of(
                _constraints_of_rows(pending.drawing),
                rows=len(states),
                words_per_row=self._constraints.words_per_row,
            )
        drawn = sample(logits, states, limits, is_computed=pending.is_computed)
        pending.drawn = drawn
        for each, rows in pending.rows():
            if not each.span.drafted:  # the others wait until it is known what is accepted
                each.sequence.take(drawn.tokens, rows.start)
        pending.outputs.extend(drawn.arrays())

    def _pool(self, pending: PendingStep, hidden: Mapping[RequestId, mx.array]) -> None:
        """Pool the hidden states of prompts to embed."""
        for each in pending.spans:
            sequence = each.sequence
            request_id = each.span.request_id
            if request_id in hidden:
                sequence.pool(hidden[request_id])
                assert sequence.pooled is not None
                pending.outputs.append(sequence.pooled)
                if each.ends_prompt:
                    pending.pooled[request_id] = sequence.embedding()

    def _keep_due(self, each: SequenceSpan, pending: PendingStep) -> None:
        sequence = each.sequence
        sequence.live.tokens = each.span.start + each.span.tokens
        if sequence.keep is not None:
            certain_tokens = each.span.start + each.span.certain_tokens
            if sequence.saved is not None:
                certain_tokens = each.span.start  # the state may return to it
            kept = keep_due(sequence, sequence.keep, certain_tokens=certain_tokens)
            if kept:
                pending.kept[sequence.request.request_id] = kept
                pending.outputs.extend(array for each in kept for array in each.outputs)
                pending.is_computed = False

    def _trim_the_others(self, pending: PendingStep) -> None:
        """Trim paused sequences: their states may be rows of a stack that the others no
        longer use.
        """
        busy = {id(each.sequence) for each in pending.spans}
        for sequence in self._sequences.values():
            if not sequence.is_trimmed and id(sequence) not in busy:
                sequence.trim()
                pending.outputs.extend(sequence.live.arrays())
                pending.is_computed = False

    def _wait(self, pending: PendingStep) -> dict[RequestId, tuple[TokenLogprob, ...]]:
        """Wait for a step. Returns the log-probabilities of scored prompts, by request.

        They are computed here, before the next step is launched, so that they do not wait for it.
        """
        if pending.outputs:
            pending.launch()
        if pending.drawn is not None:
            mx.eval(pending.drawn.tokens)
        if not pending.is_computed:
            mx.synchronize()
        scored = pending.scored
        pending.scored = {}
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


# -- results


def _results_of(
    pending: PendingStep, prompt_logprobs: Mapping[RequestId, tuple[TokenLogprob, ...]]
) -> Iterator[SpanResult]:
    """The results of a step that has ended, span by span."""
    draws = _draws(pending)
    for each in pending.spans:
        request_id = each.span.request_id
        scored = prompt_logprobs.get(request_id, ())
        if any(math.isnan(entry.logprob) for entry in scored):
            yield SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
        elif request_id in draws:
            drawn = draws[request_id]
            yield replace(drawn, prompt_logprobs=scored) if scored else drawn
        elif request_id in pending.pooled:
            yield _embedded(request_id, pending.pooled[request_id])
        else:
            yield SpanResult(request_id=request_id, prompt_logprobs=scored)


def _embedded(request_id: RequestId, pooled: mx.array) -> SpanResult:
    values = np.array(pooled)
    if not np.isfinite(values).all():
        return SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
    length = np.linalg.norm(values.astype(np.float64))
    normalized = values / length if length else values
    return SpanResult(request_id=request_id, embedding=normalized.astype(np.float32).tobytes())


def _draws(pending: PendingStep) -> dict[RequestId, SpanResult]:
    """The results of the spans that sampled a token, read back from the device, by request."""
    drawn = pending.drawn
    if drawn is None:
        return {}
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    healthy: list[bool] = drawn.ok.tolist()  # type: ignore[assignment]
    empty: list[bool] = [False] * len(tokens)
    if drawn.empty is not None:
        empty = drawn.empty.tolist()  # type: ignore[assignment]
    logprobs = [] if drawn.scores is None else _logprobs(drawn.scores, tokens)
    results = {}
    for each, rows in pending.rows():
        request = each.sequence.request
        request_id = request.request_id
        first = rows.start
        refusal = _refusal(each.sequence.constraint, is_empty=empty[first])
        if refusal:
            results[request_id] = SpanResult(request_id=request_id, refusal=refusal)
            continue
        if not healthy[first]:
            results[request_id] = SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
            continue
        # A drafted token is accepted if it was sampled, and if a token could be sampled after it.
        # If none could, plain decoding finds that out in the next step.
        end = first + 1
        for token_id in each.span.drafted:
            if tokens[end - 1] != token_id or not healthy[end]:
                break
            end += 1
        scored: tuple[TokenLogprob, ...] = ()
        if request.want_logprobs:
            scored = tuple(
                TokenLogprob(score.token_id, score.logprob, score.top[: request.top_logprobs])
                for score in logprobs[first:end]
            )
        results[request_id] = SpanResult(
            request_id=request_id, token_ids=tuple(tokens[first:end]), logprobs=scored
        )
    return results


def _accept(pending: PendingStep, results: list[SpanResult]) -> None:
    """Add the accepted tokens of drafts to their sequences, and drop the others from the state."""
    first_rows = {each.span.request_id: rows.start for each, rows in pending.rows()}
    for index, each in enumerate(pending.spans):
        if not each.span.drafted:
            continue
        sequence = each.sequence
        count = len(results[index].token_ids)
        rejected = len(each.wanted_rows) - max(count, 1)
        if sequence.saved is None:
            sequence.live.rewind(rejected)
        elif rejected:
            sequence.live.return_to(sequence.saved)
            sequence.repeated = (sequence.last_token, *each.span.drafted)[:count]
            results[index] = replace(results[index], repeated=count)
        sequence.saved = None
        if count:
            assert pending.drawn is not None, "nothing was sampled"
            sequence.take(pending.drawn.tokens, first_rows[each.span.request_id], count=count)


def _constraints_of_rows(drawing: Sequence[SequenceSpan]) -> Iterator[SequenceConstraint | None]:
    """The constraint of each row. A row after drafted tokens has a copy that has taken them, which is
    only valid until the next one is asked for.
    """
    for each in drawing:
        constraint = each.sequence.constraint
        yield constraint
        if each.span.drafted and constraint is not None:
            constraint = constraint.copy()
        for token_id in each.span.drafted:
            if constraint is not None:
                constraint.take(token_id)
            yield constraint


def _refusal(constraint: SequenceConstraint | None, *, is_empty: bool) -> str:
    if constraint is None:
        return ""
    if not constraint.failure and is_empty and constraint.matcher is not None:
        return NOTHING_ALLOWED
    return constraint.failure


def prompt_logprobs(
    logits: LaterLogits,
    token_ids: Sequence[int],
    *,
    top_logprobs: int,
    vocab_size: int,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of prompt tokens, from the logits of the positions before them.

    The logits are computed in pieces of at most `piece_bytes`, but at least one row.
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


def _logprobs(scores: Scores, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Convert scores, [n], to messages. All have the same number of top tokens: as many as the row
    that wants the most.
    """
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if scores.top is not None:
        ids: list[list[int]] = scores.top[0].tolist()  # type: ignore[assignment]
        values: list[list[float]] = scores.top[1].tolist()  # type: ignore[assignment]
        tops = [tuple(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    return list(map(TokenLogprob, token_ids, chosen, tops))
