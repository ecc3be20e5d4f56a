"""The three ways to lay out the spans of a step as forward passes.

Which one a model gets is decided by the probe.

Each runner returns the logits of the spans that draw, in the order of the spans; those that score a
prompt are computed later.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.seams import HeadSeam, LaterLogits, StepLogits
from holdfast.worker.engine.sequence import SequenceSpan, token_ids_of
from holdfast.worker.engine.views import GatherView, RowsView, SpanView, StateView, StepContext
from holdfast.worker.kv.kinds import ForeignState, fresh_layer
from holdfast.worker.kv.layer import Layer, LayerKV, LayerState
from holdfast.worker.kv.recurrent import RecurrentState

Model = Callable[..., mx.array]


class LayoutError(Exception):
    """The model cannot be run in this layout; the probe takes the next one."""


class Runner(ABC):
    """One layout of one model.

    mixes_chunks: whether prompt chunks and decoding rows share one forward pass.
    variant: the name, and in which way it is done where there are several.
    reason: why it was chosen; the probe says it.
    attends_to_parts: whether attention takes keys and values in several buffers.
    shares: whether frozen parts are to be held by several sequences (`choose_sharing`); else each
        keeps one buffer of its own.
    """

    name: str
    variant: str
    mixes_chunks: bool
    reason: str = ""
    attends_to_parts: bool = True
    shares: bool = True

    def __init__(self, model: Any, head: HeadSeam | None) -> None:
        self._model, self._head = model, head

    @property
    def hidden_size(self) -> int:
        """Of the hidden states that can be pooled; 0: they cannot be reached in this model."""
        return 0 if self._head is None else self._head.hidden_size

    def fresh_layers(self) -> list[Layer]:
        """Empty live state of a new sequence. Raises LayoutError where a layer cannot be laid out."""
        layers = own_kinds(self._model)
        for leaf in (leaf for layer in layers for leaf in layer.leaves()):
            if leaf.is_foreign:
                raise LayoutError("a layer keeps its state in a cache kind that only mlx-lm knows")
            leaf.can_share = leaf.can_share and self.shares
        return layers

    @abstractmethod
    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """Logits of the spans that want some, lazily."""


class RowsRunner(Runner):
    """Every token of every span is a row of a (tokens, 1) batch; one forward pass serves all.

    A span that is alone in its step keeps its shape, (1, tokens): with one position instead of one
    per row, the model has fewer operations to run.
    """

    name = variant = "rows"
    mixes_chunks = True

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One forward pass over all spans."""
        if len(spans) == 1:
            caches = _views(
                spans, lambda layers: SpanView(layers[0], context=context), _no_recurrent
            )
            return _project(self._model, self._head, token_ids_of(spans)[None], caches, spans)
        tokens = [each.span.tokens for each in spans]
        offset = mx.array(
            [
                position
                for each in spans
                for position in range(each.span.start, each.span.start + each.span.tokens)
            ]
        )
        caches = _views(
            spans,
            lambda layers: RowsView(layers, tokens=tokens, offset=offset, context=context),
            _no_recurrent,
        )
        return _project(self._model, self._head, token_ids_of(spans)[:, None], caches, spans)


