"""Views of the live states of several sequences, which a model gets as its cache in a forward pass.

A view implements the part of mlx-lm's cache protocol that models use: `offset`, `make_mask`,
`update_and_fetch`, indexing; for a few models, also `keys_and_values`, `keys` and `values`. Views
live for one step. None defines `__len__`: an empty view would be falsy, and models would skip the
mask.

A position is visible to a token if the token attends to it, and a range of adjoining positions may
be in several arrays (parts). Attention sinks (`sinks`, [heads]) are scores that take part in the
softmax without a key; None: the model has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from holdfast.worker.engine import code_attention
from holdfast.worker.engine.backend import AttentionSpan, Backend, in_use
from holdfast.worker.kv.layer import LayerKV, are_alike, joined
from holdfast.worker.kv.recurrent import RecurrentState

_PIECES_PER_SPLIT = 10


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Stands for an attention mask: the sliding window that the model asks for (None: no window).

    The mask's array is created where it is used, because it depends on the span.
    """

    window: int | None


@dataclass(slots=True)
class StepContext:
    """Data that the layers of one step share: how attention is computed, and causal masks.

    backend: computes some operations in place of MLX.
    composes_attention: attention is composed of matrix products (`Backend.composes_attention`).
    attends_to_parts: attention goes through the hook (`mlx_lm_hooks`), which takes keys and values in
        several parts.
    reads_codes: MLX computes decode steps over quantized keys and values without dequantizing them.
    computes_whole_steps: the backend may compute a forward pass as a whole.
    """

    backend: Backend = field(default_factory=in_use)
    composes_attention: bool = field(default_factory=lambda: in_use().composes_attention)
    attends_to_parts: bool = True
    reads_codes: bool = field(default_factory=lambda: in_use().reads_codes())
    computes_whole_steps: bool = True
    _masks: dict[tuple[int, int, int | None], mx.array] = field(default_factory=dict)

    def causal(self, tokens: int, *, keys: int, window: int | None) -> mx.array:
        """A causal mask, bool [tokens, keys]: each of the last `tokens` of `keys` positions sees
        itself and the window - 1 positions before it.
        """
        key = (tokens, keys, window)
        if key not in self._masks:
            query_positions = mx.arange(keys - tokens, keys)[:, None]
            key_positions = mx.arange(keys)[None]
            mask = query_positions >= key_positions
            if window is not None:
                mask &= query_positions < key_positions + window
            self._masks[key] = mask
        return self._masks[key]


def _smaller_window(*windows: int | None) -> int | None:
    """The smallest of these windows; None stands for no window."""
    sizes = [size for size in windows if size is not None]
    return min(sizes) if sizes else None


def _attention_spans(
    layer: LayerKV, queries: mx.array, requested_window: int | None
) -> list[AttentionSpan]:
    """Divide the last appended tokens of a sequence into ranges, oldest first, so that all tokens
    of a range attend to the same keys and values (apart from the causal mask and the window).

    queries: those of these tokens, [1, heads, tokens, head_dim]. requested_window: the sliding window
    that the model asks for, in tokens; None: no window.
    """
    tokens = queries.shape[2]
    window = _smaller_window(requested_window, layer.window)
    return [
        AttentionSpan(
            queries=queries if rows == slice(0, tokens) else queries[:, :, rows],
            parts=parts,
            window=window,
        )
        for rows, parts in layer.attention_ranges(tokens, window)
    ]


def _attend_rows(
    layers: Sequence[LayerKV],
    queries: mx.array,
    *,
    requested_window: int | None,
    sinks: mx.array | None,
    context: StepContext,
) -> mx.array | None:
    """Attention of decoding sequences, one query each, by the backend; None if MLX computes it.

    queries: scaled, [rows, heads, 1, head_dim]; returns [rows, heads, 1, value_dim].
    requested_window: the sliding window that the model asks for, in tokens; None: no window.
    """
    if not context.composes_attention:
        return None
    visible_tokens = [
        layer.seen_by_last(_smaller_window(requested_window, layer.window)) for layer in layers
    ]
    return context.backend.attend_rows(layers, visible_tokens, queries, sinks=sinks)


