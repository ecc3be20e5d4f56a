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

A span (`plan.Span`) is the part of one sequence that a step computes: a chunk of its prompt, or its
last token and drafted ones. In the prompt, image keys (negative ids that identify an image) stand
for the tokens of an image.
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
from holdfast.worker.engine.mlx_lm_hooks import DeferredLogits, StepLogits
from holdfast.worker.engine.plan import BLOCK_TOKENS, CopyPolicy, Span, SpanResult, StepPlan
from holdfast.worker.engine.sampling import (
    NO_LIMITS,
    SampledRows,
    limits_of,
    sample,
    score_tokens,
)
from holdfast.worker.engine.sequence import (
    EngineSequence,
    SequenceSpan,
    copy_due_state,
    copy_everything,
)
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import AUTO_WHEN_SHORT, BITS, KVBits
from holdfast.worker.kv.live import (
    Conversion,
    LiveBase,
    LiveState,
    ModelForm,
    Snapshot,
    StateBytes,
    shared_beginning,
)
from holdfast.worker.vision.images import WorkerImages

_NO_IMAGES = "this model cannot be given images"
NOT_A_NUMBER = "the model's output is not a number at this position, or no token is left to sample"
NOTHING_ALLOWED = "the grammar allows only tokens here that the request's logit_bias bans"
# the most bytes of float32 logits that exist at the same time while prompts are scored; 50 % more if
# the model computes in 16 bits
SCORED_PIECE_BYTES = 32 << 20


