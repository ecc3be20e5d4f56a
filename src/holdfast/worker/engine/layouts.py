"""The three ways (layouts) to run the spans of a step as forward passes: `rows`, `split` and `solo`.
The probe chooses one for each model.

A runner returns the logits of the spans that need a sampled token, in the order of the spans. It
gives the model views (`views.py`) of the sequences' states in place of mlx-lm's caches. The logits
that score the tokens of a prompt are computed later (`DeferredLogits`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import numpy as np

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.backend import in_use
from holdfast.worker.engine.lora import Adapters
from holdfast.worker.engine.mlx_lm_hooks import DeferredLogits, ProjectionHook, StepLogits
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.engine.sequence import SequenceSpan, token_ids_of
from holdfast.worker.engine.views import GatherView, RowsView, SpanView, StateView, StepContext
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.kinds import ForeignState, fresh_layer
from holdfast.worker.kv.layer import HeadsForm, Layer, LayerKV
from holdfast.worker.kv.live import LiveState, ModelForm
from holdfast.worker.kv.quantized import QuantizedKV, group_size_of
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.vision.model import VisionModel

Model = Callable[..., mx.array]


class LayoutError(Exception):
    """The model cannot be run in this layout; the probe tries the next one."""


class Runner(ABC):
    """One layout of one model.

    mixes_chunks: whether prefill chunks and decoding rows share one forward pass.
    variant: the layout's name and, if the layout has several variants, which one this is.
    reason: why the probe chose this layout.
    attends_to_parts: whether keys and values may be in several buffers.
    shares: whether running sequences share the buffers of a common prefix (`choose_sharing`);
        otherwise each sequence has its own buffer.
    backend: computes some operations in place of MLX.
    adapters: the model's LoRA adapters; None if it has none.
    mixes_adapters: whether sequences with different adapters share a forward pass
        (`probe.choose_mixing`); otherwise a step has one for each adapter.
    """

    name: str
    variant: str
    mixes_chunks: bool
    reason: str = ""
    attends_to_parts: bool = True
    shares: bool = True
    adapters: Adapters | None = None
    mixes_adapters: bool = False

    def __init__(self, model: Any, head: ProjectionHook | None) -> None:
        """head: the hook into the vocabulary projection; None: the model projects every row."""
        self._model = model
        self._head = head
        # the forms of keys and of values of each layer that keeps them; empty before `set_form`
        self._heads_forms: tuple[tuple[HeadsForm, HeadsForm], ...] = ()
        self.backend = in_use()
        self._operations = self.backend.operations(transposes_once=self.mixes_chunks)

    @property
    def model(self) -> Any:
        return self._model

    @property
    def hidden_size(self) -> int:
        """The size of the hidden states; 0 if they cannot be reached in this model."""
        return 0 if self._head is None else self._head.hidden_size

    def fresh_layers(
        self, form: KVBits = "native", *, block_tokens: int = BLOCK_TOKENS
    ) -> list[Layer]:
        """Empty layers for a new sequence. Raises LayoutError if a layer does not support this
        layout.

        form: how layers that keep every token hold keys and values; quantized ones require
        `set_form` and an empty `refusal`. block_tokens: the length of the blocks of tokens that
        are quantized as a whole.
        """
        layers = empty_layers(self._model)
        if form != "native":
            pairs = iter(self._heads_forms)
            layers = [
                layer.with_leaves(
                    QuantizedKV(
                        BITS[form],
                        form=next(pairs),
                        block_tokens=block_tokens,
                        dequantize=self.backend.dequantize,
                    )
                    if leaf.grows
                    else leaf
                    for leaf in layer.leaves()
                )
                for layer in layers
            ]
        for layer in layers:
            for leaf in layer.leaves():
                if leaf.is_foreign:
                    raise LayoutError("a layer uses a cache class that only mlx-lm knows")
                leaf.can_share = leaf.can_share and self.shares
        return layers

    def set_form(self, form: ModelForm) -> None:
        """Tell the runner the shapes and types of the model's keys and values. Required before
        `fresh_layers` can return quantized layers.
        """
        heads_forms = [each for each in form.block if isinstance(each, HeadsForm)]
        self._heads_forms = tuple(zip(heads_forms[::2], heads_forms[1::2], strict=True))

    @cached_property
    def speculation_refused(self) -> str:
        """Why drafted tokens cannot be verified; empty if they can."""
        leaves = [leaf for layer in self.fresh_layers() for leaf in layer.leaves()]
        if all(leaf.can_drop_last or leaf.can_return for leaf in leaves):
            return ""
        return "a state of this model cannot go back to an earlier token"

    @cached_property
    def recomputes_accepted(self) -> bool:
        """Whether a state returns to its last sampled token if any drafted token is rejected, so
        that the accepted ones are computed again in the next step.
        """
        return not LiveState(self.fresh_layers()).can_drop_last

    @property
    def ends_spans_at_blocks(self) -> bool:
        """Whether no span may cross the border of a block of quantized keys and values. This is so
        if the model computes attention itself: all tokens of a span then see the same arrays, but
        tokens of different blocks must see different tokens quantized.
        """
        return not self.attends_to_parts

    def refusal(self) -> str:
        """Why this model's keys and values cannot be quantized; empty if they can."""
        if not self._heads_forms:
            return "no layer keeps the keys and values of every token"
        if isinstance(self._model, VisionModel) and self._model.attends_both_ways:
            return "the tokens of an image attend to each other in both directions"
        sizes = {each.dimension for pair in self._heads_forms for each in pair}
        unsupported_sizes = sorted(size for size in sizes if group_size_of(size) is None)
        if unsupported_sizes:
            return (
                f"its heads have {unsupported_sizes[0]} dimensions, which is not a multiple of 32"
            )
        return ""

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """Lay out the forward passes of a step. Lazy unless `StepLogits.is_computed`. Their tokens
        are appended to the sequences' states. Raises the errors of the model in this layout.
        """
        with self._operations.step():
            return self._forward(spans, context)

    def _forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One run of the layout, or one for each adapter if adapters do not share a forward pass."""
        if self.adapters is None or self.mixes_adapters:
            return self._run(spans, context)
        by_adapter: dict[str, list[SequenceSpan]] = {}
        for each in spans:
            by_adapter.setdefault(each.sequence.request.adapter, []).append(each)
        groups = tuple(by_adapter.values())
        return _combine_results(spans, groups, [self._run(group, context) for group in groups])

    @abstractmethod
    def _run(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """Run the model on spans with the same adapter, or with any if `mixes_adapters`. Lazy."""

    def _run_alone(self, span: SequenceSpan, context: StepContext) -> StepLogits:
        """Run the model on one span."""
        caches = _views([span], lambda layers: SpanView(layers[0], context=context), StateView)
        return self._run_model(token_ids_of([span])[None], caches, [span])

    def _run_model(
        self, ids: mx.array, caches: list[Any], spans: Sequence[SequenceSpan]
    ) -> StepLogits:
        """Run the model once on these spans. ids: the tokens of the spans, concatenated."""
        if any(each.sequence.images is not None for each in spans):
            with self._model.with_arguments(_vision_arguments(self._model, ids, spans)):
                return _project(self._model, self._head, ids, caches, spans)
        if self.adapters is None:
            return _project(self._model, self._head, ids, caches, spans)
        requests = [each.sequence.request for each in spans]
        runs = [(each.sequence.request.adapter, each.span.tokens) for each in spans]
        with self.adapters.applied(runs):
            logits = _project(self._model, self._head, ids, caches, spans)
        # logits that are computed after this pass apply the adapter of their sequence
        scored = {
            request.request_id: replace(
                deferred_logits,
                project=partial(self.adapters.call, request.adapter, deferred_logits.project),
            )
            for request in requests
            if (deferred_logits := logits.scored.get(request.request_id)) is not None
        }
        return replace(logits, scored=scored)


class RowsRunner(Runner):
    """Runs all spans in one forward pass. Every token is a row of one (tokens, 1) batch.

    A span that is alone in its step keeps its shape, (1, tokens): with one position offset instead
    of one per row, the model runs fewer operations.
    """

    name = variant = "rows"
    mixes_chunks = True

    def __init__(self, model: Any, head: ProjectionHook | None) -> None:
        super().__init__(model, head)
        # computes a step outside MLX, or returns None for steps that it does not support
        self._whole_steps = self.backend.whole_steps(model)

    def _run(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One forward pass over all tokens as rows, or several if images of the spans need that."""
        if self._whole_steps is not None and context.computes_whole_steps:
            logits: StepLogits | None = self._whole_steps(spans)
            if logits is not None:
                return logits
        groups = _groups_by_images(spans)
        if len(groups) > 1:
            return _combine_results(spans, groups, [self._run(group, context) for group in groups])
        if len(spans) == 1:
            context = _context_for(spans[0], context)
            caches = _views(
                spans, lambda layers: SpanView(layers[0], context=context), _no_recurrent
            )
            return self._run_model(token_ids_of(spans)[None], caches, spans)
        tokens = [each.span.tokens for each in spans]
        positions = [
            position
            for each in spans
            for position in range(each.span.start, each.span.start + each.span.tokens)
        ]
        offset = self._operations.share(mx.array(positions))
        caches = _views(
            spans,
            lambda layers: RowsView(layers, tokens=tokens, offset=offset, context=context),
            _no_recurrent,
        )
        return self._run_model(token_ids_of(spans)[:, None], caches, spans)