def _attend(
    spans: Sequence[AttentionSpan], *, scale: float, sinks: mx.array | None, context: StepContext
) -> list[mx.array]:
    """Attention of each span over its own sequence. scale: the factor by which the queries still
    have to be multiplied.
    """
    if context.composes_attention:
        attended = context.backend.attend_spans(spans, sinks=sinks)
        if attended is not None:
            return attended
    return [_attend_alone(span, scale, sinks, context) for span in spans]


def _attend_each(
    layers: Sequence[LayerKV],
    queries: Sequence[mx.array],
    *,
    requested_window: int | None,
    scale: float,
    sinks: mx.array | None,
    context: StepContext,
) -> list[mx.array]:
    """Attention of the last appended tokens of each sequence. If all sequences have one token, callers
    have already tried `_attend_rows`.

    queries: of each sequence, [1, heads, tokens, head_dim]; scale: the factor by which they still
    have to be multiplied. requested_window: the sliding window that the model asks for, in tokens;
    None: no window.
    """
    results: dict[int, mx.array] = {}
    spans: dict[int, list[AttentionSpan]] = {}
    decoding_indices = [index for index, query in enumerate(queries) if query.shape[2] == 1]
    if 0 < len(decoding_indices) < len(queries):  # decoding sequences together with prompts
        decoded_rows = _attend_rows(
            [layers[index] for index in decoding_indices],
            mx.concatenate([queries[index] for index in decoding_indices]),
            requested_window=requested_window,
            sinks=sinks,
            context=context,
        )
        if decoded_rows is not None:
            results = dict(
                zip(
                    decoding_indices,
                    _split_rows(decoded_rows, [1] * len(decoding_indices)),
                    strict=True,
                )
            )
    for index, (layer, query) in enumerate(zip(layers, queries, strict=True)):
        if index in results:
            continue
        if context.reads_codes and layer.bits and query.shape[2] == 1:
            visible_tokens = layer.seen_by_last(_smaller_window(requested_window, layer.window))
            results[index] = code_attention.attend(
                layer, visible_tokens, query * scale, sinks=sinks
            )
        else:
            spans[index] = _attention_spans(layer, query, requested_window)
    all_spans = [span for ranges in spans.values() for span in ranges]
    attended = iter(_attend(all_spans, scale=scale, sinks=sinks, context=context))
    for index, ranges in spans.items():
        parts = [next(attended) for _ in ranges]
        results[index] = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return [results[index] for index in range(len(layers))]


