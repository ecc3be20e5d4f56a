"""Forward passes through decoders like Llama's on a CPU, without MLX.

A decode step of a small model on a CPU spends more time on MLX's operations, 10 to 20 µs each, than
on computing, and in prefill, MLX computes norms, rotations and SiLU on one core. So for models of
these architectures, C functions (`kernels/decoder`) compute everything but attention, which is that
of the C kernel or of numpy, and write keys and values into the buffers of the sequences in place.
A step of few tokens is one call. Rounds differently than MLX. Device thread only.

A span is the new tokens of one sequence in a step; a row is one token of the step. A run is a range of
adjoining tokens in one buffer of stored keys and values, which one or several sequences share.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.positional_encoding import RoPE

from holdfast.worker.cpu import fast_on_cpu, packed_layers
from holdfast.worker.cpu.fast_on_cpu import RopeArguments
from holdfast.worker.cpu.host_attention import HostSpan, attend_in_numpy, threads_to_use
from holdfast.worker.cpu.host_decoding import attend_in_place, bits_of, description
from holdfast.worker.cpu.kernels import decoder
from holdfast.worker.cpu.kernels.decode_attention import NATIVE_BITS, RUN, shared_runs, supports
from holdfast.worker.cpu.kernels.decoder import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    ForwardPass,
    NewTokens,
)
from holdfast.worker.engine.mlx_lm_hooks import StepLogits
from holdfast.worker.engine.sequence import SequenceSpan
from holdfast.worker.engine.views import RowsView, StepContext
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import KVParts, LayerKV, StoredRun

logger = logging.getLogger("holdfast.worker")

# new tokens of a step that is computed in one call; with more, attention is faster in numpy
MOST_TOKENS = 64
_MODULES = ("llama", "qwen2", "qwen3")  # mlx-lm runs other models of this design with these modules
_TABLE_POSITIONS = 64  # positions whose cosines and sines are computed together, as one table
_MOST_ROTATION_TABLES = 64  # tables to keep
_CHECKED_POSITIONS = (0, 77, 5000)  # of the first token when results are compared with mlx-lm's
_NATIVE = (NATIVE_BITS, NATIVE_BITS)  # bits of keys and values that are not quantized


class _SharedRun(NamedTuple):
    """A run of tokens to which the same rows attend."""

    sequence: int  # one of those that store it, counted from 0
    run: int  # its number among the runs that this sequence stores
    start: int  # within the stored arrays
    end: int
    first_row: int  # index of its first entry in the list of row ids
    row_count: int


# the state of a sequence, layer by layer, and how many tokens it gets
_Span: TypeAlias = tuple[Sequence[Any], int]


class HostDecoder:
    """One model's decoder in C, with the tables of cosines and sines for its rotary embedding."""

    def __init__(self, decoder: Decoder, rope: RopeArguments) -> None:
        self._decoder = decoder
        self._rope = rope
        shape = decoder.shape
        self._kv_heads = shape.kv_heads
        # for `LayerKV.make_room`, which takes shape and type of keys and values from an example
        self._empty_kv = mx.zeros((1, 2 * shape.kv_heads, 0, shape.head_dimension))
        # cosines and sines by the first position of a table, the most recently used table last
        self._rotation_tables: dict[int, npt.NDArray[np.float32]] = {}

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits | None:
        """Run a step. Returns None, and adds no tokens, if MLX has to run it: for
        log-probabilities of prompts, for pooling, and for states that C cannot write into.
        """
        if any(each.scored_rows or each.pooled_rows for each in spans):
            return None
        if not all(each.is_decoding for each in spans):
            # a state may have been rewound, while MLX still copies from its buffers
            mx.synchronize()
        starts = itertools.accumulate((each.span.tokens for each in spans), initial=0)
        wanted_rows = [
            start + row
            for start, each in zip(starts, spans, strict=False)
            for row in each.wanted_rows
        ]
        logits = self.compute(
            np.concatenate([_token_ids(each) for each in spans]),
            [(each.sequence.live.leaves, each.span.tokens) for each in spans],
            positions=[each.span.start + row for each in spans for row in range(each.span.tokens)],
            wanted_rows=wanted_rows,
        )
        if logits is None:
            return None
        for each in spans:
            each.sequence.is_trimmed = False
            if each.span.tokens > 1:
                each.sequence.trim()
        return StepLogits(
            to_sample=logits if wanted_rows else None,
            is_computed=not any(each.sequence.live.is_quantized for each in spans),
        )

    def compute(
        self,
        token_ids: npt.NDArray[np.integer],
        spans: Sequence[_Span],
        *,
        positions: Sequence[int],
        wanted_rows: Sequence[int],
    ) -> mx.array | None:
        """Add tokens to sequences, and return the logits of the wanted rows, [wanted, vocabulary].

        token_ids: [rows], those of all spans, one after the other. positions: of these tokens. spans:
        the state of each sequence, layer by layer, and how many tokens it gets. Returns None, and adds
        nothing, if C cannot write into a state, or a token is not in the vocabulary.
        """
        ids = token_ids.astype(np.int32)
        if not self._make_room(spans) or ids.min() < 0 or ids.max() >= self._decoder.vocabulary:
            return None
        in_one_call = len(ids) <= MOST_TOKENS and all(
            layer.see_one_form(tokens) for layers, tokens in spans for layer in layers
        )
        addresses, capacities = self._write_addresses(spans)
        forward = self._decoder.begin(
            NewTokens(
                token_ids=ids,
                rotation_factors=np.stack(
                    [self._cosines_and_sines(position) for position in positions]
                ),
                wanted_rows=np.array(wanted_rows, np.int32),
                key_addresses=addresses,
                capacities=capacities,
            )
        )
        return mx.array(
            self._compute_in_one_call(forward, spans)
            if in_one_call
            else self._compute_by_layer(forward, spans)
        )

    def _make_room(self, spans: Sequence[_Span]) -> bool:
        """Make room for the new tokens in all states. Returns False if C cannot write into one."""
        if not all(
            isinstance(layer, LayerKV) and layer.make_room(self._empty_kv, tokens)
            for layers, tokens in spans
            for layer in layers
        ):
            return False
        mx.eval([list(layer.arrays()) for layers, _ in spans for layer in layers])
        return True

    def _write_addresses(
        self, spans: Sequence[_Span]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The addresses where the new tokens' keys go, [layers, rows], and the capacities of these
        buffers in tokens, [rows].
        """
        addresses = []
        for layer_number in range(len(spans[0][0])):
            for layers, tokens in spans:
                buffer, end = layers[layer_number].write_position()
                row_bytes = _row_bytes(buffer)
                first_address = _address(buffer) + end * row_bytes
                addresses.append(first_address + row_bytes * np.arange(tokens, dtype=np.uint64))
        capacities = [layers[0].write_position()[0].shape[2] for layers, _ in spans]
        tokens_of_spans = [tokens for _, tokens in spans]
        return (
            np.concatenate(addresses),
            np.repeat(np.array(capacities, np.int64), tokens_of_spans),
        )

    def _compute_in_one_call(
        self, forward: ForwardPass, spans: Sequence[_Span]
    ) -> npt.NDArray[np.float32]:
        """Compute the logits, with the kernel's attention over a table of all layers' runs."""
        for layers, tokens in spans:
            for layer in layers:
                layer.add_written(tokens)
        stored_runs = [
            [list(layer.stored(layer.tokens)) for layer in layers_of_number]
            for layers_of_number in zip(*(layers for layers, _ in spans), strict=True)
        ]
        # every layer divides its tokens into the same runs, so those of the first layer are used
        shared, row_ids = _shared_runs_of(stored_runs[0], [tokens for _, tokens in spans])
        entries = []
        for layer_number, runs_of_layer in enumerate(stored_runs):
            for sequence, index, start, end, first_row, row_count in shared:
                arrays = runs_of_layer[sequence][index][0]
                layers, _ = spans[sequence]
                bits = bits_of(layers[layer_number]) if len(arrays) > 1 else _NATIVE
                entries.append(
                    (*self._addresses(arrays, start), end - start, *bits, first_row, row_count)
                )
        runs = np.array(entries, RUN).reshape(len(stored_runs), len(shared))
        return forward.compute(runs, row_ids, threads=threads_to_use())

    def _compute_by_layer(
        self, forward: ForwardPass, spans: Sequence[_Span]
    ) -> npt.NDArray[np.float32]:
        """Compute the logits layer by layer, with attention over long spans in numpy."""
        x = forward.embed()
        for number in range(len(spans[0][0])):
            queries = forward.before_attention(number, x)
            for layers, tokens in spans:
                layers[number].add_written(tokens)
            attended = _attend([(layers[number], tokens) for layers, tokens in spans], queries)
            forward.after_attention(number, attended, x)
        return forward.project(x)

    def _addresses(self, arrays: Sequence[mx.array], start: int) -> tuple[int, ...]:
        """The fields of a run in the kernel's table (`RUN`) up to `capacity`: the addresses of token
        `start` in keys, values, their scales and biases (0 if not quantized), and the capacity.

        arrays: keys and values, or the codes, scales and biases of both, in one array or in two.
        """
        addresses = [_address(array) + start * _row_bytes(array) for array in arrays]
        capacity = arrays[0].shape[2]
        if len(arrays) in (1, 3):  # one array has the heads of the keys, then those of the values
            key_rows = self._kv_heads * capacity
            addresses += [
                address + key_rows * _row_bytes(array)
                for address, array in zip(addresses, arrays, strict=True)
            ]
        half = len(addresses) // 2
        (keys, *key_scales), (values, *value_scales) = addresses[:half], addresses[half:]
        return keys, values, *(key_scales or (0, 0)), *(value_scales or (0, 0)), capacity

    def _cosines_and_sines(self, position: int) -> npt.NDArray[np.float32]:
        """The cosines and sines of a position, [2 × rotated], from a table that is kept."""
        index = position % _TABLE_POSITIONS
        start = position - index
        table = self._rotation_tables.pop(start, None)
        if table is None:
            table = fast_on_cpu.cosines_and_sines(self._rope, start, tokens=_TABLE_POSITIONS)
            if len(self._rotation_tables) == _MOST_ROTATION_TABLES:
                del self._rotation_tables[next(iter(self._rotation_tables))]
        self._rotation_tables[start] = table  # the last used comes last
        row: npt.NDArray[np.float32] = table[index]
        return row


def _attend(
    spans: Sequence[tuple[LayerKV, int]], queries: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Attention of the new tokens of several sequences, each over its own keys and values, to which
    they were added before: by `attend_in_place` for single tokens, in numpy for several.

    spans: the layer's state of each sequence, and its number of new tokens. queries: [rows, heads,
    head_dimension]; returns the same shape.
    """
    attended = np.empty_like(queries)
    starts = list(itertools.accumulate((tokens for _, tokens in spans), initial=0))
    single_tokens = [
        (start, layer) for start, (layer, tokens) in zip(starts, spans, strict=False) if tokens == 1
    ]
    if single_tokens:
        rows = [start for start, _ in single_tokens]
        layers = [layer for _, layer in single_tokens]
        attended[rows] = attend_in_place(layers, [each.tokens for each in layers], queries[rows])
    # rows of spans with several tokens, and the adjoining keys and values that these rows attend to
    long_ranges: list[tuple[slice, KVParts]] = []
    for start, (layer, tokens) in zip(starts, spans, strict=False):
        if tokens > 1:
            for rows_of_span, parts in layer.attention_ranges(tokens, None):
                range_rows = slice(start + rows_of_span.start, start + rows_of_span.stop)
                long_ranges.append((range_rows, parts))
    mx.eval([parts for _, parts in long_ranges])
    work = [
        HostSpan(
            queries[range_rows].swapaxes(0, 1),
            [
                (np.array(keys, copy=False)[0], np.array(values, copy=False)[0])
                for keys, values in parts
            ],
            None,
        )
        for range_rows, parts in long_ranges
    ]
    results = attend_in_numpy(work, sinks=None)
    for (range_rows, _), result in zip(long_ranges, results, strict=True):
        attended[range_rows] = result.swapaxes(0, 1)
    return attended


def _token_ids(span: SequenceSpan) -> npt.NDArray[np.integer]:
    """The tokens of a span: of the prompt, or the last sampled token and the drafted ones."""
    sequence = span.sequence
    if span.is_decoding:
        assert sequence.sampled is not None, "a decoding span has no sampled token"
        sampled = np.array(sequence.sampled, copy=False)[sequence.sampled_row :][:1]
        return np.append(sampled, np.array(span.span.drafted, sampled.dtype))
    return np.array(sequence.known_token_ids, copy=False)[span.span.start :][: span.span.tokens]


def _shared_runs_of(
    sequences: Sequence[Sequence[StoredRun]], new_tokens: Sequence[int]
) -> tuple[list[_SharedRun], npt.NDArray[np.int32]]:
    """Divide the stored tokens into runs to which the same rows attend. Returns the runs, and the row
    ids of all runs, one run's after the other's.

    sequences: the runs that each sequence stores in one layer; the last one ends with its new tokens,
    whose number is in `new_tokens`.
    """
    runs_of_rows: list[list[tuple[int, int, int]]] = []
    # by the id of a run's first array: a sequence that stores it, and the run's number there
    owners: dict[int, tuple[int, int]] = {}
    for sequence, (stored, tokens) in enumerate(zip(sequences, new_tokens, strict=True)):
        runs = []
        for index, (arrays, start, end) in enumerate(stored):
            owners[id(arrays[0])] = sequence, index
            runs.append((id(arrays[0]), start, end))
        # a new token does not attend to the new tokens after it
        buffer, start, end = runs.pop()
        runs_of_rows.extend(
            [*runs, (buffer, start, end - later_tokens)] for later_tokens in reversed(range(tokens))
        )
    shared: list[_SharedRun] = []
    row_ids: list[int] = []
    for buffer, start, end, rows_of_run in shared_runs(runs_of_rows):
        shared.append(_SharedRun(*owners[buffer], start, end, len(row_ids), len(rows_of_run)))
        row_ids += rows_of_run
    return shared, np.array(row_ids, np.int32)


def _address(array: mx.array) -> int:
    """The address of an evaluated, row-contiguous array."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def _row_bytes(array: mx.array) -> int:
    """Bytes from one token of a head to the next, in an array [1, heads, tokens, dimension]."""
    return array.shape[3] * array.itemsize


def unavailable() -> str:
    """Why no model can have a decoder in C; empty if models can."""
    return decoder.unavailable() or packed_layers.why_no_stand_ins()


def attach(model: Any, dtype: mx.Dtype) -> None:
    """Give a model on a CPU its decoder in C, unless its architecture is not supported here, or the
    results are not those of mlx-lm.

    dtype: the format in which the model computes.
    """
    if dtype != mx.float32 or unavailable() or not _is_supported(model):
        return
    rope = _rope_arguments([block.self_attn.rope for block in model.layers])
    if rope is None:
        return
    try:
        is_right = _agrees_with_mlx_lm(model, _decoder(model, rope, layers=1))
    except (RuntimeError, ValueError, TypeError):  # MLX or the kernel refuses an operation
        logger.exception("the decoder in C could not be tried")
        return
    if is_right:
        model._host_decoder = _decoder(model, rope, layers=len(model.layers))


def decoder_of(model: Any) -> HostDecoder | None:
    """The decoder that `attach` gave to a model; None if it gave none."""
    attached: HostDecoder | None = vars(model).get("_host_decoder")
    return attached


def attention_of(model: Any) -> str:
    """What computes the attention of a model's decode steps, and why."""
    if decoder_of(model) is None:
        return description()
    return "the C kernel (forward passes need no MLX operations; prefill: numpy)"


def _is_supported(model: Any) -> bool:
    """Whether C can compute a model: its classes are mlx-lm's, its layers have the usual names and
    supported weights, and the attention kernel supports its heads.
    """
    supported_modules = {f"mlx_lm.models.{name}" for name in _MODULES}
    classes = {(type(each).__module__, type(each).__name__) for each in model.modules()}
    module_name = type(model).__module__
    if (
        module_name not in supported_modules
        or type(model).__name__ != "Model"
        or (module_name, "TransformerBlock") not in classes
    ):
        return False
    linears = [_head(model)]
    for block in model.layers:
        linears += [block.self_attn[f"{name}_proj"] for name in "qkvo"]
        linears += [block.mlp[f"{name}_proj"] for name in ("gate", "up", "down")]
    attention = model.layers[0].self_attn
    return all(
        type(each) in (Linear, Embedding) or packed_layers.is_kept(each)
        for each in (model.model.embed_tokens, *linears)
    ) and supports(
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads,
        key_dimension=_head_dimension(attention),
        value_dimension=_head_dimension(attention),
        is_quantized=False,
    )


def _head(model: Any) -> Any:
    """The layer that computes the logits."""
    return model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head


def _head_dimension(attention: Any) -> int:
    rows: int = attention.q_proj.weight.shape[0]
    return rows // int(attention.n_heads)


def _rope_arguments(ropes: Sequence[Any]) -> RopeArguments | None:
    """The rotary embedding of all layers; None if they differ, or if it is not supported here."""
    all_arguments: list[RopeArguments] = []
    for rope in ropes:
        if type(rope) is RoPE:
            all_arguments.append(
                RopeArguments(rope.dims, rope.traditional, rope.base, rope.scale, None)
            )
        elif type(rope).__name__ == "Llama3RoPE":
            all_arguments.append(RopeArguments(rope.dims, rope.traditional, None, 1.0, rope._freqs))
        else:
            return None
    first = all_arguments[0]
    for each in all_arguments:
        has_same_freqs = each.freqs is first.freqs or (
            each.freqs is not None
            and first.freqs is not None
            and mx.array_equal(each.freqs, first.freqs)
        )
        if each[:-1] != first[:-1] or not has_same_freqs:
            return None
    return first


def _decoder(model: Any, rope: RopeArguments, *, layers: int) -> HostDecoder:
    """A decoder with the weights of a model's first `layers` layers, and its embedding and head."""
    block = model.layers[0]
    attention = block.self_attn
    shape = DecoderShape(
        epsilon=block.input_layernorm.eps,
        head_epsilon=attention.q_norm.eps if "q_norm" in attention else 0.0,
        query_scale=attention.scale,
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads,
        head_dimension=_head_dimension(attention),
        rotated=rope.dims,
        in_pairs=rope.traditional,
    )
    inner = model.model
    embedding = _linear(inner.embed_tokens)
    return HostDecoder(
        Decoder(
            [_layer(each) for each in model.layers[:layers]],
            shape=shape,
            embedding=embedding,
            head=embedding if model.args.tie_word_embeddings else _linear(model.lm_head),
            norm=_view(inner.norm.weight),
        ),
        rope,
    )


def _layer(block: Any) -> DecoderLayer:
    """The weights of one of mlx-lm's layers, for the decoder in C."""
    attention, mlp = block.self_attn, block.mlp
    norms = [attention.get(f"{name}_norm") for name in "qk"]
    return DecoderLayer(
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        norm=_view(block.input_layernorm.weight),
        mlp_norm=_view(block.post_attention_layernorm.weight),
        query_norm=norms[0] and _view(norms[0].weight),
        key_norm=norms[1] and _view(norms[1].weight),
    )


def _linear(module: Any) -> decoder.Linear:
    """The weights of a linear layer or an embedding, for the decoder in C."""
    bias = module.get("bias")
    weights = module._packed if packed_layers.is_kept(module) else _view(module.weight)
    return decoder.Linear(weights, None if bias is None else _view(bias))


def _view(array: mx.array) -> Any:
    """A float32 view of an array, which is evaluated; the view keeps its memory alive."""
    array = array if array.dtype == mx.float32 else array.astype(mx.float32)
    mx.eval(array)
    return np.array(array, copy=False)


def _agrees_with_mlx_lm(model: Any, one_layer_decoder: HostDecoder) -> bool:
    """Whether embedding, first layer and head compute what mlx-lm's do, for one row and for
    several. one_layer_decoder: consists of these parts.
    """
    inner = model.model
    head = inner.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    for rows in (1, len(_CHECKED_POSITIONS)):
        mlx_states, c_states = ([FullKV() for _ in range(rows)] for _ in range(2))
        for step in range(3):
            ids = np.arange(rows) * 7 + step
            positions = [start + step for start in _CHECKED_POSITIONS[:rows]]
            view = RowsView(
                mlx_states, tokens=[1] * rows, offset=mx.array(positions), context=StepContext()
            )
            x = inner.layers[0](inner.embed_tokens(mx.array(ids)[:, None]), None, view)
            expected = head(inner.norm(x))[:, 0]
            spans = [([state], 1) for state in c_states]
            computed = one_layer_decoder.compute(
                ids, spans, positions=positions, wanted_rows=range(rows)
            )
            if computed is None or not mx.allclose(computed, expected, rtol=1e-3, atol=1e-3):
                return False
    return True
