"""Forward passes through decoders like Llama's: decoder.h, whose structs the `ctypes` classes mirror.

A row is one new token of a forward pass. A run is a range of adjoining tokens in one buffer of stored
keys and values, to which some rows attend. Packed weights are quantized codes or 16-bit floats.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.worker.cpu.kernels import decode_attention, packed_products, products
from holdfast.worker.cpu.kernels.build import kernel, turned_off
from holdfast.worker.cpu.kernels.decode_attention import CHUNK_TOKENS
from holdfast.worker.cpu.kernels.packed_products import PackedStruct, PackedWeights

NAME = "decoder"  # as HOLDFAST_KERNELS lists it

# Key heads × tokens from which another thread helps with attention. Fewer than in
# `decode_attention`: the threads are awake, because they have just computed a product.
_TOKENS_PER_THREAD = 256

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer. weights: [outputs, inputs], row-contiguous. bias: [outputs]."""

    weights: Floats | PackedWeights
    bias: Floats | None = None

    @property
    def shape(self) -> tuple[int, int]:
        if isinstance(self.weights, PackedWeights):
            return self.weights.outputs, self.weights.inputs
        return self.weights.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The weights of a layer. norm: [hidden], of the layer's input; mlp_norm: [hidden], of the
    MLP's. query_norm, key_norm: [head_dimension]; None: heads are not normalized.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear
    norm: Floats
    mlp_norm: Floats
    query_norm: Floats | None
    key_norm: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What all layers have in common.

    epsilon, head_epsilon: of the RMS normalization of rows and of heads. query_scale: the factor of
    the queries. rotated: how many numbers of a head the rotary embedding rotates. in_pairs: whether
    neighbours are rotated together, instead of numbers of both halves.
    """

    epsilon: float
    head_epsilon: float
    query_scale: float
    heads: int
    kv_heads: int
    head_dimension: int
    rotated: int
    in_pairs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """The tokens of a forward pass, one per row.

    token_ids: int32 [rows]. rotation_factors: [rows, 2 × rotated], the cosines and sines of each
    token's position; sines have the sign of the number that is swapped. wanted_rows: int32, the rows
    whose logits are computed.

    The buffers of a sequence have the shape [2 × kv_heads, capacity, head_dimension], the heads of
    the keys first. key_addresses: uint64 [layers, rows], where the first key head of each token goes.
    capacities: int64 [rows], in tokens.
    """

    token_ids: npt.NDArray[np.int32]
    rotation_factors: Floats
    wanted_rows: npt.NDArray[np.int32]
    key_addresses: npt.NDArray[np.uint64]
    capacities: npt.NDArray[np.int64]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        ("packed", PackedStruct),
        *((name, ctypes.c_int32) for name in ("outputs", "inputs")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "query_norm", "key_norm")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _Linear) for name in ("embedding", "head")),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("epsilon", "head_epsilon", "query_scale")),
        *((name, ctypes.c_int32) for name in ("layer_count", "hidden", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dimension", "rotated", "in_pairs")),
    ]


class _DecoderCall(ctypes.Structure):
    _fields_ = [
        ("decoder", ctypes.POINTER(_Decoder)),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "rotation_factors", "key_addresses", "capacities")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("wanted_rows", "logits", "runs", "row_ids", "attend")
        ),
        *((name, ctypes.c_int32) for name in ("rows", "run_count", "wanted_count")),
        *((name, ctypes.c_int32) for name in ("chunk_tokens", "attention_threads")),
    ]


def unavailable() -> str:
    """Why the decoder in C is unavailable; empty if it is available."""
    return products.unavailable() or decode_attention.unavailable() or turned_off(NAME)


class Decoder:
    """The weights of a decoder. Requires that `unavailable` is empty."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        shape: DecoderShape,
        embedding: Linear,
        head: Linear,
        norm: Floats,
    ) -> None:
        """embedding, head: [vocabulary, hidden]; they may be the same. norm: [hidden], before the
        head. The owners of the arrays leave them unchanged.
        """
        packed_products.prepare()
        self._owners = (
            tuple(layers),
            embedding,
            head,
            norm,
        )  # keeps alive what the structs point to
        self.shape = shape
        self._layers = (_Layer * len(layers))(*map(_layer_struct, layers))
        self._struct = _Decoder(
            self._layers,
            *map(_linear_struct, (embedding, head)),
            _address(norm),
            *(shape.epsilon, shape.head_epsilon, shape.query_scale),
            *(len(layers), len(norm), shape.heads, shape.kv_heads),
            *(shape.head_dimension, shape.rotated, int(shape.in_pairs)),
        )
        self.vocabulary = head.shape[0]

    def begin(self, tokens: NewTokens) -> ForwardPass:
        """Prepare a forward pass; computes nothing yet."""
        return ForwardPass(self, self._struct, tokens)