@dataclass(slots=True)
class PendingStep:
    """A step that was laid out but is not collected yet."""

    spans: list[SequenceSpan]
    sampling_spans: list[SequenceSpan]  # in the order of their rows in `sampled`
    # [rows, vocabulary]: to sample from once the previous step's tokens are known
    unsampled_logits: mx.array | None
    sampled: SampledRows | None  # None: no span samples, or the sampling is not laid out yet
    scored: Mapping[RequestId, DeferredLogits]  # logits that score prompts
    pooled: dict[RequestId, mx.array]  # embeddings of prompts that end in this step: fp32 [hidden]
    copies: dict[RequestId, tuple[Snapshot, ...]]  # what the step copies for the cache
    outputs: list[mx.array]  # arrays to compute, including live state; emptied at launch
    is_computed: bool  # the forward pass has computed everything: there is nothing to wait for

    def rows(self) -> Iterator[tuple[SequenceSpan, range]]:
        """Yield the spans that sample, each with its rows in `sampled`."""
        start = 0
        for each in self.sampling_spans:
            rows = range(start, start + len(each.wanted_rows))
            start = rows.stop
            yield each, rows

    def launch(self) -> None:
        """Start to compute the step. Does not wait."""
        mx.async_eval(self.outputs)  # type: ignore[no-untyped-call]
        self.outputs = []  # so that nothing holds the KV buffers when the next step starts


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCosts:
    """The memory that the live state of a sequence takes.

    form: the types and shapes of its snapshots if it is not quantized; None if the state cannot be
        snapshotted.
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
        """The parts of a prompt, as (start, end), that must not be divided between spans: images
        whose tokens attend to each other in both directions.
        """
        if self.images is None or not self.images.attends_both_ways:
            return ()
        return tuple((image.start, image.end) for image in request.images)

    def shortest_span(self, request_id: RequestId, start: int) -> int:
        """The smallest number of tokens of a span of a prompt that begins at position `start`."""
        parts = self.indivisible(self._sequences[request_id].request)
        # inside such a part: the rest of it
        return next((end - start for part_start, end in parts if part_start <= start < end), 1)

    def longest_span(self, request_id: RequestId, start: int) -> int:
        """The largest number of tokens of a span of a sequence that begins at position `start`."""
        sequence = self._sequences[request_id]
        if sequence.live.is_quantized and self.ends_spans_at_blocks:
            return BLOCK_TOKENS - start % BLOCK_TOKENS
        # the starts and ends of all indivisible parts: a span ends at the next one
        edges = itertools.chain(*self.indivisible(sequence.request))
        return min((edge - start for edge in edges if edge > start), default=sys.maxsize)

    @property
    def speculation_refused(self) -> str:
        """Why drafted tokens cannot be verified with this model; empty if they can."""
        return self._runner.speculation_refused

    @property
    def recomputes_accepted(self) -> bool:
        """Whether accepted tokens are computed again when others of the same draft are rejected."""
        return self._runner.recomputes_accepted

    def draft(self, request_id: RequestId, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The first tokens of a draft that the next span of a decoding sequence may have, or the
        tokens that its grammar forces. No pending step may contain the sequence.
        """
        if self.speculation_refused:
            return ()
        sequence = self._sequences[request_id]
        # a draft model may have tokens that this model does not have
        if token_ids and max(token_ids) >= self._vocab_size:
            end = next(at for at, token in enumerate(token_ids) if token >= self._vocab_size)
            token_ids = token_ids[:end]
        # image keys are negative
        assert min(token_ids, default=0) >= 0, "an image key was drafted"
        if sequence.constraint is not None:
            token_ids = sequence.constraint.draft(token_ids)
        if sequence.live.is_quantized:
            # Rejected tokens can only be dropped from the current block, which is not quantized yet.
            # The span has the last sampled token before the drafted ones.
            token_ids = token_ids[: BLOCK_TOKENS - 1 - sequence.live.tokens % BLOCK_TOKENS]
        return token_ids

    @property
    def ends_spans_at_blocks(self) -> bool:
        """Whether no span may cross the border of a block of quantized keys and values."""
        return self._runner.ends_spans_at_blocks

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        form: KVBits = "native",
        base: LiveBase | None = None,
        snapshots: Sequence[Snapshot] = (),
        copy_policy: CopyPolicy | None = None,
    ) -> LiveState:
        """Open a sequence, or reopen it after a preemption with the tokens that it had generated.

        Returns the sequence's live state; the tokens that it already has need no prefill. form:
        how keys and values are held. base, snapshots: the cached prefix to start from, in the
        same form: a live state, then blocks and the state at their end. copy_policy: when to
        copy state for the prefix cache. Raises SnapshotMismatch if the prefix does not fit the
        model, and InvalidRequest if the grammar is invalid or the model cannot embed; then the
        sequence is not open.
        """
        assert request.request_id not in self._sequences, f"sequence {request.request_id} is open"
        if request.pooling is not None and not self.embedding_dimensions:
            raise NoEmbeddings
        live = LiveState(self._runner.fresh_layers(form))
        sequence = EngineSequence.begin(
            request, live=live, vocab_size=self._vocab_size, generated=generated
        )
        sequence.constraint = self._constraints.for_request(request, generated=generated)
        # after all that may refuse the request: a live state that was moved here would be lost
        sequence.start_from(base, snapshots)
        if request.images:
            if self.images is None:
                raise InvalidRequest(_NO_IMAGES)
            sequence.images = self.images.open(request)
        sequence.live.reserve(capacity_tokens)
        sequence.copy_policy = copy_policy
        if copy_policy is not None:
            sequence.copied_tokens = copy_policy.cached_tokens
        self._sequences[request.request_id] = sequence
        return sequence.live

    def reserve_tokens(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Make room in an open sequence's state for `capacity_tokens` tokens in total."""
        self._sequences[request_id].live.reserve(capacity_tokens)

    def replace_answer(
        self, request_id: RequestId, *, generated: Sequence[int], kept_tokens: int
    ) -> None:
        """Replace the answer of a sequence by `generated`, as a draft model must when the other model
        has generated different tokens. The state keeps its first `kept_tokens` tokens, which must be
        equal in both. No pending step may contain the sequence.
        """
        sequence = self._sequences[request_id]
        live = sequence.live
        live.rewind(live.tokens - kept_tokens)
        continued = EngineSequence.begin(
            sequence.request, live=live, vocab_size=self._vocab_size, generated=tuple(generated)
        )
        sequence.known_token_ids = continued.known_token_ids
        sequence.sampler = continued.sampler
        sequence.sampled = None

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
        self, request_ids: Iterable[RequestId]
    ) -> Iterator[tuple[tuple[RequestId, ...], Conversion]]:
        """Yield sets of open sequences that `quantize` could convert, with the effect on memory: first
        single sequences, then groups that share tokens; the longest first in both.
        """
        convertible: dict[RequestId, LiveState] = {}
        groups: dict[object, tuple[RequestId, ...]] = {}
        for request_id in request_ids:
            live = self._sequences[request_id].live
            if live.can_quantize():
                convertible[request_id] = live
                shared_prefix = shared_beginning(live) or request_id
                groups[shared_prefix] = (*groups.get(shared_prefix, ()), request_id)
        singles = [(request_id,) for request_id in convertible]
        for candidates in (singles, [group for group in groups.values() if len(group) > 1]):
            with_effects = [
                (
                    each,
                    Conversion.of(
                        [convertible[request_id] for request_id in each], BITS[AUTO_WHEN_SHORT]
                    ),
                )
                for each in candidates
            ]
            yield from sorted(with_effects, key=lambda each: each[1].tokens, reverse=True)

    def quantize(self, request_id: RequestId) -> StateBytes:
        """Quantize the keys and values of an open sequence to the form `AUTO_WHEN_SHORT`. From then
        on, none of its state is copied for the prefix cache, because later keys and values depend
        on when it was quantized. Waits for the device. No pending step may contain the sequence.

        If the device fails, `is_state_valid` tells whether the sequence can continue.
        """
        sequence = self._sequences[request_id]
        sequence.trim()
        bytes_before = sum(array.nbytes for array in sequence.live.arrays())
        sequence.live.quantize(self._runner.fresh_layers(AUTO_WHEN_SHORT))
        sequence.copy_policy = None
        bytes_after = sum(array.nbytes for array in sequence.live.arrays())
        return StateBytes(before=bytes_before, after=bytes_after)

    def is_state_valid(self, request_id: RequestId) -> bool:
        """Whether an open sequence can continue; False if a failed `quantize` has destroyed its state."""
        return self._sequences[request_id].live.is_valid

    def close(self, request_id: RequestId) -> None:
        """Drop a sequence. The caller must ignore its results in steps that are still pending."""
        del self._sequences[request_id]

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Build the graph of a step, and launch it if no other step is under way; otherwise `collect`
        launches it after that step. Does not wait.

        Must not be called before the sampling of the previous step is laid out, because this step
        takes its tokens as input.
        """
        assert all(step.unsampled_logits is None for step in self._under_way), (
            "the sampling of the previous step is not laid out yet"
        )
        spans = [SequenceSpan(self._sequences[span.request_id], span) for span in plan.spans]
        for span in plan.spans:
            self.provide_images(span)
        for each in spans:
            # to return to if drafted tokens are rejected
            if each.span.drafted and self._runner.recomputes_accepted:
                each.sequence.saved = each.sequence.live.saved()
        logits = self._runner.forward(spans, StepContext())
        for each in spans:
            each.sequence.repeated = ()  # this step computes them
            if each.sequence.images is not None:
                each.sequence.images.forget_before(each.span.start + each.span.certain_tokens)
        pending = self._sample(spans, logits)
        self._pool_embeddings(pending, logits.hidden)
        for each in spans:
            self._copy_due_state(each, pending)
            if not pending.is_computed:
                pending.outputs.extend(each.sequence.live.arrays())
        self._trim_idle(pending)
        self._under_way.append(pending)
        if len(self._under_way) == 1:
            pending.launch()
            self._sample_late(pending)
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
        results = list(_span_results(pending, prompt_logprobs))
        _apply_verified_drafts(pending, results)
        for each, result in zip(pending.spans, results, strict=True):
            if each.sequence.constraint is not None:
                for token_id in result.token_ids:
                    each.sequence.constraint.add(token_id)
        if self._under_way:
            self._sample_late(self._under_way[0])
        return tuple(results)

    def take_copies(self, pending: PendingStep) -> dict[RequestId, tuple[Snapshot, ...]]:
        """Return the evaluated snapshots of a collected step, blocks before states; a second call
        returns none.
        """
        copies = pending.copies
        pending.copies = {}
        return copies

    def copy_remaining(self, request_id: RequestId) -> tuple[Snapshot, ...] | None:
        """Copy the part of a sequence's state that is not copied yet, because the sequence is about
        to be closed: blocks, and then its state. Does not wait.

        Returns None if the sequence is empty, or if its state is in mlx-lm's own cache objects,
        which cannot be copied.
        """
        sequence = self._sequences[request_id]
        if sequence.live.tokens == 0 or sequence.live.is_foreign:
            return None
        copies = copy_everything(sequence)
        mx.async_eval([each.outputs for each in copies])  # type: ignore[no-untyped-call]
        return copies

    def check_device(self) -> None:
        """Check a known result. Raises the device's error, or RuntimeError if the result is wrong."""
        ones = mx.ones((16, 16))
        if (ones @ ones).sum().item() != 16**3:
            raise RuntimeError("the device no longer computes correctly")

    def abandon_pending(self) -> None:
        """Forget all pending steps, because one of them failed."""
        self._under_way.clear()

    # -- images

    @property
    def image_reuse_refused(self) -> str:
        """Why prompts with images must not be cached; empty if they may."""
        return "" if self.images is None else self.images.info.reuse_refused

    def lacks_images(self, span: Span) -> bool:
        """Whether features of images in a span are not computed yet."""
        images = self._sequences[span.request_id].images
        return images is not None and images.lacks(span.start, span.tokens)

    def advance_images(self, request_id: RequestId, start: int, tokens: int) -> bool:
        """Compute the features of one image in a part of an open sequence's prompt between two
        calls of `poll_images`, and begin to process others. Returns whether all images in this part
        have features or cannot be used.
        """
        images = self._sequences[request_id].images
        if self.images is None or images is None:
            return True
        return self.images.prepare_span(images, start=start, tokens=tokens)

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

    def ask_about_images(self, command: ImageCommand) -> ImageAnswer | None:
        """Ask how the model sees the images of a command. Returns the answer if the model cannot be
        given images; otherwise, `poll_images` returns it later.
        """
        if self.images is not None:
            self.images.request_layouts(command)
            return None
        failures = dict.fromkeys(command.images, _NO_IMAGES)
        return ImageAnswer(call_id=command.call_id, failures=failures)

    def prepare_images(self, request: SequenceRequest, *, start: int, prepared: set[str]) -> bool:
        """Process the images of a waiting prompt after `start`, or compute the features of one.
        Returns whether features were computed (`WorkerImages.prepare`).

        prepared: the images that need no more preparation, by name; images are added to it.
        """
        if self.images is None:
            return False
        return self.images.prepare(request, start=start, prepared=prepared)

    def has_unprepared_images(
        self, request: SequenceRequest, *, start: int, prepared: Container[str]
    ) -> bool:
        """Whether a prompt has images after `start` that are not in `prepared` and have no
        features.
        """
        if self.images is None or not request.images:
            return False
        return bool(self.images.unprepared(request, start=start, prepared=prepared))

    @property
    def is_reading_images(self) -> bool:
        """Whether the image process has images to process, or results that were not taken."""
        return self.images is not None and self.images.is_busy

    def poll_images(self) -> list[ImageAnswer]:
        """Take processed images, and end the image process when it is idle. Returns the answers to
        image commands whose images are all processed. Does not wait. Call it before each step.
        """
        if self.images is None:
            return []
        self.images.poll()
        return list(self.images.answers())

    def close_images(self) -> None:
        if self.images is not None:
            self.images.close()

    # -- measurements

    def measure_costs(self, form: KVBits = "native") -> KVCosts:
        """Measure the memory of a sequence in this form by running a short one."""
        self._prefill_once("costs", tokens=3, form=form)
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
        active_bytes_before = mx.get_active_memory()
        self._prefill_once("step", tokens=tokens)
        self.close("step")
        return max(0, mx.get_peak_memory() - active_bytes_before), mx.get_cache_memory()

    def _prefill_once(self, request_id: RequestId, *, tokens: int, form: KVBits = "native") -> None:
        """Open a sequence with a prompt of arbitrary tokens, and prefill it in one step."""
        request = SequenceRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(tuple(1 + index % 3 for index in range(tokens))),
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        self.open(request, capacity_tokens=tokens, form=form)
        plan = StepPlan(spans=(Span(request_id=request_id, start=0, tokens=tokens, samples=True),))
        self.collect(self.dispatch(plan))

    # -- the parts of a step

    def _sample(self, spans: list[SequenceSpan], logits: StepLogits) -> PendingStep:
        """Add sampling to a step. If it has constrained sequences, this is done once their masks
        are known.
        """
        pending = PendingStep(
            spans=spans,
            sampling_spans=[each for each in spans if each.wanted_rows],
            unsampled_logits=None,
            sampled=None,
            scored=logits.scored,
            pooled={},
            copies={},
            outputs=[scored.source for scored in logits.scored.values()],
            is_computed=logits.is_computed,
        )
        if logits.to_sample is None:
            return pending
        if any(each.sequence.constraint for each in pending.sampling_spans):
            pending.unsampled_logits = logits.to_sample
            pending.outputs.append(logits.to_sample)
        else:
            self._sample_rows(pending, logits.to_sample)
        return pending

    def _sample_late(self, pending: PendingStep) -> None:
        """Launch the sampling of a step whose constraints waited for the previous step's tokens."""
        if pending.unsampled_logits is not None:
            logits = pending.unsampled_logits
            pending.unsampled_logits = None
            self._sample_rows(pending, logits)
            pending.launch()

    def _sample_rows(self, pending: PendingStep, logits: mx.array) -> None:
        """Lay out the sampling of a step. Its constraints must know all tokens before it.

        logits: [rows, vocabulary], in the order of `PendingStep.rows`.
        """
        row_states = [
            row_state
            for each in pending.sampling_spans
            for row_state in each.sequence.sampler.states_after(each.span.drafted)
        ]
        limits = NO_LIMITS
        if any(each.sequence.constraint for each in pending.sampling_spans):
            limits = limits_of(
                _constraints_of_rows(pending.sampling_spans),
                rows=len(row_states),
                words_per_row=self._constraints.words_per_row,
            )
        sampled = sample(logits, row_states, limits, is_computed=pending.is_computed)
        pending.sampled = sampled
        for each, rows in pending.rows():
            # after a draft, `_apply_verified_drafts` does this, when the accepted tokens are known
            if not each.span.drafted:
                each.sequence.add_sampled(sampled.tokens, rows.start)
        pending.outputs.extend(sampled.arrays())

    def _pool_embeddings(self, pending: PendingStep, hidden: Mapping[RequestId, mx.array]) -> None:
        """Add the hidden states of prompts to be embedded, [rows, hidden] each, to their sequences."""
        for each in pending.spans:
            sequence = each.sequence
            request_id = each.span.request_id
            if request_id in hidden:
                sequence.pool(hidden[request_id])
                assert sequence.pooled is not None
                pending.outputs.append(sequence.pooled)
                if each.ends_prompt:
                    pending.pooled[request_id] = sequence.embedding()

    def _copy_due_state(self, sequence_span: SequenceSpan, pending: PendingStep) -> None:
        """Count the span's tokens as part of the live state, and copy what is due for the cache."""
        sequence = sequence_span.sequence
        sequence.live.tokens = sequence_span.span.start + sequence_span.span.tokens
        if sequence.copy_policy is not None:
            certain_tokens = sequence_span.span.start + sequence_span.span.certain_tokens
            if sequence.saved is not None:
                certain_tokens = sequence_span.span.start  # the state may return to it
            copies = copy_due_state(sequence, sequence.copy_policy, certain_tokens=certain_tokens)
            if copies:
                pending.copies[sequence.request.request_id] = copies
                pending.outputs.extend(array for copy in copies for array in copy.outputs)
                pending.is_computed = False

    def _trim_idle(self, pending: PendingStep) -> None:
        """Release what sequences that are not in this step hold only for their next step (trim): their
        recurrent states may be rows of a batch that no other sequence uses any more.
        """
        ids_in_step = {id(each.sequence) for each in pending.spans}
        for sequence in self._sequences.values():
            if not sequence.is_trimmed and id(sequence) not in ids_in_step:
                sequence.trim()
                pending.outputs.extend(sequence.live.arrays())
                pending.is_computed = False

    def _wait(self, pending: PendingStep) -> dict[RequestId, tuple[TokenLogprob, ...]]:
        """Wait for a step. Returns the log-probabilities of scored prompts, by request. These are
        computed here, before the next step is launched, so that they do not wait for it.
        """
        if pending.outputs:
            pending.launch()
        if pending.sampled is not None:
            mx.eval(pending.sampled.tokens)
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


