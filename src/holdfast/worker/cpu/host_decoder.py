"""Forward passes through decoders like Llama's on a CPU, without MLX.

A decode step of a small model on a CPU spends more time on MLX's operations, 10 to 20 µs each, than
on computing, and in prefill, MLX computes norms, rotations and SiLU on one core. So for models of
these architectures, C functions (`kernels/decoder`) compute everything but attention, which is that
of the C kernel or of numpy, and write keys and values into the buffers of the sequences in place.
A step of few tokens is one call. Rounds differently than MLX. Device thread only.
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
from holdfast.worker.kv.layer import LayerKV

logger = logging.getLogger("holdfast.worker")

MOST_TOKENS = 64  # of a step in one call; with more, attention is faster in numpy
_MODULES = ("llama", "qwen2", "qwen3")  # mlx-lm runs other models of this design with these modules
_TABLE_POSITIONS = 64  # positions whose cosines and sines are computed together
_MOST_TABLES = 64
_CHECKED_STARTS = (0, 77, 5000)
_NATIVE = (NATIVE_BITS, NATIVE_BITS)

# a run of tokens: its stored arrays, and start and end within them
_Stored: TypeAlias = tuple[tuple[mx.array, ...], int, int]


class _SharedRun(NamedTuple):
    """A run of tokens to which the same rows attend."""

    sequence: int  # one of those that store it, counted from 0
    run: int  # its number among the runs that this sequence stores
    start: int  # within the stored arrays
    end: int
    first_row: int  # index of its first entry in the list of row ids
    rows: int


# the state of a sequence, layer by layer, and how many tokens it gets
_Span: TypeAlias = tuple[Sequence[Any], int]


class HostDecoder:
    """One model's decoder in C."""

    def __init__(self, decoder: Decoder, rope: RopeArguments) -> None:
        self._decoder = decoder
        self._rope = rope
        shape = decoder.shape
        self._kv_heads = shape.kv_heads
        self._shape_of_kv = mx.zeros((1, 2 * shape.kv_heads, 0, shape.head_dimension))
        self._tables: dict[int, npt.NDArray[np.float32]] = {}

    def forward(self, spans: Sequence[SequenceSpan]) -> StepLogits | None:
        """Run a step; None if MLX has to run it."""
        if any(each.scored_rows or each.pooled_rows for each in spans):
            return None
        if not all(each.is_decoding for each in spans):
            # a state may have been rewound, but an earlier copy may still be under way
            mx.synchronize()
        starts = itertools.accumulate((each.span.tokens for each in spans), initial=0)
        wanted = [
            start + row
            for start, each in zip(starts, spans, strict=False)
            for row in each.wanted_rows
        ]
        logits = self.compute(
            np.concatenate([_token_ids(each) for each in spans]),
            [(each.sequence.live.leaves, each.span.tokens) for each in spans],
            positions=[each.span.start + at for each in spans for at in range(each.span.tokens)],
            wanted=wanted,
        )
        if logits is None:
            return None
        for each in spans:
            each.sequence.is_trimmed = False
            if each.span.tokens > 1:
                each.sequence.trim()
        return StepLogits(
            to_sample=logits if wanted else None,
            is_computed=not any(each.sequence.live.is_quantized for each in spans),
        )

    def compute(
        self,
        token_ids: npt.NDArray[np.integer],
        spans: Sequence[_Span],
        *,
        positions: Sequence[int],
        wanted: Sequence[int],
    ) -> mx.array | None:
        """Add tokens to sequences, and return the logits of the wanted rows.

        token_ids: [rows], those of all spans, one after the other; positions: theirs. spans: the
        state of each sequence, layer by layer, and how many tokens it gets. Returns None, and adds
        nothing, if a state or a token is of another kind.
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
                factors=np.stack([self._cosines_and_sines(position) for position in positions]),
                wanted=np.array(wanted, np.int32),
                places=addresses,
                capacities=capacities,
            )
        )
        return mx.array(
            self._compute_in_one_call(forward, spans)
            if in_one_call
            else self._compute_by_layer(forward, spans)
        )

    def _make_room(self, spans: Sequence[_Span]) -> bool:
        """Prepare the states for new tokens, unless one of them cannot have any written in place."""
        if not all(
            isinstance(layer, LayerKV) and layer.make_room(self._shape_of_kv, tokens)
            for layers, tokens in spans
            for layer in layers
        ):
            return False
        mx.eval([list(layer.arrays()) for layers, _ in spans for layer in layers])
        return True

    def _write_addresses(
        self, spans: Sequence[_Span]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Where the new tokens go, [layers, rows], and the capacities of these buffers, [rows]."""
        addresses = []
        for at in range(len(spans[0][0])):
            for layers, tokens in spans:
                buffer, end = layers[at].write_position()
                row_bytes = _row_bytes(buffer)
                first = _address(buffer) + end * row_bytes
                addresses.append(first + row_bytes * np.arange(tokens, dtype=np.uint64))
        capacities = [layers[0].write_position()[0].shape[2] for layers, _ in spans]
        tokens_of_spans = [tokens for _, tokens in spans]
        return (
            np.concatenate(addresses),
            np.repeat(np.array(capacities, np.int64), tokens_of_spans),
        )

    def _compute_in_one_call(
        self, forward: ForwardPass, spans: Sequence[_Span]
    ) -> npt.NDArray[np.float32]:
        for layers, tokens in spans:
            for layer in layers:
                layer.add_written(tokens)
        stored = [
            [list(layers[at].stored(layers[at].tokens)) for layers, _ in spans]
            for at in range(len(spans[0][0]))
        ]
        shared, row_ids = _shared_runs_of(stored[0], [tokens for _, tokens in spans])
        entries = []
        for at, of_layer in enumerate(stored):
            for sequence, index, start, end, first_row, rows in shared:
                arrays = of_layer[sequence][index][0]
                bits = bits_of(spans[sequence][0][at]) if len(arrays) > 1 else _NATIVE
                entries.append(
                    (*self._addresses(arrays, start), end - start, *bits, first_row, rows)
                )
        runs = np.array(entries, RUN).reshape(len(stored), len(shared))
        return forward.compute(runs, row_ids, threads=threads_to_use())

    def _compute_by_layer(
        self, forward: ForwardPass, spans: Sequence[_Span]
    ) -> npt.NDArray[np.float32]:
        """Compute the logits layer by layer, with attention over long spans in numpy."""
        x = forward.embed()
        for at in range(len(spans[0][0])):
            queries = forward.before_attention(at, x)
            for layers, tokens in spans:
                layers[at].add_written(tokens)
            attended = _attend([(layers[at], tokens) for layers, tokens in spans], queries)
            forward.after_attention(at, attended, x)
        return forward.project(x)

    def _addresses(self, arrays: Sequence[mx.array], start: int) -> tuple[int, ...]:
        """Where token `start` of keys and values is, their scales and biases, and the capacity."""
        addresses = [_address(array) + start * _row_bytes(array) for array in arrays]
        capacity = arrays[0].shape[2]
        if len(arrays) in (1, 3):  # the heads of the keys, then those of the values
            heads = self._kv_heads * capacity
            addresses += [
                address + heads * _row_bytes(array)
                for address, array in zip(addresses, arrays, strict=True)
            ]
        half = len(addresses) // 2
        (keys, *key_scales), (values, *value_scales) = addresses[:half], addresses[half:]
        return keys, values, *(key_scales or (0, 0)), *(value_scales or (0, 0)), capacity

    def _cosines_and_sines(self, position: int) -> npt.NDArray[np.float32]:
        """The cosines and sines of a position, [2 × rotated]."""
        index = position % _TABLE_POSITIONS
        start = position - index
        table = self._tables.pop(start, None)
        if table is None:
            table = fast_on_cpu.cosines_and_sines(self._rope, start, tokens=_TABLE_POSITIONS)
            if len(self._tables) == _MOST_TABLES:
                del self._tables[next(iter(self._tables))]
        self._tables[start] = table  # the last used comes last
        row: npt.NDArray[np.float32] = table[index]
        return row


