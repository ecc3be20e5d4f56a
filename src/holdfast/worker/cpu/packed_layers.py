"""Packed layers: layers on a CPU whose weights stay in their stored form, quantized or in 16 bits.

In MLX on CPUs, only float32 products are fast, but float32 weights take two to seven times the
memory. So the layers get subclasses that multiply by a stand-in for the float32 weights: an array
that has their shape, but not their memory. MLX passes its products to the shim (`kernels/products`),
which recognizes the stand-in and multiplies by the stored weights.

- Few rows (decoding): a C kernel reads each stored weight once for all rows.
- Many rows (prefill): some weights at a time are converted to float32 and multiplied by BLAS.

Experts of a mixture call the kernel themselves: each of their products waits for its input. Parameters, their
names and formats do not change. Device thread only.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from holdfast.worker.cpu.blas import current_blas
from holdfast.worker.cpu.kernels import packed_products, products
from holdfast.worker.cpu.kernels.packed_products import (
    BITS,
    GROUP_SIZES,
    INPUTS_MULTIPLE,
    MOST_ROWS,
    PackedWeights,
)
from holdfast.worker.engine import mlx_lm_hooks
from holdfast.worker.engine.weight_format import STORED

_HALVES = (mx.float16, mx.bfloat16)
_SCALES = (mx.float32, *_HALVES)


class PackedLinear(QuantizedLinear):
    """A quantized linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        return _product(self, x)


class HalfLinear(Linear):
    """A linear layer with weights of 16 bits."""

    def __call__(self, x: mx.array) -> mx.array:
        return _product(self, x)