def _span_results(
    pending: PendingStep, prompt_logprobs: Mapping[RequestId, tuple[TokenLogprob, ...]]
) -> Iterator[SpanResult]:
    """The results of a step that has ended, span by span."""
    results = _sampled_results(pending)
    for each in pending.spans:
        request_id = each.span.request_id
        scored = prompt_logprobs.get(request_id, ())
        if any(math.isnan(entry.logprob) for entry in scored):
            yield SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
        elif request_id in results:
            result = results[request_id]
            yield replace(result, prompt_logprobs=scored) if scored else result
        elif request_id in pending.pooled:
            yield _embedding_result(request_id, pending.pooled[request_id])
        else:
            yield SpanResult(request_id=request_id, prompt_logprobs=scored)


def _embedding_result(request_id: RequestId, pooled: mx.array) -> SpanResult:
    """The embedding of a prompt, normalized to length 1. pooled: float32 [hidden]."""
    values = np.array(pooled)
    if not np.isfinite(values).all():
        return SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
    length = np.linalg.norm(values.astype(np.float64))
    normalized = values / length if length else values
    return SpanResult(request_id=request_id, embedding=normalized.astype(np.float32).tobytes())


def _sampled_results(pending: PendingStep) -> dict[RequestId, SpanResult]:
    """The results of the spans that sampled a token, read back from the device, by request."""
    sampled = pending.sampled
    if sampled is None:
        return {}
    # by row
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    is_valid_of_row: list[bool] = sampled.ok.tolist()  # type: ignore[assignment]
    is_empty_of_row: list[bool] = [False] * len(tokens)
    if sampled.empty is not None:
        is_empty_of_row = sampled.empty.tolist()  # type: ignore[assignment]
    logprobs = [] if sampled.scores is None else _logprobs(sampled.scores, tokens)
    results = {}
    for each, rows in pending.rows():
        request = each.sequence.request
        request_id = request.request_id
        first_row = rows.start
        refusal = _why_no_token(each.sequence.constraint, is_empty=is_empty_of_row[first_row])
        if refusal:
            results[request_id] = SpanResult(request_id=request_id, refusal=refusal)
            continue
        if not is_valid_of_row[first_row]:
            results[request_id] = SpanResult(request_id=request_id, failure=NOT_A_NUMBER)
            continue
        # A drafted token is accepted if it was sampled, and if a token could be sampled after it.
        # If none could, plain decoding finds that out in the next step.
        end_row = first_row + 1  # after the last accepted row
        for token_id in each.span.drafted:
            if tokens[end_row - 1] != token_id or not is_valid_of_row[end_row]:
                break
            end_row += 1
        scored: tuple[TokenLogprob, ...] = ()
        if request.want_logprobs:
            scored = tuple(
                TokenLogprob(score.token_id, score.logprob, score.top[: request.top_logprobs])
                for score in logprobs[first_row:end_row]
            )
        results[request_id] = SpanResult(
            request_id=request_id, token_ids=tuple(tokens[first_row:end_row]), logprobs=scored
        )
    return results