def _attend_alone(
    span: AttentionSpan, scale: float, sinks: mx.array | None, context: StepContext
) -> mx.array:
    """Attention of one span by MLX, [1, heads, tokens, value_dim]."""
    visible_tokens = span.seen_tokens
    mask: mx.array | str | None = None
    if span.tokens > 1:
        is_window_exceeded = span.window is not None and visible_tokens > span.window
        mask = (
            context.causal(span.tokens, keys=visible_tokens, window=span.window)
            if is_window_exceeded
            else "causal"
        )
    elif sinks is None and context.composes_attention:
        attended = context.backend.attend_one(span.queries, span.parts)
        if attended is not None:
            return attended
    keys, values = span.parts[0] if len(span.parts) == 1 else joined(span.parts)
    return mx.fast.scaled_dot_product_attention(
        span.queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


class KVView:
    """Base of the views of keys and values. Remembers what `update_and_fetch` returned: in some
    models, later layers attend to the same keys and values, or read them from `keys` and `values`.

    Some models also assign `keys` and `values`, so that mlx-lm evaluates them with the step. Here,
    nothing uses what they assign, because every step evaluates the state itself.
    """

    offset: Any
    keys: Any = None
    values: Any = None

    @property
    def start_position(self) -> Any:
        """The position of the first key, for models that create the mask themselves."""
        return self.offset

    def maybe_trim_front(self) -> None:
        """Does nothing. llama4 calls this method of mlx-lm's chunked caches to drop old chunks,
        but here the state drops them itself.
        """

    def keys_and_values(self) -> tuple[Any, Any]:
        """What `update_and_fetch` returned in this forward pass."""
        return self.keys, self.values

    def _remember(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Keep what `update_and_fetch` returns, for later layers. Returns both."""
        self.keys = keys
        self.values = values
        return keys, values


class RowsView(KVView):
    """One layer in the rows layout: every token is a row; the rows of a span are consecutive.

    The model calls attention through the hook, which calls `attend` here: attention is computed
    span by span, each over its own sequence.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        *,
        tokens: Sequence[int],
        offset: mx.array,
        context: StepContext,
    ) -> None:
        """layers: this layer of each sequence. tokens: the length of each sequence's span. offset:
        the position of each row, int32 [rows].
        """
        self._layers = layers
        self._tokens = tokens
        self._context = context
        self.offset = offset

    @property
    def shape(self) -> tuple[int, int, mx.array, int]:
        """Like the shape of keys, but the number of tokens is an array, because it differs by row.

        Models subtract the number of new tokens from it to get the position of the queries.
        """
        return len(self.offset), self._kv_heads, self.offset + 1, self._head_dimension

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask:
        """Return the window that the model asks for. The mask itself is created for each span."""
        return WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsView, RowsView]:
        """Append each span to its sequence. Returns the view twice, as keys and as values, so that
        the hook calls `attend`.

        keys, values: [rows, kv_heads, 1, head_dim].
        """
        _, self._kv_heads, _, self._head_dimension = keys.shape
        if len(self._layers) > 1 and are_alike(keys, values):
            # joined once for all rows, so that each sequence needs one write instead of two
            keys_and_values = mx.concatenate([keys, values], axis=1)
            for layer, new_arrays in zip(self._layers, self._split(keys_and_values), strict=True):
                layer.append_arrays((new_arrays,))
            return self, self
        for layer, new_keys, new_values in zip(
            self._layers, self._split(keys), self._split(values), strict=True
        ):
            layer.append(new_keys, new_values)
        return self, self

    def keys_and_values(self) -> tuple[RowsView, RowsView]:
        """The view twice, so that another layer attends to the same keys and values."""
        return self, self

    def attend(
        self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Compute attention. queries: [rows, heads, 1, head_dim]; returns the same shape."""
        requested_window = mask.window if isinstance(mask, WindowMask) else None
        if self._context.composes_attention and scale != 1.0:
            queries = queries * scale  # once for all rows
            scale = 1.0
        if queries.shape[0] == len(self._layers):
            decoded = _attend_rows(
                self._layers,
                queries,
                requested_window=requested_window,
                sinks=sinks,
                context=self._context,
            )
            if decoded is not None:
                return decoded
        parts = _attend_each(
            self._layers,
            self._split(queries),
            requested_window=requested_window,
            scale=scale,
            sinks=sinks,
            context=self._context,
        )
        # transposed before they are joined, so that the model's reshape copies nothing
        rows = [
            _rows_swapped(part, tokens) for part, tokens in zip(parts, self._tokens, strict=True)
        ]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)

    def _split(self, rows: mx.array) -> list[mx.array]:
        """The rows of each span as [1, heads, tokens, head_dim]."""
        spans = _split_rows(rows, self._tokens)
        return [
            _rows_swapped(span, tokens) for span, tokens in zip(spans, self._tokens, strict=True)
        ]


def _rows_swapped(span: mx.array, tokens: int) -> mx.array:
    """Swap axes 0 and 2: [tokens, heads, 1, dim] to [1, heads, tokens, dim], or back."""
    return span if tokens == 1 else span.swapaxes(0, 2)


def _split_rows(rows: mx.array, tokens: Sequence[int]) -> list[mx.array]:
    """Cut the rows into spans, ten at a time: MLX splits up to ten pieces in one graph operation,
    but needs one operation per piece if there are more.
    """
    if len(tokens) == 1:
        return [rows]
    groups = [
        tokens[index : index + _PIECES_PER_SPLIT]
        for index in range(0, len(tokens), _PIECES_PER_SPLIT)
    ]
    if len(groups) > 1:
        pieces = _split_rows(rows, [sum(group) for group in groups])
        return [
            span
            for piece, group in zip(pieces, groups, strict=True)
            for span in _split_rows(piece, group)
        ]
    return list(mx.split(rows, list(itertools.accumulate(tokens[:-1])), axis=0))


class GatherView(KVView):
    """The keys and values of one layer for several decoding sequences, as padded copies and a mask.

    For models that compute attention themselves instead of calling mlx-lm's attention function.
    """

    def __init__(self, layers: Sequence[LayerKV], *, mask_dimensions: int) -> None:
        self._layers = layers
        self._mask_dimensions = mask_dimensions
        self.offset = mx.array([layer.tokens for layer in layers])

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """The mask of the positions that each row sees, including the new one: bool [rows, 1, …, 1,
        longest].
        """
        visible_tokens = [_visible_tokens(layer, 1) for layer in self._layers]
        lengths = mx.array(visible_tokens).reshape(
            (len(visible_tokens),) + (1,) * (self._mask_dimensions - 1)
        )
        positions = mx.arange(max(visible_tokens))
        mask = positions < lengths
        return mask if window_size is None else mask & (positions >= lengths - window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token to each sequence, and return the keys and values that each row sees.

        keys, values: [rows, kv_heads, 1, head_dim]. Returns two arrays [rows, kv_heads, longest,
        head_dim], padded with zeros.
        """
        visible_tokens = [_visible_tokens(layer, 1) for layer in self._layers]
        visible_pairs = []
        for row, (layer, visible) in enumerate(zip(self._layers, visible_tokens, strict=True)):
            layer.append(keys[row : row + 1], values[row : row + 1])
            visible_pairs.append(layer.last(visible))
        return self._remember(
            mx.concatenate([_padded(pair[0], max(visible_tokens)) for pair in visible_pairs]),
            mx.concatenate([_padded(pair[1], max(visible_tokens)) for pair in visible_pairs]),
        )


def _visible_tokens(layer: LayerKV, tokens: int) -> int:
    """How many positions the next `tokens` tokens of a sequence see together, including their own."""
    return tokens + layer.visible_before_next()


def _padded(array: mx.array, tokens: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, tokens - array.shape[2]), (0, 0)])


