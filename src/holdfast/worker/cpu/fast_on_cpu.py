"""Rotary embedding and linear layers in fewer graph operations, for CPUs.

On a GPU, `mx.fast.rope` is one kernel. On a CPU, MLX composes it of 28 operations, and every
rotation computes its cosines and sines again. A decode step of a small model spends more time on
handling operations than on computing.

Functions of this module take the place of MLX's. On a thread that is inside `Rotations.step` they use fewer
operations; everywhere else they call MLX's function, so nothing changes for other users of MLX in
the process. The results are bit-equal to MLX's:

- A step computes cosines and sines once, for the queries and keys of all layers. They come from
  MLX's own function: the rotation of (1, 0) is (cos, sin). The rest of a rotation is
  x * cosines + swapped * sines, where `swapped` exchanges the two numbers of each pair of x.
- For a single token, this is compiled into one operation, which MLX traces once for all shapes.
  Several tokens gain little from that, and each further memory layout would cost one or two seconds
  of g++ when a model is first loaded on a machine. Without g++, MLX runs the parts one by one.
- A linear layer of one sequence multiplies with a view of its transposed weight that is made once.
  The view has a dimension of size 1 for the batch, so that MLX reshapes neither input nor output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.linear import Linear

from holdfast.worker.cpu.kernels import build
from holdfast.worker.engine.backend import StepOperations

# A sequence that decodes alone takes its cosines and sines from a table of this many positions.
TABLE_POSITIONS = 64
MOST_TABLES = 16  # tables to keep
_ORIGINAL = "_holdfast_original"  # attribute of a replacement: MLX's function
# attribute of a linear layer: a `_Transposed`. Not a parameter of the module, as it is not an array.
_TRANSPOSED = "_holdfast_transposed"
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def is_on() -> bool:
    """Whether HOLDFAST_KERNELS lets steps on a CPU use fewer operations."""
    return build.is_on("fewer_operations")


class RopeArguments(NamedTuple):
    """A rotary embedding: the arguments of `mx.fast.rope` except array, positions and stream.

    dims: how many numbers of a head are rotated. traditional: whether neighbours form the rotated
    pairs, instead of numbers of both halves.
    """

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None

    def key(self, dtype: mx.Dtype) -> tuple[Any, ...]:
        """A key for dictionaries, valid while the array `freqs` exists."""
        return (*self[:-1], id(self.freqs), dtype)


class _Factors(NamedTuple):
    """The factors of a rotation, by which x and its swapped copy are multiplied: [rows or 1, 1,
    tokens, dims] each. A row is a sequence of the batch.
    """

    cosines: mx.array
    sines: mx.array

    def of_token(self, index: int) -> _Factors:
        token = slice(index, index + 1)
        return _Factors(self.cosines[:, :, token], self.sines[:, :, token])


class Rotations(StepOperations):
    """The cosines and sines of one model that layers share. Device thread only.

    transposes_once: whether linear layers, too, take fewer operations. If an input's dimension of
        size 1 has an unusual stride, as in some recurrent layers, BLAS may then round in another
        way.
    """

    def __init__(self, *, transposes_once: bool = False) -> None:
        self._transposes_once = transposes_once
        # The factors of this step, and tables that are kept over steps. Both keep the array whose id
        # is part of the key (`RopeArguments.key`), so that no other array gets that id.
        self._step_factors: dict[tuple[Any, ...], tuple[_Factors, mx.array | None]] = {}
        self._tables: dict[tuple[Any, ...], tuple[_Factors, mx.array | None]] = {}
        # the array of positions passed to `share`; None if all positions are plain integers
        self._shared_offset: mx.array | None = None

    def share(self, offset: mx.array) -> mx.array:
        """Let all following rotations of this step at these positions share their factors, instead
        of those at the positions shared before. The array must not change. Returns it.
        """
        self._step_factors.clear()
        self._shared_offset = offset
        return offset

    def can_share(self, offset: int | mx.array) -> bool:
        """Whether factors for this offset can be shared. An array that a model has made itself
        could be changed in place, or be a placeholder while MLX traces a function.
        """
        return isinstance(offset, int) or offset is self._shared_offset

    def step(self) -> AbstractContextManager[None]:
        """Within the block, this thread rotates in fewer operations, unless HOLDFAST_KERNELS turns
        that off.
        """
        return self._in_step() if is_on() else nullcontext()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Tell the replaced functions that this thread is in a step; forget its factors at the end."""
        _install()
        _thread_state.rotations = self
        _thread_state.transposes_once = self._transposes_once
        try:
            yield
        finally:
            _thread_state.rotations = None
            _thread_state.transposes_once = False
            self._step_factors.clear()
            self._shared_offset = None

    def factors(
        self,
        rotate: Callable[..., mx.array],
        arguments: RopeArguments,
        offset: int | mx.array,
        *,
        tokens: int,
        dtype: mx.Dtype,
    ) -> _Factors:
        """The factors for `tokens` positions from `offset` on, computed once per step. Requires
        `can_share(offset)`. rotate: MLX's function.
        """
        rotation_key = arguments.key(dtype)
        key = (offset if isinstance(offset, int) else None, tokens, *rotation_key)
        cached = self._step_factors.get(key)
        if cached is not None:
            return cached[0]
        if tokens == 1 and isinstance(offset, int):
            index = offset % TABLE_POSITIONS
            table = self._table(rotate, arguments, offset - index, rotation_key, dtype)
            factors = table.of_token(index)
        else:
            factors = _factors(rotate, arguments, offset, tokens=tokens, dtype=dtype)
        self._step_factors[key] = factors, arguments.freqs
        return factors

    def _table(
        self,
        rotate: Callable[..., mx.array],
        arguments: RopeArguments,
        start: int,
        rotation_key: tuple[Any, ...],
        dtype: mx.Dtype,
    ) -> _Factors:
        """The factors of `TABLE_POSITIONS` positions from `start` on, which are kept over steps."""
        key = (start, *rotation_key)
        cached = self._tables.pop(key, None)
        if cached is None:
            table = _factors(rotate, arguments, start, tokens=TABLE_POSITIONS, dtype=dtype)
            cached = (table, arguments.freqs)
            if len(self._tables) == MOST_TABLES:
                del self._tables[next(iter(self._tables))]
        self._tables[key] = cached  # the last used comes last
        return cached[0]