class SplitRunner(Runner):
    """Decoding rows share one (sequences, 1) forward pass; each other span has a (1, tokens) pass
    of its own.

    Recurrent states are stacked for the decoding rows. Keys and values go through the seam where
    the model's attention does, else they are gathered into padded copies.
    """

    name = "split"
    mixes_chunks = False

    def __init__(
        self, model: Any, head: HeadSeam | None, *, gather_mask_dimensions: int | None
    ) -> None:
        """gather_mask_dimensions: rank of the mask for gathered copies; None sends attention
        through the seam.
        """
        super().__init__(model, head)
        self._gather = gather_mask_dimensions
        self.attends_to_parts = gather_mask_dimensions is None
        masks = " with grouped masks" if gather_mask_dimensions == 5 else ""
        self.variant = (
            "split, attention "
            f"{'through the seam' if self._gather is None else f'over gathered copies{masks}'}"
        )

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One pass for the decoding spans together, one for each of the others."""
        decoding = [each for each in spans if each.is_row]
        decoded = self._decode(decoding, context) if decoding else StepLogits()
        if len(decoding) == len(spans):
            return decoded
        drawing = [each for each in decoding if each.wanted_rows]
        rows = {
            id(each): decoded.drawn[at : at + 1]
            for at, each in enumerate(drawing)
            if decoded.drawn is not None
        }
        return _joined(
            [
                StepLogits(drawn=rows.get(id(each))) if each.is_row else self._read(each, context)
                for each in spans
            ]
        )

    def _decode(self, spans: list[SequenceSpan], context: StepContext) -> StepLogits:
        def view_of_kv(layers: Sequence[LayerKV]) -> RowsView | GatherView:
            if self._gather is not None:
                return GatherView(layers, mask_dimensions=self._gather)
            offset = mx.array([layer.tokens for layer in layers])
            return RowsView(layers, tokens=[1] * len(layers), offset=offset, context=context)

        caches = _views(spans, view_of_kv, StateView)
        return _project(self._model, self._head, token_ids_of(spans)[:, None], caches, spans)

    def _read(self, span: SequenceSpan, context: StepContext) -> StepLogits:
        if self._gather is not None:  # nothing would come back through the seam
            context = replace(context, composes_attention=False)
        caches = _views(
            [span], lambda layers: SpanView(layers[0], context=context), lambda states: states[0]
        )
        return _project(self._model, self._head, token_ids_of([span])[None], caches, [span])


class SoloRunner(Runner):
    """Each span is a forward pass of its own over mlx-lm's own cache objects: slow, and right for
    whatever mlx-lm runs.
    """

    name = variant = "solo"
    mixes_chunks = False

    def fresh_layers(self) -> list[Layer]:
        """Empty live state of a new sequence."""
        return [ForeignState(cache) for cache in own_caches(self._model)]

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        """One pass per span."""
        return _joined([self._pass(each) for each in spans])

    def _pass(self, span: SequenceSpan) -> StepLogits:
        caches = _views([span], _no_view, _no_view)
        return _project(self._model, self._head, token_ids_of([span])[None], caches, [span])


def own_caches(model: Any) -> list[Any]:
    """mlx-lm's cache objects for one new sequence, one per layer."""
    # late: importing it is what the seam must come before
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def own_kinds(model: Any) -> list[Layer]:
    """The kinds that stand for mlx-lm's cache objects, whether or not a layout can use them."""
    return [fresh_layer(cache) for cache in own_caches(model)]


def _no_recurrent(states: Sequence[RecurrentState]) -> Any:
    raise LayoutError("recurrent layers cannot be read as rows")


def _no_view(states: Sequence[LayerState]) -> Any:
    raise LayoutError("mlx-lm's own objects need no view")


def _views(
    spans: Sequence[SequenceSpan],
    for_kv: Callable[[Sequence[LayerKV]], Any],
    for_recurrent: Callable[[Sequence[RecurrentState]], Any],
) -> list[Any]:
    """What the model gets as its caches: a view of each layer over that layer's states of all these
    sequences.
    """
    layers = zip(*(each.sequence.live.layers for each in spans), strict=True)
    return [states[0].view(states, for_kv=for_kv, for_recurrent=for_recurrent) for states in layers]


def _joined(parts: list[StepLogits]) -> StepLogits:
    drawn = [part.drawn for part in parts if part.drawn is not None]
    scored = {request_id: logits for part in parts for request_id, logits in part.scored.items()}
    hidden = {request_id: rows for part in parts for request_id, rows in part.hidden.items()}
    return StepLogits(
        drawn=mx.concatenate(drawn) if len(drawn) > 1 else next(iter(drawn), None),
        scored=scored,
        hidden=hidden,
    )


