"""Decoder layers whose decode steps take few MLX operations on a CPU.

A decode step of a small model on a CPU spends more time on MLX's operations, 10 to 20 µs each, than
on computing. So in models that are built like Llama, C functions (`kernels/decoder_layer`) compute
what comes before and after the attention of a layer: two operations instead of about forty. MLX
takes them for products with a matrix, as in `packed_layers`. Longer spans, such as prefill,
call the layer as mlx-lm defines it; both round differently. Device thread only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.positional_encoding import RoPE

from holdfast.kernels import decoder_layer
from holdfast.kernels.packed_products import MOST_ROWS
from holdfast.worker.engine import fast_on_cpu, packed_layers
from holdfast.worker.engine.fast_on_cpu import RopeForm, Rotations
from holdfast.worker.engine.views import RowsView, SpanView, StepContext
from holdfast.worker.kv.full import FullKV

_MODULES = ("llama", "qwen2", "qwen3")  # mlx-lm runs other models of this design with these modules
_CHECKED_OFFSETS = (0, 77, 5000)


def unavailable() -> str:
    """Why no layer can be fused; empty if layers can."""
    return decoder_layer.unavailable() or packed_layers.no_stand_ins()


class _Parts:
    """The parts of one decoder layer, as matrices to multiply with."""

    def __init__(self, block: Any, form: RopeForm) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.form = form
        self.heads: int = attention.n_heads
        norms = [attention.get(f"{name}_norm") for name in "qk"]
        head_dimension = attention.q_proj.weight.shape[0] // self.heads
        self.all_heads = self.heads + 2 * attention.n_kv_heads
        before = decoder_layer.BeforeAttention(
            query=_linear(attention.q_proj),
            key=_linear(attention.k_proj),
            value=_linear(attention.v_proj),
            norm=_view(block.input_layernorm.weight),
            query_norm=norms[0] and _view(norms[0].weight),
            key_norm=norms[1] and _view(norms[1].weight),
            epsilon=block.input_layernorm.eps,
            head_epsilon=norms[0].eps if norms[0] else 0.0,
            query_scale=attention.scale,
            heads=self.heads,
            kv_heads=attention.n_kv_heads,
            head_dimension=head_dimension,
            rotated=form.dims,
            in_pairs=form.traditional,
        )
        after = decoder_layer.AfterAttention(
            output=_linear(attention.o_proj),
            gate=_linear(mlp.gate_proj),
            up=_linear(mlp.up_proj),
            down=_linear(mlp.down_proj),
            norm=_view(block.post_attention_layernorm.weight),
            epsilon=block.post_attention_layernorm.eps,
        )
        self._stand_ins = [decoder_layer.StandIn(part) for part in (before, after)]
        self.before, self.after = (
            packed_layers.stand_in_views(each.memory, each.shape) for each in self._stand_ins
        )
        self.width = before.outputs

    def __call__(
        self, x: mx.array, mask: Any, cache: RowsView | SpanView, rotations: Rotations
    ) -> mx.array:
        """The layer's result for one token per row, [rows, 1, hidden]."""
        rows, _, hidden = x.shape
        is_batch = rows == 1  # with a batch dimension for one row, MLX reshapes nothing
        if not is_batch:
            x = x.reshape(rows, hidden)
        factors = rotations.rows(self.form, cache.offset, width=self.width)
        projected = mx.addmm(factors if is_batch else factors[0], x, self.before[is_batch])
        heads = projected.reshape(rows, self.all_heads, 1, -1)
        queries, both = mx.split(heads, [self.heads], axis=1)
        cache.append_both(both)
        attended = cache.attend(queries, scale=1.0, mask=mask, sinks=None)
        attended = attended.reshape((1, 1, -1) if is_batch else (rows, -1))
        result = mx.addmm(x, attended, self.after[is_batch])
        return result if is_batch else result[:, None]