class ForwardPass:
    """A forward pass of new tokens: as one call (`compute`), or part by part, with attention by the
    caller. All calls release the interpreter lock, and raise MemoryError if there is not enough
    memory.
    """

    def __init__(self, decoder: Decoder, struct: _Decoder, tokens: NewTokens) -> None:
        self._shape = decoder.shape
        self._logits = np.empty((len(tokens.wanted_rows), decoder.vocabulary), np.float32)
        self._rows = len(tokens.token_ids)
        self._owners = (decoder, tokens)  # keeps alive what the call points to
        arrays = (  # in the order of the fields of `_DecoderCall`
            tokens.token_ids,
            tokens.rotation_factors,
            tokens.key_addresses,
            tokens.capacities,
            tokens.wanted_rows,
        )
        self._call = _DecoderCall(ctypes.pointer(struct), *map(_address, (*arrays, self._logits)))
        self._call.rows = self._rows
        self._call.wanted_count = len(tokens.wanted_rows)

    def compute(
        self, runs: npt.NDArray[np.void], row_ids: npt.NDArray[np.int32], *, threads: int
    ) -> Floats:
        """Add the keys and values of the tokens to their buffers, and return the logits of the
        wanted rows, [wanted, vocabulary].

        runs: [layers, runs], entries of the kernel's table (`decode_attention.RUN`): the keys and
        values that the rows attend to, including the new tokens. row_ids: the rows of all runs of a
        layer, one run's after the other's. threads: at most this many compute attention.
        """
        head_tokens = self._shape.kv_heads * int(runs["tokens"][0].sum())
        attention = kernel("decode_attention").library
        assert attention is not None
        call = self._call
        call.runs, call.row_ids = _address(runs), _address(row_ids)
        call.attend = ctypes.cast(attention.decode_attention, ctypes.c_void_p)
        call.run_count, call.chunk_tokens = runs.shape[1], CHUNK_TOKENS
        call.attention_threads = min(threads, max(1, head_tokens // _TOKENS_PER_THREAD))
        self._check(products.library().holdfast_decode(ctypes.byref(call)))
        return self._logits

    def embed(self) -> Floats:
        """The input of the first layer, [rows, hidden]."""
        x = np.empty((self._rows, self._call.decoder.contents.hidden), np.float32)
        products.library().holdfast_embed(ctypes.byref(self._call), ctypes.c_void_p(_address(x)))
        return x

    def before_attention(self, layer: int, x: Floats) -> Floats:
        """Add the new tokens' keys and values of a layer to the buffers. Returns the queries, scaled,
        [rows, heads, head_dimension]. layer: its number. x: its input, [rows, hidden].
        """
        queries = np.empty((self._rows, self._shape.heads, self._shape.head_dimension), np.float32)
        self._compute_half(products.library().holdfast_before_attention, layer, x, queries)
        return queries

    def after_attention(self, layer: int, attended: Floats, x: Floats) -> None:
        """Replace x, the input of a layer, by its result. attended: [rows, heads, head_dimension]."""
        self._compute_half(products.library().holdfast_after_attention, layer, attended, x)

    def project(self, x: Floats) -> Floats:
        """The logits of the wanted rows, [wanted, vocabulary]. x: the last layer's result."""
        library = products.library()
        self._check(
            library.holdfast_project(ctypes.byref(self._call), ctypes.c_void_p(_address(x)))
        )
        return self._logits

    def _compute_half(self, function: Any, layer: int, *arrays: Floats) -> None:
        """Call the C function for the half of a layer before or after attention."""
        addresses = (ctypes.c_void_p(_address(array)) for array in arrays)
        self._check(function(ctypes.byref(self._call), ctypes.c_int(layer), *addresses))

    def _check(self, is_done: int) -> None:
        """is_done: the result of a C function, 0 if it could not allocate memory."""
        if not is_done:
            raise MemoryError("there is not enough memory for a forward pass")


def _layer_struct(layer: DecoderLayer) -> _Layer:
    linears = (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down)
    norms = (layer.norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    return _Layer(*map(_linear_struct, linears), *map(_address, norms))


def _linear_struct(layer: Linear) -> _Linear:
    """The struct of a layer: either `weights` or `packed` is set."""
    outputs, inputs = layer.shape
    if isinstance(layer.weights, PackedWeights):
        return _Linear(None, _address(layer.bias), layer.weights.struct, outputs, inputs)
    return _Linear(_address(layer.weights), _address(layer.bias), PackedStruct(), outputs, inputs)


def _address(array: Any) -> int | None:
    """The address of a row-contiguous array; None (NULL) for None."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    address: int = array.ctypes.data
    return address