def _project(
    model: Any,
    head: HeadSeam | None,
    ids: mx.array,
    caches: list[Any],
    spans: Sequence[SequenceSpan],
) -> StepLogits:
    """Run the model for these spans, laid out one behind the other."""
    ends = list(itertools.accumulate(each.span.tokens for each in spans))
    starts = [end - each.span.tokens for end, each in zip(ends, spans, strict=True)]
    drawn = [
        start + row for start, each in zip(starts, spans, strict=True) for row in each.wanted_rows
    ]
    scored_rows = _places(starts, {each.span.request_id: each.scored_rows for each in spans})
    pooled_rows = _places(starts, {each.span.request_id: each.pooled_rows for each in spans})
    put_aside = scored_rows | pooled_rows  # no sequence has both
    sets_aside = head is not None and head.projects_later and bool(put_aside)
    assert sets_aside or not pooled_rows, "the hidden states of this model cannot be reached"
    everything = len(drawn) == ids.size
    # Without a seam that sets rows aside, those that are scored come out of this pass with all
    # others.
    selects = bool(drawn) and not everything and (sets_aside or not scored_rows)
    rows = mx.array(drawn) if drawn else None
    aside = mx.array([row for at in put_aside.values() for row in at]) if sets_aside else None
    with (
        head.selecting(rows if selects else None, aside=aside)
        if head is not None
        else nullcontext() as selection
    ):
        logits = model(ids, cache=caches)
    for each in spans:
        each.sequence.is_trimmed = False
        if each.span.tokens > 1:
            each.sequence.trim()
    flat: mx.array = logits.reshape(-1, logits.shape[-1])
    set_aside = head.take_aside() if head is not None else None
    hidden: dict[RequestId, mx.array] = {}
    if head is not None and set_aside is not None:
        firsts = itertools.accumulate((len(at) for at in put_aside.values()), initial=0)
        parts = {
            each: set_aside[first : first + len(at)]
            for first, (each, at) in zip(firsts, put_aside.items(), strict=False)
        }
        scored = {
            request_id: LaterLogits(parts[request_id], head.project) for request_id in scored_rows
        }
        hidden = {request_id: parts[request_id] for request_id in pooled_rows}
    else:
        scored = {
            request_id: LaterLogits(flat[at.start : at.stop])
            for request_id, at in scored_rows.items()
        }
    if rows is None:  # the state is evaluated, the logits of this pass may never be
        return StepLogits(scored=scored, hidden=hidden)
    is_selected = everything or (selects and selection is not None and selection.used)
    return StepLogits(drawn=flat if is_selected else flat[rows], scored=scored, hidden=hidden)


def _places(starts: Sequence[int], wanted: Mapping[RequestId, range]) -> dict[RequestId, range]:
    """Where the wanted rows of each span stand among those of all spans, which begin at `starts`;
    who wants none is left out.
    """
    places = zip(starts, wanted.items(), strict=True)
    return {
        request_id: range(start + rows.start, start + rows.stop)
        for start, (request_id, rows) in places
        if rows
    }


def choose_sharing(runner: Runner, *, composes_attention: bool | None = None) -> None:
    """Have the runner's layers share or not, and add to its reason why.

    composes_attention: whether attention takes parts as they are; None: as the device has it.
    """
    takes_parts = (
        StepContext().composes_attention if composes_attention is None else composes_attention
    )
    if not any(leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return
    if not runner.attends_to_parts:
        runner.shares, why = False, "attention outside the seam takes one buffer"
    elif takes_parts:
        runner.shares, why = True, "attention takes several buffers as they are"
    else:
        runner.shares, why = False, "fused attention takes one buffer"
    held = "held once" if runner.shares else "held once while parked, and copied while they run"
    runner.reason += f"; common beginnings are {held}: {why}"