class SplitRunner(Runner):
    """Runs all decoding rows in one (sequences, 1) forward pass, and every other span in its own.

    Recurrent states are stacked for the decoding rows. If the model calls attention through the
    hook (`mlx_lm_hooks`), each row attends to its own keys and values; otherwise these are gathered
    into padded copies.
    """

    name = "split"
    mixes_chunks = False

    def __init__(
        self, model: Any, head: ProjectionHook | None, *, gather_mask_dimensions: int | None
    ) -> None:
        """gather_mask_dimensions: the rank of the mask for padded copies of keys and values; None:
        attention goes through the hook, without copies.
        """
        super().__init__(model, head)
        self._gather_mask_dimensions = gather_mask_dimensions
        self.attends_to_parts = gather_mask_dimensions is None
        self.variant = {
            None: "split, mlx-lm's attention replaced",
            4: "split, attention over gathered copies",
            5: "split, attention over gathered copies with grouped masks",
        }[gather_mask_dimensions]

    def _run(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One forward pass for all decoding rows, and one for each other span."""
        decoding = [each for each in spans if each.is_row]
        groups = [decoding] if decoding else []
        logits = [self._decode(decoding, context)] if decoding else []
        for each in spans:
            if not each.is_row:
                groups.append([each])
                logits.append(self._prefill(each, context))
        return _combine_results(spans, groups, logits)

    def _decode(self, spans: list[SequenceSpan], context: StepContext) -> StepLogits:
        """One forward pass for decoding sequences, with one token each."""
        offset = self._operations.share(mx.array([each.span.start for each in spans]))

        def view_of_kv(layers: Sequence[LayerKV]) -> RowsView | GatherView:
            if self._gather_mask_dimensions is not None:
                return GatherView(layers, mask_dimensions=self._gather_mask_dimensions)
            return RowsView(layers, tokens=[1] * len(layers), offset=offset, context=context)

        caches = _views(spans, view_of_kv, StateView)
        return self._run_model(token_ids_of(spans)[:, None], caches, spans)

    def _prefill(self, span: SequenceSpan, context: StepContext) -> StepLogits:
        """One forward pass for a chunk of a prompt, or for a decoding span that verifies a draft."""
        context = _context_for(span, context)
        if self._gather_mask_dimensions is not None:  # attention does not go through the hook
            context = replace(context, composes_attention=False, attends_to_parts=False)
        return self._run_alone(span, context)


class SoloCachedRunner(Runner):
    """Runs each span in its own forward pass, over Holdfast's own states of the layers: slow, but
    with prefix cache. `SoloRunner` runs models whose states Holdfast cannot hold.
    """

    name = "solo"
    variant = "solo, with prefix cache"
    mixes_chunks = False
    attends_to_parts = False

    def _run(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        plain_context = replace(context, composes_attention=False, attends_to_parts=False)
        groups = [[each] for each in spans]
        return _combine_results(
            spans, groups, [self._run_alone(each, plain_context) for each in spans]
        )


class SoloRunner(Runner):
    """Runs each span in its own forward pass, over mlx-lm's own caches: slow and without prefix
    cache, but correct for all models of mlx-lm.
    """

    name = "solo"
    variant = "solo, without prefix cache"
    mixes_chunks = False

    def fresh_layers(
        self, form: KVBits = "native", *, block_tokens: int = BLOCK_TOKENS
    ) -> list[Layer]:
        return [ForeignState(cache) for cache in mlx_lm_caches(self._model)]

    def _run(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        groups = [[each] for each in spans]
        return _combine_results(spans, groups, [self._run_alone(each, context) for each in spans])


def _groups_by_images(spans: Sequence[SequenceSpan]) -> list[list[SequenceSpan]]:
    """Divide spans into groups that can share a forward pass: each span with images is alone."""
    groups_with_images = [[each] for each in spans if each.shows_images]
    without_images = [each for each in spans if not each.shows_images]
    return [without_images, *groups_with_images] if without_images else groups_with_images


def _context_for(span: SequenceSpan, context: StepContext) -> StepContext:
    """The context for a span with its own forward pass. The mask of an image whose tokens attend to
    each other in both directions comes from the model, so MLX computes attention with plain arrays.
    """
    images = span.sequence.images
    if images is None or not images.attend_both_ways or not span.shows_images:
        return context
    return replace(context, composes_attention=False, attends_to_parts=False)


def _vision_arguments(
    model: VisionModel, ids: mx.array, spans: Sequence[SequenceSpan]
) -> dict[str, Any]:
    """What the language model of a model with vision gets besides token ids: positions, and the
    features of images if there is only one span. ids: [rows, tokens]. Lazy.
    """
    arguments: dict[str, Any] = {}
    images = spans[0].sequence.images
    if len(spans) == 1 and images is not None and spans[0].shows_images:
        span = spans[0].span
        arguments = model.arguments(ids, images, start=span.start, tokens=span.tokens)
    if model.takes_positions:
        positions = np.concatenate([each.positions() for each in spans], axis=1)
        arguments["position_ids"] = mx.array(positions).reshape(3, *ids.shape)
    return arguments


def mlx_lm_caches(model: Any) -> list[Any]:
    """mlx-lm's cache objects for one new sequence, one per layer."""
    # not at the top: the hook must be installed first
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def empty_layers(model: Any) -> list[Layer]:
    """Empty layers for a new sequence, in place of mlx-lm's caches. Some may not fit the layout."""
    return [fresh_layer(cache) for cache in mlx_lm_caches(model)]


def _no_recurrent(states: Sequence[RecurrentState]) -> Any:
    """For models without recurrent layers: the layout `rows` does not support them."""
    raise LayoutError("recurrent layers cannot be read as rows")


def _views(
    spans: Sequence[SequenceSpan],
    for_kv: Callable[[Sequence[LayerKV]], Any],
    for_recurrent: Callable[[Sequence[RecurrentState]], Any],
) -> list[Any]:
    """The caches to pass to the model: for each layer, one view of its states in all sequences."""
    layers = zip(*(each.sequence.live.layers for each in spans), strict=True)
    return [states[0].view(states, for_kv=for_kv, for_recurrent=for_recurrent) for states in layers]


def _combine_results(
    spans: Sequence[SequenceSpan],
    groups: Sequence[Sequence[SequenceSpan]],
    logits: Sequence[StepLogits],
) -> StepLogits:
    """Combine the results of several forward passes into one, with the logits in the order of
    `spans`.

    groups: for each forward pass, the spans that it contained. logits: its result.
    """
    if len(groups) == 1:
        return logits[0]
    rows: dict[int, mx.array] = {}
    for group, result in zip(groups, logits, strict=True):
        start = 0
        for each in group:
            if result.to_sample is not None and (row_count := len(each.wanted_rows)):
                rows[id(each)] = result.to_sample[start : start + row_count]
                start += row_count
    to_sample = [rows[id(each)] for each in spans if id(each) in rows]
    all_to_sample = None
    if to_sample:
        all_to_sample = to_sample[0] if len(to_sample) == 1 else mx.concatenate(to_sample)
    return StepLogits(
        to_sample=all_to_sample,
        scored={
            request_id: deferred_logits
            for result in logits
            for request_id, deferred_logits in result.scored.items()
        },
        hidden={
            request_id: states for result in logits for request_id, states in result.hidden.items()
        },
    )


def _project(
    model: Any,
    head: ProjectionHook | None,
    ids: mx.array,
    caches: list[Any],
    spans: Sequence[SequenceSpan],
) -> StepLogits:
    """Run the model once on these spans, and project only the rows whose logits are needed now, if
    the model's projection has a hook.

    head: the hook; None: the model projects all rows. ids: the tokens of the spans, concatenated.
    """
    ends = list(itertools.accumulate(each.span.tokens for each in spans))
    starts = [end - each.span.tokens for end, each in zip(ends, spans, strict=True)]
    rows_to_sample = [
        start + row for start, each in zip(starts, spans, strict=True) for row in each.wanted_rows
    ]
    scored_rows = _rows_in_pass(starts, {each.span.request_id: each.scored_rows for each in spans})
    pooled_rows = _rows_in_pass(starts, {each.span.request_id: each.pooled_rows for each in spans})
    # rows to be projected later, or not at all; no request is in both
    rows_to_defer = scored_rows | pooled_rows
    defers = head is not None and head.can_project_later and bool(rows_to_defer)
    assert defers or not pooled_rows, "the hidden states of this model cannot be reached"
    samples_all = len(rows_to_sample) == ids.size
    # Whether to project only the rows to sample from. If rows cannot be deferred, this pass projects
    # all rows, including those to be scored.
    selects = bool(rows_to_sample) and not samples_all and (defers or not scored_rows)
    sampled_rows = mx.array(rows_to_sample) if rows_to_sample else None
    deferred = None
    if head is None:
        logits = model(ids, cache=caches)
        is_selected = samples_all
    else:
        deferred_rows = None
        if defers:
            deferred_rows = mx.array([*itertools.chain(*rows_to_defer.values())])
        with head.selecting(sampled_rows if selects else None, deferred=deferred_rows):
            logits = model(ids, cache=caches)
        is_selected = samples_all or (selects and head.used)
        deferred = head.take_deferred()
    _trim_states(spans)
    logits_by_row: mx.array = logits.reshape(-1, logits.shape[-1])  # [rows, vocabulary]
    if head is None or deferred is None:
        hidden = {}
        scored = {
            request_id: DeferredLogits(logits_by_row[rows.start : rows.stop])
            for request_id, rows in scored_rows.items()
        }
    else:
        deferred_of_request = _split_by_request(deferred, rows_to_defer)
        hidden = {each: deferred_of_request[each] for each in pooled_rows}
        scored = {
            each: DeferredLogits(deferred_of_request[each], head.project) for each in scored_rows
        }
    if sampled_rows is None:  # the logits of this pass are never evaluated
        return StepLogits(scored=scored, hidden=hidden)
    logits_to_sample = logits_by_row if is_selected else logits_by_row[sampled_rows]
    return StepLogits(to_sample=logits_to_sample, scored=scored, hidden=hidden)


def _trim_states(spans: Sequence[SequenceSpan]) -> None:
    """Trim the states of the long spans. A short span is trimmed later, when its sequence is not in
    a step: until then, the next step uses the whole batch of recurrent states.
    """
    for each in spans:
        each.sequence.is_trimmed = False
        if each.span.tokens > 1:
            each.sequence.trim()


def _split_by_request(
    deferred: mx.array, rows_by_request: Mapping[RequestId, range]
) -> dict[RequestId, mx.array]:
    """Split the deferred rows of all requests, [rows, hidden], into one array per request.

    rows_by_request: the rows of each request in the forward pass; only their number counts here.
    """
    rows_of_request = {}
    first_row = 0
    for request_id, rows in rows_by_request.items():
        rows_of_request[request_id] = deferred[first_row : first_row + len(rows)]
        first_row += len(rows)
    return rows_of_request


def _rows_in_pass(
    starts: Sequence[int], rows_in_span: Mapping[RequestId, range]
) -> dict[RequestId, range]:
    """Convert row numbers within each span to row numbers of the forward pass, in which the spans
    follow one another. Requests without rows are omitted.

    starts: the first row of each span in the pass. rows_in_span: by request, in the same order.
    """
    return {
        request_id: range(start + rows.start, start + rows.stop)
        for start, (request_id, rows) in zip(starts, rows_in_span.items(), strict=True)
        if rows
    }


def choose_sharing(runner: Runner, *, composes_attention: bool | None = None) -> None:
    """Decide whether running sequences share the buffers of a common prefix, and append the reason
    to `runner.reason`.

    composes_attention: whether attention is composed of matrix products, which can take keys and
    values in several buffers; None: as the backend does.
    """
    if composes_attention is None:
        composes_attention = runner.backend.composes_attention
    if not any(leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return
    runner.shares = runner.attends_to_parts and composes_attention
    if runner.shares:
        why = "held once: attention takes several buffers as they are"
    else:
        which_attention = "mlx-lm's attention, which is not replaced,"
        if runner.attends_to_parts:
            which_attention = "fused attention"
        why = (
            "held once while parked, and copied for each running sequence: "
            f"{which_attention} takes one buffer"
        )
    runner.reason += f"; common prefixes are {why}"