@cache
def _fused_class(plain: type[Module]) -> type[Module]:
    class Fused(plain):  # type: ignore[valid-type,misc]
        """A decoder layer whose decode steps take few operations."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            rotations = fast_on_cpu.rotations_of_step()
            rows, tokens, _ = x.shape
            if (
                rotations is None
                or tokens != 1
                or rows > MOST_ROWS
                or not isinstance(cache, (RowsView, SpanView))
                or not rotations.shares(cache.offset)
            ):
                plain_result: mx.array = super().__call__(x, mask, cache)
                return plain_result
            fused: mx.array = self._parts(x, mask, cache, rotations)
            return fused

    return Fused


def fuse(model: Any, dtype: mx.Dtype) -> int:
    """Fuse the decoder layers of a model on a CPU if that is possible, and return their number.

    dtype: the format in which the model computes. Compares the first layer with mlx-lm's.
    """
    blocks: list[Any] = [each for each in model.modules() if _is_block(each)]
    if dtype != mx.float32 or not blocks or unavailable():
        return 0
    forms = _rope_forms([block.self_attn.rope for block in blocks])
    if forms is None:
        return 0
    parts = [_Parts(block, form) for block, form in zip(blocks, forms, strict=True)]
    if not _agrees(blocks[0], parts[0]):
        return 0
    for block, of_block in zip(blocks, parts, strict=True):
        block._parts = of_block
        block.__class__ = _fused_class(type(block))  # type: ignore[arg-type]
    return len(blocks)


def _is_block(module: Any) -> bool:
    """Whether a module is a decoder layer that consists of parts known here."""
    kind = type(module)
    if kind.__name__ != "TransformerBlock" or kind.__module__ not in {
        f"mlx_lm.models.{name}" for name in _MODULES
    }:
        return False
    projections = [module.self_attn[f"{name}_proj"] for name in "qkvo"]
    projections += [module.mlp[f"{name}_proj"] for name in ("gate", "up", "down")]
    return all(type(each) is Linear or packed_layers.is_kept(each) for each in projections)


def _rope_forms(ropes: list[Any]) -> list[RopeForm] | None:
    """How each layer rotates; None if a kind of rotary embedding is not known here.

    Equal frequencies become one array, so that the layers share cosines and sines.
    """
    forms: list[RopeForm] = []
    for rope in ropes:
        if type(rope) is RoPE:
            form = RopeForm(rope.dims, rope.traditional, rope.base, rope.scale, None)
        elif type(rope).__name__ == "Llama3RoPE":
            freqs = rope._freqs
            if forms and forms[0].freqs is not None and mx.array_equal(freqs, forms[0].freqs):
                freqs = forms[0].freqs
            form = RopeForm(rope.dims, rope.traditional, None, 1.0, freqs)
        else:
            return None
        forms.append(form)
    return forms


def _linear(module: Any) -> decoder_layer.Linear:
    bias = module.get("bias")
    weights = module._packed if packed_layers.is_kept(module) else _view(module.weight)
    return decoder_layer.Linear(weights, None if bias is None else _view(bias))


def _view(array: mx.array) -> Any:
    """A view of an evaluated array, which keeps its memory."""
    array = array if array.dtype == mx.float32 else array.astype(mx.float32)
    mx.eval(array)
    return np.array(array, copy=False)


def _agrees(block: Any, parts: _Parts) -> bool:
    """Whether the parts compute what mlx-lm's layer does, on random inputs: for one row and for several."""
    hidden = len(block.input_layernorm.weight)
    rotations = Rotations()
    for rows in (1, len(_CHECKED_OFFSETS)):
        states = [[FullKV() for _ in range(rows)] for _ in range(2)]
        for step in range(3):
            x = mx.random.normal((rows, 1, hidden), key=mx.random.key(step))
            results: list[mx.array] = []
            with fast_on_cpu.step(rotations):
                offset = mx.array(_CHECKED_OFFSETS[:rows]) + step
                for layers, is_fused in zip(states, (False, True), strict=True):
                    view = RowsView(
                        layers,
                        tokens=[1] * rows,
                        offset=rotations.share(offset),
                        context=StepContext(),
                    )
                    results.append(
                        parts(x, None, view, rotations) if is_fused else block(x, None, view)
                    )
                mx.eval(results)
            if not mx.allclose(results[0], results[1], rtol=1e-3, atol=1e-3):
                return False
    return True