class PackedEmbedding(QuantizedEmbedding):
    """A quantized embedding, which can also be the output head."""

    def __call__(self, x: mx.array) -> mx.array:
        """The embeddings of token ids x, dequantized row by row."""
        return mx.dequantize(
            self["weight"][x],
            self["scales"][x].astype(mx.float32),
            self["biases"][x].astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
        ).astype(self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class HalfEmbedding(Embedding):
    """An embedding with weights of 16 bits, which can also be the output head."""

    def __call__(self, x: mx.array) -> mx.array:
        embedded: mx.array = self["weight"][x]
        return embedded.astype(self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


@cache
def _packed_classes() -> dict[type[Module], type[Module]]:
    """The classes of layers that can be packed, with the subclasses here that replace them."""
    # not at the top: mlx-lm must be prepared first (`mlx_lm_hooks`)
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    class PackedExperts(QuantizedSwitchLinear):
        """The quantized linear layers of a mixture's experts. All products use the kernel: even in
        prefill, an expert gets few rows.
        """

        def __call__(
            self, x: mx.array, indices: mx.array, sorted_indices: bool = False
        ) -> mx.array:
            """x Wᵀ, plus the bias if there is one, for the experts `indices`."""
            # while MLX only builds a graph, as in mx.compile, the kernel has no numbers to multiply
            y = None if mlx_lm_hooks.is_only_graph() else _product_of_experts(self, x, indices)
            if y is None:
                in_graph: mx.array = super().__call__(  # type: ignore[no-untyped-call]
                    x, indices, sorted_indices
                )
                return in_graph
            return y + self["bias"][indices][..., None, :] if "bias" in self else y

    packed: dict[type[Module], type[Module]] = {
        Linear: HalfLinear,
        Embedding: HalfEmbedding,
        QuantizedLinear: PackedLinear,
        QuantizedEmbedding: PackedEmbedding,
        QuantizedSwitchLinear: PackedExperts,
    }
    return packed | {each: each for each in packed.values()}


@cache
def unavailable() -> str:
    """Why no layer can keep its weights; empty if layers can."""
    return packed_products.unavailable() or why_no_stand_ins()


@cache
def why_no_stand_ins() -> str:
    """Why no product with a stand-in can be computed; empty if such products are right."""
    reason = products.unavailable() or current_blas().no_shim
    if reason:
        return reason
    try:
        return _disagreement()
    # in case MLX refuses views that are larger than their array, or an operation
    except (RuntimeError, ValueError, TypeError) as error:
        return f"MLX refuses it: {error}"


def supports(module: Any) -> bool:
    """Whether `keep_stored` can be called for a module: its class and the format of its weights are
    supported. Evaluates nothing.
    """
    if type(module) not in _packed_classes():
        return False
    if not hasattr(module, "bits"):  # not quantized
        weight = module.weight
        return weight.dtype in _HALVES and weight.shape[-1] % INPUTS_MULTIPLE == 0
    return (
        module.mode == "affine"
        and module.bits in BITS
        and module.group_size in GROUP_SIZES
        and module.scales.dtype in _SCALES
    )


def is_kept(module: Any) -> bool:
    """Whether `keep_stored` was called for this module."""
    return "_packed" in vars(module)


def keep_stored(module: Any, dtype: mx.Dtype) -> None:
    """Make a module compute with its stored weights. Requires `supports`, and that
    `unavailable` is empty.

    The module's weights are evaluated. dtype: the format of the embeddings that it returns.
    """
    names = STORED if hasattr(module, "bits") else STORED[:1]
    arrays = (_view_of(module[name]) for name in names)
    packed = PackedWeights(
        *(array.reshape(-1, array.shape[-1]) for array in arrays),
        bits=getattr(module, "bits", 16),
        group_size=getattr(module, "group_size", 0),
    )
    module._packed = packed
    _set_stand_in(module)
    module._dtype = dtype
    module.__class__ = _packed_classes()[type(module)]


def _set_stand_in(module: Any, *, allocated_numbers: int = 0) -> None:
    """Give a module the stand-in to multiply by, [1, inputs, outputs], and its flat view.

    allocated_numbers: how many numbers of the matrix have memory, at least those that the shim reads.
    """
    packed: PackedWeights = module._packed
    first_numbers = packed.stand_in()
    numbers = np.zeros(max(len(first_numbers), allocated_numbers), np.uint32)
    numbers[: len(first_numbers)] = first_numbers
    module._flat_stand_in, module._stand_in = stand_in_views(
        numbers, (packed.outputs, packed.inputs)
    )


def stand_in_views(
    memory: npt.NDArray[np.uint32], shape: tuple[int, int]
) -> tuple[mx.array, mx.array]:
    """A stand-in's matrix, transposed: [inputs, outputs], and with a batch dimension of 1.

    memory: the first numbers of the matrix. The strides of the views point beyond its end, but the
    shim reads no more. shape: outputs and inputs.
    """
    outputs, inputs = shape
    array = mx.array(memory).view(mx.float32)
    flat = mx.as_strided(array, (inputs, outputs), (1, inputs))
    batched = mx.as_strided(array, (1, inputs, outputs), (inputs * outputs, 1, inputs))
    mx.eval(flat, batched)
    return flat, batched


def _product(module: Any, x: mx.array) -> mx.array:
    """x Wᵀ, plus the bias if there is one, in the format of x. Lazy."""
    # with a batch dimension for one sequence, MLX reshapes neither input nor result
    is_one_sequence = x.ndim == 3 and len(x) == 1
    stand_in: mx.array = module._stand_in if is_one_sequence else module._flat_stand_in
    bias: mx.array | None = module.get("bias")
    if x.dtype == mx.float32:
        return x @ stand_in if bias is None else mx.addmm(bias, x, stand_in)
    y: mx.array = (x.astype(mx.float32) @ stand_in).astype(x.dtype)
    return y if bias is None else y + bias


def _try_to_evaluate(*arrays: mx.array) -> bool:
    """Evaluate arrays. Returns False within mx.compile, where there are no numbers yet."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        if "function transformations" in str(error):
            return False
        raise
    return True


def _product_of_experts(module: Any, x: mx.array, indices: mx.array) -> mx.array | None:
    """x Wᵀ for the experts `indices`, in the format of x; None within mx.compile.

    x: [..., rows, inputs], indices: [...]; both are broadcast. Returns [..., rows, outputs].
    """
    shape = np.broadcast_shapes(x.shape[:-2], indices.shape)
    inputs = mx.broadcast_to(x.astype(mx.float32), (*shape, *x.shape[-2:]))
    if not _try_to_evaluate(inputs, indices):
        return None
    packed: PackedWeights = module._packed  # the weights of all experts, one after the other
    rows_of_experts = np.array(inputs, copy=False).reshape(-1, *x.shape[-2:])
    experts = np.broadcast_to(np.array(indices), shape).reshape(-1)
    outputs = module.weight.shape[1]
    results = np.empty((*rows_of_experts.shape[:2], outputs), np.float32)
    for expert in np.unique(experts):
        positions = np.flatnonzero(experts == expert)
        start = int(expert) * outputs
        rows = rows_of_experts[positions].reshape(-1, packed.inputs)
        product = packed.multiply(rows, start=start, end=start + outputs)
        results[positions] = product.reshape(len(positions), -1, outputs)
    return mx.array(results.reshape(*shape, x.shape[-2], outputs)).astype(x.dtype)


def _view_of(array: mx.array) -> Any:
    """A numpy view of an evaluated array; bfloat16, which numpy does not have, as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
        mx.eval(array)
    return np.array(array, copy=False)


def _disagreement() -> str:
    """Compare products with MLX's own on small random arrays; empty if they agree. Takes some ms."""
    x = mx.random.normal((MOST_ROWS + 1, 128), key=mx.random.key(0))
    weight = mx.random.normal((20, 128), key=mx.random.key(1))
    for bits, dtype in itertools.product((16, *BITS), _SCALES):
        layer: Any = Linear(128, len(weight), bias=False)
        layer.weight = float_weight = weight.astype(dtype)
        if bits in BITS:
            layer = layer.to_quantized(group_size=64, bits=bits)
            scales, biases = (each.astype(mx.float32) for each in (layer.scales, layer.biases))
            float_weight = mx.dequantize(layer.weight, scales, biases, group_size=64, bits=bits)
        elif not supports(layer):
            continue
        expected = x @ float_weight.astype(mx.float32).T
        mx.eval(layer.parameters(), expected)
        keep_stored(layer, mx.float32)
        # memory for the whole matrix, because MLX reads all of it if it does not call the shim
        _set_stand_in(layer, allocated_numbers=weight.size)
        for rows in (1, 3, MOST_ROWS, len(x)):
            for computed in (layer(x[:rows]), layer(x[None, :rows])):
                if not mx.allclose(computed, expected[:rows], rtol=1e-4, atol=1e-4):
                    return "it disagrees with MLX on this machine"
    return ""
