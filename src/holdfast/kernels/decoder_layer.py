"""The parts of a decoder layer before and after attention, for few rows: decoder_layer.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.kernels.build import turned_off
from holdfast.kernels.packed_products import PackedStruct, PackedWeights, stand_in_for
from holdfast.kernels.products import unavailable as no_shim

NAME = "decoder_layers"  # the name that turns it off
_BEFORE, _AFTER = 1, 2  # as in products.c

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer. weights: [outputs, inputs], row-contiguous. bias: [outputs]."""

    weights: Floats | PackedWeights
    bias: Floats | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if isinstance(self.weights, PackedWeights):
            return self.weights.outputs, self.weights.inputs
        return self.weights.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAttention:
    """What comes before attention: RMS normalization, projections to queries, keys and values, the
    normalization of their heads (optional), and rotary embedding.

    norm: [hidden]. query_norm, key_norm: [head_dimension]. query_scale: a factor for the
    queries. rotated: how many numbers of a head are rotated. in_pairs: whether neighbours are
    rotated together, instead of numbers of both halves.
    """

    query: Linear
    key: Linear
    value: Linear
    norm: Floats
    query_norm: Floats | None
    key_norm: Floats | None
    epsilon: float
    head_epsilon: float
    query_scale: float
    heads: int
    kv_heads: int
    head_dimension: int
    rotated: int
    in_pairs: bool

    @property
    def outputs(self) -> int:
        """The numbers of a row of the result: those of all heads of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterAttention:
    """What comes after attention: output projection and residual connection, RMS normalization,
    and a gated MLP (SiLU) with another residual connection. norm: [hidden].
    """

    output: Linear
    gate: Linear
    up: Linear
    down: Linear
    norm: Floats
    epsilon: float


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        ("packed", PackedStruct),
        *((name, ctypes.c_int32) for name in ("outputs", "inputs")),
    ]


class _Before(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("norm", "query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("epsilon", "head_epsilon", "query_scale")),
        *(
            (name, ctypes.c_int32)
            for name in ("hidden", "heads", "kv_heads", "head_dimension", "rotated", "in_pairs")
        ),
    ]


class _After(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("output", "gate", "up", "down")),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("hidden", ctypes.c_int32),
    ]


def unavailable() -> str:
    """Why there is no kernel; empty if there is one."""
    return no_shim() or turned_off(NAME)


class StandIn:
    """The memory of a matrix that stands for a part of a decoder layer.

    If MLX computes c + x @ matrix.T, the shim computes the part instead, of x. Before attention,
    each row of c begins with the cosines and sines of its position (`rotated` of each; sines have
    the sign of the number that is swapped), and the result has queries, keys and values. After
    attention, x is what attention returned, and c the layer's input.

    shape: of the matrix. memory: its first numbers; the others are never read. Keep this object
    alive as long as the matrix.
    """

    def __init__(self, part: BeforeAttention | AfterAttention) -> None:
        self._part = part  # keeps the arrays
        hidden = len(part.norm)
        if isinstance(part, BeforeAttention):
            self.shape = (part.outputs, hidden)
            self._struct: ctypes.Structure = _Before(
                *map(_linear, (part.query, part.key, part.value)),
                *map(_address, (part.norm, part.query_norm, part.key_norm)),
                *(part.epsilon, part.head_epsilon, part.query_scale),
                *(hidden, part.heads, part.kv_heads, part.head_dimension),
                *(part.rotated, int(part.in_pairs)),
            )
            kind = _BEFORE
        else:
            self.shape = (hidden, part.output.shape[1])
            linears = map(_linear, (part.output, part.gate, part.up, part.down))
            self._struct = _After(*linears, _address(part.norm), part.epsilon, hidden)
            kind = _AFTER
        self.memory = stand_in_for(kind, ctypes.addressof(self._struct))


def _linear(layer: Linear) -> Any:
    outputs, inputs = layer.shape
    if isinstance(layer.weights, PackedWeights):
        return _Linear(None, _address(layer.bias), layer.weights.struct, outputs, inputs)
    return _Linear(_address(layer.weights), _address(layer.bias), PackedStruct(), outputs, inputs)


def _address(array: Floats | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    assert array.dtype == np.float32
    return array.ctypes.data
