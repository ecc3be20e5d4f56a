"""The three ways to lay out the spans of a step as forward passes. Which one a model gets is decided by the probe.

Each runner returns the logits of the spans that draw, in the order of the spans; those that score a prompt are computed later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from holdfast.engine.sequence import SequenceSpan, TokenSource
from holdfast.engine.step_logits import LaterLogits, StepLogits
from holdfast.engine.views import GatherView, LoneView, MaskCache, RowsView, SpanView, StateView, layer_view
from holdfast.kv.foreign import ForeignState
from holdfast.kv.kinds import LayerKV, LayerState, RecurrentState, fresh_layer, has_foreign
from holdfast.messages.requests import RequestId
from holdfast.models.head_seam import HeadSeam

Model = Callable[..., mx.array]


class LayoutError(Exception):
    """The model cannot be run in this layout; the probe takes the next one."""


class Runner(Protocol):
    """One layout of one model."""

    name: str
    mixes_chunks: bool  # whether prompt chunks and decoding rows share one forward pass

    def fresh_layers(self) -> list[LayerState]:
        """Empty live state of a new sequence."""
        ...

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits:
        """Logits of the spans that want some, lazily."""
        ...


class RowsRunner:
    """Every token of every span is a row of a (tokens, 1) batch; one forward pass serves all.

    A span that is alone in its step keeps its shape, (1, tokens): with one position instead of one per row, the model has fewer
    operations to run.
    """

    name = "rows"
    mixes_chunks = True

    def __init__(self, model: Any, head: HeadSeam | None) -> None:
        self._model, self._head = model, head

    def fresh_layers(self) -> list[LayerState]:
        """Empty live state of a new sequence."""
        return _own_layers(self._model, allow_recurrent=False)

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits:
        """One forward pass over all spans."""
        if len(spans) == 1:
            return self._forward_alone(spans[0])
        tokens = [each.span.tokens for each in spans]
        offset = mx.array([position for each in spans for position in range(each.span.start, each.span.start + each.span.tokens)])
        masks = MaskCache()
        caches = _views(spans, lambda layers: RowsView(layers, tokens=tokens, offset=offset, masks=masks), _no_recurrent)
        ids = TokenSource().gather(list(spans))
        return _project(self._model, self._head, ids[:, None], caches, spans)

    def _forward_alone(self, span: SequenceSpan) -> StepLogits:
        masks = MaskCache()
        caches = _views([span], lambda layers: LoneView(layers[0], masks=masks), _no_recurrent)
        return _project(self._model, self._head, TokenSource().gather([span])[None], caches, [span])


class SplitRunner:
    """Decoding rows share one (sequences, 1) forward pass; each prompt chunk has a (1, tokens) pass of its own.

    Recurrent states are stacked for the decoding rows. Keys and values go through the seam where the model's attention does, else
    they are gathered into padded copies.
    """

    name = "split"
    mixes_chunks = False

    def __init__(self, model: Any, head: HeadSeam | None, *, gather_mask_dimensions: int | None) -> None:
        """gather_mask_dimensions: rank of the mask for gathered copies; None sends attention through the seam."""
        self._model, self._head, self._gather = model, head, gather_mask_dimensions

    def fresh_layers(self) -> list[LayerState]:
        """Empty live state of a new sequence."""
        return _own_layers(self._model, allow_recurrent=True)

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits:
        """One pass for the decoding spans together, one for each of the others."""
        decoding = [each for each in spans if each.is_decoding]
        decoded = self._decode(decoding) if decoding else StepLogits()
        if len(decoding) == len(spans):
            return decoded
        drawing = [each for each in decoding if each.span.draws]
        rows = {id(each): decoded.drawn[at : at + 1] for at, each in enumerate(drawing) if decoded.drawn is not None}
        return _joined([StepLogits(drawn=rows.get(id(each))) if each.is_decoding else self._read(each) for each in spans])

    def _decode(self, spans: list[SequenceSpan]) -> StepLogits:
        caches = _views(spans, self._view_of_kv, StateView)
        return _project(self._model, self._head, TokenSource().gather(spans)[:, None], caches, spans)

    def _view_of_kv(self, layers: Sequence[LayerKV]) -> RowsView | GatherView:
        if self._gather is not None:
            return GatherView(layers, mask_dimensions=self._gather)
        offset = mx.array([layer.tokens for layer in layers])
        return RowsView(layers, tokens=[1] * len(layers), offset=offset, masks=MaskCache())

    def _read(self, span: SequenceSpan) -> StepLogits:
        masks = MaskCache()
        view = LoneView if self._gather is None else SpanView
        caches = _views([span], lambda layers: view(layers[0], masks=masks), lambda states: states[0])
        return _project(self._model, self._head, TokenSource().gather([span])[None], caches, [span])


class SoloRunner:
    """Each span is a forward pass of its own over mlx-lm's own cache objects: slow, and right for whatever mlx-lm runs."""

    name = "solo"
    mixes_chunks = False

    def __init__(self, model: Any, head: HeadSeam | None) -> None:
        self._model, self._head = model, head

    def fresh_layers(self) -> list[LayerState]:
        """Empty live state of a new sequence."""
        return [ForeignState(cache) for cache in self.own_caches(self._model)]

    @staticmethod
    def own_caches(model: Any) -> list[Any]:
        """mlx-lm's cache objects for one new sequence, one per layer."""
        from mlx_lm.models.cache import make_prompt_cache  # late: importing it is what the seam must come before

        return list(make_prompt_cache(model))

    def own_kinds(self) -> list[LayerState]:
        """The kinds that stand for mlx-lm's cache objects, whether or not a layout can use them."""
        return [fresh_layer(cache) for cache in self.own_caches(self._model)]

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits:
        """One pass per span."""
        return _joined([self._pass(each) for each in spans])

    def _pass(self, span: SequenceSpan) -> StepLogits:
        caches = [layer.cache for layer in span.sequence.layers if isinstance(layer, ForeignState)]
        return _project(self._model, self._head, TokenSource().gather([span])[None], caches, [span])