def _factors(
    rotate: Callable[..., mx.array],
    arguments: RopeArguments,
    offset: int | mx.array,
    *,
    tokens: int,
    dtype: mx.Dtype,
) -> _Factors:
    """Compute the factors for `tokens` positions from `offset` on, by rotating (1, 0) with MLX's
    function `rotate`: the result is (cos, sin).
    """
    rows = 1 if isinstance(offset, int) else offset.size
    half = arguments.dims // 2
    ones_and_zeros = mx.array([1.0] * half + [0.0] * half, dtype=dtype)
    rotated = rotate(
        mx.broadcast_to(ones_and_zeros, (rows, 1, tokens, arguments.dims)),
        **arguments._replace(traditional=False)._asdict(),
        offset=offset,
    )
    cosines, sines = mx.split(rotated, 2, axis=-1)
    if not arguments.traditional:
        return _Factors(
            mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)
        )
    return _Factors(
        mx.stack([cosines, cosines], axis=-1).reshape(rotated.shape),
        mx.stack([-sines, sines], axis=-1).reshape(rotated.shape),
    )


class _StepState(threading.local):
    """The step that this thread is in: None and False outside `Rotations.step`."""

    rotations: Rotations | None = None
    transposes_once: bool = False


_thread_state = _StepState()


def cosines_and_sines(
    arguments: RopeArguments, start: int, *, tokens: int
) -> npt.NDArray[np.float32]:
    """For each position from `start` on: the cosines, then the sines, with the sign of the number
    that is swapped, [tokens, 2 × dims].
    """
    rotate = getattr(mx.fast.rope, _ORIGINAL, mx.fast.rope)
    factors = _factors(rotate, arguments, start, tokens=tokens, dtype=mx.float32)
    return np.array(mx.concatenate(list(factors), axis=-1)[0, 0])


def _install() -> None:
    """Replace MLX's functions by those of this module, which call them. Idempotent."""
    for owner, name, wrap in (
        (mx.fast, "rope", _rope),
        (Linear, "__call__", _linear),
    ):
        original = getattr(owner, name)
        if not hasattr(original, _ORIGINAL):
            setattr(owner, name, wrap(original))


def _rope(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A replacement for `mx.fast.rope`, with the same parameters."""

    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        arguments = RopeArguments(dims, traditional, base, scale, freqs)
        rotations = _thread_state.rotations
        if (
            rotations is None
            or not rotations.can_share(offset)
            or stream is not None
            or a.ndim != 4
            or a.dtype not in _FLOATS
            or dims % 2
            or not 0 < dims <= a.shape[-1]
        ):
            return original(a, **arguments._asdict(), offset=offset, stream=stream)
        factors = rotations.factors(original, arguments, offset, tokens=a.shape[2], dtype=a.dtype)
        if dims == a.shape[-1]:
            return _rotate(a, factors, traditional=traditional)
        rotated = _rotate(a[..., :dims], factors, traditional=traditional)
        return mx.concatenate([rotated, a[..., dims:]], axis=-1)

    setattr(rope, _ORIGINAL, original)
    return rope


def _rotate(x: mx.array, factors: _Factors, *, traditional: bool) -> mx.array:
    """x * cosines + swapped * sines, where `swapped` exchanges the two numbers of each pair of x."""
    half = x.shape[-1] // 2
    if traditional:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        swapped = mx.roll(pairs, 1, -1).reshape(x.shape)
    else:
        swapped = mx.roll(x, half, -1)
    is_one_token = x.shape[0] == x.shape[2] == 1
    combine = _combined_in_one_operation if is_one_token else _combined
    return combine(x, swapped, *factors)


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A weight of a linear layer, and its view, [1, inputs, outputs]."""

    weight: mx.array
    view: mx.array


def _linear(original: Callable[[Linear, mx.array], mx.array]) -> Callable[..., mx.array]:
    """A replacement for `Linear.__call__`: in a step of one sequence, it multiplies with a view of the
    transposed weight that is made once.
    """

    def __call__(self: Linear, x: mx.array) -> mx.array:  # noqa: N807
        if not _thread_state.transposes_once or x.ndim != 3 or x.shape[0] != 1:
            return original(self, x)
        weight = self["weight"]
        transposed = self.__dict__.get(_TRANSPOSED)
        if transposed is None or transposed.weight is not weight:
            transposed = _Transposed(weight, weight.T[None])
            setattr(self, _TRANSPOSED, transposed)
        if "bias" in self:
            return mx.addmm(self["bias"], x, transposed.view)
        return x @ transposed.view

    setattr(__call__, _ORIGINAL, original)
    return __call__


def _combined(x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    return x * cosines + swapped * sines


@partial(mx.compile, shapeless=True)
def _combined_in_one_operation(
    x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array
) -> mx.array:
    return _combined(x, swapped, cosines, sines)