class SpanView(KVView):
    """One layer of one sequence whose span has its own forward pass.

    The model gets plain arrays and masks, as from mlx-lm's caches. If attention is composed of
    matrix products, the hook calls `attend` here instead.
    """

    def __init__(self, layer: LayerKV, *, context: StepContext) -> None:
        self._layer = layer
        self._context = context
        self.offset: int = layer.tokens

    @property
    def start_position(self) -> int:
        return self.offset - _visible_tokens(self._layer, 0)

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | WindowMask | None:
        """The mask for the keys that `update_and_fetch` will return; if attention is composed, only
        the window that the model asks for.
        """
        if self._attends:
            return WindowMask(window_size)
        window = _smaller_window(window_size, self._layer.window)
        visible_tokens = _visible_tokens(self._layer, tokens)
        if window is None or visible_tokens <= window:
            if tokens == 1:
                return None
            if not return_array:
                return "causal"
        return self._context.causal(tokens, keys=visible_tokens, window=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the span, and return the keys and values that it sees.

        keys, values: [1, kv_heads, tokens, head_dim]. If attention is composed, returns the view
        twice instead, so that the hook calls `attend`.
        """
        visible_tokens = _visible_tokens(self._layer, keys.shape[2])
        self._layer.append(keys, values)
        if not self._attends:
            first_position = self._layer.tokens - keys.shape[2]
            quantized_tokens = self._layer.quantized_before(self._layer.tokens - 1)
            assert quantized_tokens <= first_position, (
                "a span reaches into another block of quantized KV"
            )
            return self._remember(*self._layer.last(visible_tokens))
        self.shape = (1, keys.shape[1], self._layer.tokens, keys.shape[3])
        return self, self

    def keys_and_values(self) -> tuple[Any, Any]:
        if self._attends:
            # `_remember` would make a reference cycle, which keeps the state alive
            return self, self
        return super().keys_and_values()

    @property
    def _attends(self) -> bool:
        """Whether attention goes through `attend` instead of MLX's fused kernel in the model. With
        quantized keys and values it must: queries in different blocks see different tokens
        quantized.
        """
        is_quantized = self._layer.bits is not None
        return self._context.composes_attention or (is_quantized and self._context.attends_to_parts)

    def attend(
        self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Compute attention. queries: [1, heads, tokens, head_dim]; returns the same shape."""
        requested_window = mask.window if isinstance(mask, WindowMask) else None
        queries = queries if scale == 1.0 else queries * scale
        if queries.shape[2] == 1:
            decoded = _attend_rows(
                [self._layer],
                queries,
                requested_window=requested_window,
                sinks=sinks,
                context=self._context,
            )
            if decoded is not None:
                return decoded
        (attended,) = _attend_each(
            [self._layer],
            [queries],
            requested_window=requested_window,
            scale=1.0,
            sinks=sinks,
            context=self._context,
        )
        return attended


class StateView:
    """One recurrent layer of one or several sequences.

    Reading a slot stacks the states of all sequences; writing a stack turns the state of each
    sequence into a row of the stack.
    """

    lengths = None
    left_padding = None

    def __init__(self, states: Sequence[RecurrentState]) -> None:
        self._states = states

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """mlx-lm's class, because mamba stores its state only in an instance of that class."""
        # not at the top: the hook must be installed first
        from mlx_lm.models.cache import ArraysCache

        return ArraysCache

    def __getitem__(self, index: int) -> mx.array | None:
        """The slot of all sequences, [sequences, …]; None if it is empty."""
        stack, first_row = self._states[0].stacked(index)
        if stack is None:
            return None
        if (
            first_row == 0
            and stack.shape[0] == len(self._states)
            and self._is_stack_of_all(index, stack)
        ):
            return stack  # has the states of exactly these sequences
        rows = [state[index] for state in self._states]
        return mx.concatenate([row for row in rows if row is not None])

    def _is_stack_of_all(self, index: int, stack: mx.array) -> bool:
        """Whether row 0 of the stack is the first state's slot, row 1 the second's, and so on."""
        stacked = (state.stacked(index) for state in self._states)
        return all(array is stack and row == number for number, (array, row) in enumerate(stacked))

    def __setitem__(self, index: int, value: mx.array) -> None:
        """Set the slot of all sequences. value: [sequences, …]."""
        for row, state in enumerate(self._states):
            state.set_row(index, value, row)

    def update_window(
        self, index: int, source: mx.array, width: int, *, lengths: None = None
    ) -> mx.array:
        """Keep the last `width` positions of `source`, [rows, positions, …], in a slot (mlx-vlm)."""
        self[index] = window = mx.contiguous(source[:, source.shape[1] - width :])
        return window

    def update_recurrent(
        self,
        index: int,
        length: int,
        update: Callable[[mx.array | None, None], tuple[mx.array, ...]],
    ) -> tuple[mx.array, mx.array]:
        """Replace a slot by the result of `update` (mlx-vlm). Returns the output and the new state."""
        output, state, *_ = update(self[index], None)
        self[index] = state
        return output, state

    def make_mask(self, tokens: int) -> None:
        """Returns None, as mlx-lm's caches do without padding: there is nothing to mask."""

    def advance(self, tokens: int) -> None:
        """Does nothing: in mlx-lm's caches, this method counts padding, and here there is none."""