def _own_layers(model: Any, *, allow_recurrent: bool) -> list[LayerState]:
    layers = SoloRunner(model, None).own_kinds()
    if any(has_foreign(layer) for layer in layers):
        raise LayoutError("a layer keeps its state in a cache kind that only mlx-lm knows")
    if not allow_recurrent and any(isinstance(layer, RecurrentState) for layer in layers):
        raise LayoutError("recurrent layers cannot be read as rows")
    return layers


def _no_recurrent(states: Sequence[RecurrentState]) -> Any:
    raise LayoutError("recurrent layers cannot be read as rows")


def _views(
    spans: Sequence[SequenceSpan],
    for_kv: Callable[[Sequence[LayerKV]], Any],
    for_recurrent: Callable[[Sequence[RecurrentState]], Any],
) -> list[Any]:
    layers = zip(*(each.sequence.layers for each in spans), strict=True)
    return [layer_view(states, for_kv=for_kv, for_recurrent=for_recurrent) for states in layers]


def _joined(parts: list[StepLogits]) -> StepLogits:
    drawn = [part.drawn for part in parts if part.drawn is not None]
    scored = {request_id: logits for part in parts for request_id, logits in part.scored.items()}
    return StepLogits(drawn=mx.concatenate(drawn) if len(drawn) > 1 else next(iter(drawn), None), scored=scored)


def _project(model: Any, head: HeadSeam | None, ids: mx.array, caches: list[Any], spans: Sequence[SequenceSpan]) -> StepLogits:
    """Run the model for these spans, laid out one behind the other."""
    wanted = _WantedRows.of(spans)
    sets_aside = head is not None and head.projects_later and bool(wanted.scored)
    everything = len(wanted.drawn) == ids.size
    # Without a seam that sets rows aside, those that are scored come out of this pass with all others.
    selects = bool(wanted.drawn) and not everything and (sets_aside or not wanted.scored)
    rows = mx.array(wanted.drawn) if wanted.drawn else None
    aside = mx.array([row for _, scored in wanted.scored for row in scored]) if sets_aside else None
    with head.selecting(rows if selects else None, aside=aside) if head is not None else nullcontext() as selection:
        logits = model(ids, cache=caches)
    for each in spans:
        each.sequence.is_settled = False
        if each.span.tokens > 1:
            each.sequence.settle()
    flat: mx.array = logits.reshape(-1, logits.shape[-1])
    set_aside = head.take_aside() if head is not None else None
    if head is not None and set_aside is not None:
        scored = _aside(set_aside, wanted, head.project)
    else:
        scored = {request_id: LaterLogits(flat[at.start : at.stop]) for request_id, at in wanted.scored}
    if rows is None:
        return StepLogits(scored=scored)  # the state is evaluated, the logits of this pass may never be
    is_selected = everything or (selects and selection is not None and selection.used)
    return StepLogits(drawn=flat if is_selected else flat[rows], scored=scored)


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Rows of the flattened positions: those that draw, and for each request that is scored its range."""

    drawn: list[int]
    scored: list[tuple[RequestId, range]]

    @staticmethod
    def of(spans: Sequence[SequenceSpan]) -> _WantedRows:
        drawn, scored, first = [], [], 0
        for each in spans:
            followers = len(each.scored_tokens)
            if followers:
                scored.append((each.span.request_id, range(first, first + followers)))
            first += each.span.tokens
            if each.span.draws:
                drawn.append(first - 1)
        return _WantedRows(drawn, scored)


def _aside(rows: mx.array, wanted: _WantedRows, project: Callable[[mx.array], mx.array]) -> dict[RequestId, LaterLogits]:
    first, scored = 0, {}
    for request_id, positions in wanted.scored:
        scored[request_id] = LaterLogits(rows[first : first + len(positions)], project)
        first += len(positions)
    return scored