def _apply_verified_drafts(pending: PendingStep, results: list[SpanResult]) -> None:
    """Add the accepted tokens of drafts to their sequences, and drop the others from the state. A state
    that cannot drop single tokens returns to the one before the step (`saved`), and the sequence's
    next span computes the accepted tokens again, as `results` then says.
    """
    first_rows = {each.span.request_id: rows.start for each, rows in pending.rows()}
    for index, each in enumerate(pending.spans):
        if not each.span.drafted:
            continue
        sequence = each.sequence
        new_tokens = len(results[index].token_ids)  # 0 if the span failed
        rejected = len(each.wanted_rows) - max(new_tokens, 1)  # the first row has no drafted token
        if sequence.saved is None:
            sequence.live.rewind(rejected)
        elif rejected:
            sequence.live.return_to(sequence.saved)
            sequence.repeated = (sequence.last_token, *each.span.drafted)[:new_tokens]
            results[index] = replace(results[index], repeated=new_tokens)
        sequence.saved = None
        if new_tokens:
            assert pending.sampled is not None, "nothing was sampled"
            sequence.add_sampled(
                pending.sampled.tokens, first_rows[each.span.request_id], count=new_tokens
            )


def _constraints_of_rows(
    sampling_spans: Sequence[SequenceSpan],
) -> Iterator[SequenceConstraint | None]:
    """Yield the constraint of each row. For a row after drafted tokens, this is a copy that has taken
    these tokens; it is only valid until the next row is requested.
    """
    for each in sampling_spans:
        constraint = each.sequence.constraint
        yield constraint
        if each.span.drafted and constraint is not None:
            constraint = constraint.copy()
        for token_id in each.span.drafted:
            if constraint is not None:
                constraint.add(token_id)
            yield constraint