def _attend(
    spans: Sequence[tuple[LayerKV, int]], queries: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Attention of the last tokens of several sequences, each over its own. queries: [rows, heads,
    head_dimension]; returns the same shape.
    """
    attended = np.empty_like(queries)
    starts = list(itertools.accumulate((tokens for _, tokens in spans), initial=0))
    decoding = [at for at, (_, tokens) in enumerate(spans) if tokens == 1]
    if decoding:
        rows = [starts[at] for at in decoding]
        layers = [spans[at][0] for at in decoding]
        attended[rows] = attend_in_place(layers, [each.tokens for each in layers], queries[rows])
    long_ranges: list[tuple[slice, tuple[tuple[mx.array, mx.array], ...]]] = []
    for start, (layer, tokens) in zip(starts, spans, strict=False):
        if tokens > 1:
            for rows_seen, parts in layer.attention_ranges(tokens, None):
                place = slice(start + rows_seen.start, start + rows_seen.stop)
                long_ranges.append((place, parts))
    mx.eval([parts for _, parts in long_ranges])
    work = [
        HostSpan(
            queries[place].swapaxes(0, 1),
            [
                (np.array(keys, copy=False)[0], np.array(values, copy=False)[0])
                for keys, values in parts
            ],
            None,
        )
        for place, parts in long_ranges
    ]
    for (place, _), result in zip(long_ranges, attend_in_numpy(work, sinks=None), strict=True):
        attended[place] = result.swapaxes(0, 1)
    return attended


def _token_ids(each: SequenceSpan) -> npt.NDArray[np.integer]:
    """The tokens of a span: of the prompt, or the last sampled token and the drafted ones."""
    sequence = each.sequence
    if each.is_decoding:
        assert sequence.sampled is not None, "a decoding span has no sampled token"
        sampled = np.array(sequence.sampled, copy=False)[sequence.sampled_row :][:1]
        return np.append(sampled, np.array(each.span.drafted, sampled.dtype))
    return np.array(sequence.known_token_ids, copy=False)[each.span.start :][: each.span.tokens]


def _shared_runs_of(
    sequences: Sequence[Sequence[_Stored]], new: Sequence[int]
) -> tuple[list[_SharedRun], npt.NDArray[np.int32]]:
    """Divide what the new tokens of all sequences attend to into runs that the same rows see, and
    return these, and the ids of their rows, one run's after the other's.

    sequences: what each sequence has stored in one layer, with the new tokens. new: their numbers.
    """
    rows: list[list[tuple[int, int, int]]] = []
    found: dict[int, tuple[int, int]] = {}
    for sequence, (stored, tokens) in enumerate(zip(sequences, new, strict=True)):
        runs = []
        for index, (arrays, start, end) in enumerate(stored):
            found[id(arrays[0])] = sequence, index
            runs.append((id(arrays[0]), start, end))
        key, start, end = runs.pop()
        rows.extend([*runs, (key, start, end - later)] for later in reversed(range(tokens)))
    shared: list[_SharedRun] = []
    row_ids: list[int] = []
    for key, start, end, rows_of_run in shared_runs(rows):
        shared.append(_SharedRun(*found[key], start, end, len(row_ids), len(rows_of_run)))
        row_ids += rows_of_run
    return shared, np.array(row_ids, np.int32)


def _address(array: mx.array) -> int:
    """The address of an evaluated, row-contiguous array."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def _row_bytes(array: mx.array) -> int:
    """Bytes from one token to the next."""
    return array.shape[3] * array.itemsize


def unavailable() -> str:
    """Why no model can have a decoder in C; empty if models can."""
    return decoder.unavailable() or packed_layers.why_no_stand_ins()


def attach(model: Any, dtype: mx.Dtype) -> None:
    """Give a model on a CPU its decoder in C, unless its architecture is not known here, or the
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


def of(model: Any) -> HostDecoder | None:
    """The decoder that `attach` gave to a model; None if it gave none."""
    found: HostDecoder | None = vars(model).get("_host_decoder")
    return found


def attention_of(model: Any) -> str:
    """What computes the attention of a model's decode steps, and why."""
    if of(model) is None:
        return description()
    return "the C kernel (forward passes need no MLX operations; prefill: numpy)"


def _is_supported(model: Any) -> bool:
    """Whether a model consists of parts known here."""
    names = {f"mlx_lm.models.{name}" for name in _MODULES}
    kinds = {(type(block).__module__, type(block).__name__) for block in model.modules()}
    own = (type(model).__module__, type(model).__name__)
    if own[0] not in names or own[1] != "Model" or (own[0], "TransformerBlock") not in kinds:
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
    return model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head


def _head_dimension(attention: Any) -> int:
    rows: int = attention.q_proj.weight.shape[0]
    return rows // int(attention.n_heads)


def _rope_arguments(ropes: Sequence[Any]) -> RopeArguments | None:
    """The rotary embedding of all layers; None if they differ, or if it is not supported here."""
    found: list[RopeArguments] = []
    for rope in ropes:
        if type(rope) is RoPE:
            found.append(RopeArguments(rope.dims, rope.traditional, rope.base, rope.scale, None))
        elif type(rope).__name__ == "Llama3RoPE":
            found.append(RopeArguments(rope.dims, rope.traditional, None, 1.0, rope._freqs))
        else:
            return None
    first = found[0]
    for each in found:
        same = each.freqs is first.freqs or (
            each.freqs is not None
            and first.freqs is not None
            and mx.array_equal(each.freqs, first.freqs)
        )
        if each[:-1] != first[:-1] or not same:
            return None
    return first


def _decoder(model: Any, rope: RopeArguments, *, layers: int) -> HostDecoder:
    """The decoder of a model, with only its first layers."""
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
    bias = module.get("bias")
    weights = module._packed if packed_layers.is_kept(module) else _view(module.weight)
    return decoder.Linear(weights, None if bias is None else _view(bias))


def _view(array: mx.array) -> Any:
    """A view of an evaluated array, which keeps its memory."""
    array = array if array.dtype == mx.float32 else array.astype(mx.float32)
    mx.eval(array)
    return np.array(array, copy=False)


def _agrees_with_mlx_lm(model: Any, decoder_of_first: HostDecoder) -> bool:
    """Whether embedding, first layer and head compute what mlx-lm's do, for one row and for
    several. decoder_of_first: consists of these parts.
    """
    inner = model.model
    head = inner.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
    for rows in (1, len(_CHECKED_STARTS)):
        states = [[FullKV() for _ in range(rows)] for _ in range(2)]
        for step in range(3):
            ids = np.arange(rows) * 7 + step
            positions = [start + step for start in _CHECKED_STARTS[:rows]]
            view = RowsView(
                states[0], tokens=[1] * rows, offset=mx.array(positions), context=StepContext()
            )
            x = inner.layers[0](inner.embed_tokens(mx.array(ids)[:, None]), None, view)
            expected = head(inner.norm(x))[:, 0]
            spans = [([state], 1) for state in states[1]]
            computed = decoder_of_first.compute(ids, spans, positions=positions, wanted=range(rows))
            if computed is None or not mx.allclose(computed, expected, rtol=1e-3, atol=1e-3):
                return False
    return True