def _why_no_token(constraint: SequenceConstraint | None, *, is_empty: bool) -> str:
    """Why a row has no token; empty if it has one. is_empty: all its logits are -inf once masked."""
    if constraint is None:
        return ""
    if not constraint.failure and is_empty and constraint.matcher is not None:
        return NOTHING_ALLOWED
    return constraint.failure


def prompt_logprobs(
    logits: DeferredLogits,
    token_ids: Sequence[int],
    *,
    top_logprobs: int,
    vocab_size: int,
    piece_bytes: int = SCORED_PIECE_BYTES,
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of prompt tokens, from the logits of the positions before them.

    The logits are computed in pieces of at most `piece_bytes`, but at least one row.
    """
    rows_per_piece = max(1, piece_bytes // (4 * vocab_size))
    logprobs: list[TokenLogprob] = []
    for start in range(0, len(token_ids), rows_per_piece):
        piece = token_ids[start : start + rows_per_piece]
        scores = score_tokens(
            logits.of(start, start + len(piece)),
            mx.array(list(piece), dtype=mx.int32),
            top_logprobs=top_logprobs,
        )
        logprobs.extend(_logprobs(scores, piece))
    return tuple(logprobs)


def _logprobs(scores: Scores, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Convert the scores of n positions to messages. All have the same number of top tokens: that of
    the row that wants the most.
    """
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    top_tokens: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if scores.top is not None:
        ids: list[list[int]] = scores.top[0].tolist()  # type: ignore[assignment]
        values: list[list[float]] = scores.top[1].tolist()  # type: ignore[assignment]
        top_tokens = [tuple(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    return list(map(TokenLogprob, token_ids, chosen, top_tokens))
