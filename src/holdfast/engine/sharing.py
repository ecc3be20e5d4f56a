"""Whether sequences share the keys and values of a common beginning: measured at load, since kernels may want one buffer.

Frozen parts and a tail lie in several buffers. Where attention is composed (a CPU), it takes them as they are; a fused kernel
wants one, so that all is copied together in every step.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from holdfast.engine.layouts import Runner
from holdfast.engine.views import SpanView, StepContext
from holdfast.kv.form import HeadsForm, ModelForm
from holdfast.kv.full import FullKV

_FROZEN_TOKENS, _TAIL_TOKENS = 4096, 64
_FEWEST_ROUNDS, _MOST_ROUNDS = 16, 64  # more where it seems slow: a busy machine must not look like one that copies
_MOST_TIMES = 2.0  # as long as over one buffer; attention that reads all, writes it and reads it again takes 3 and more


def choose_sharing(runner: Runner, model: Any, form: ModelForm | None, *, composes_attention: bool | None = None) -> None:
    """Have the runner's layers share or not, and add to its reason why. Device thread.

    form: of what is kept of the model, as the engine measures it; None when its state is mlx-lm's own.
    composes_attention: whether attention takes parts as they are, else it is measured; None: as the device has it.
    """
    takes_parts = StepContext().composes_attention if composes_attention is None else composes_attention
    pair = [each for each in form.block[:2] if isinstance(each, HeadsForm)] if form is not None else []
    if len(pair) < 2 or not any(leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return
    if not runner.attends_to_parts:
        runner.shares, why = False, "attention outside the seam takes one buffer"
    elif takes_parts:
        runner.shares, why = True, "attention takes several buffers as they are"
    else:
        heads = getattr(getattr(model, "args", None), "num_attention_heads", None)
        shared = heads // pair[0].heads if isinstance(heads, int) else 1
        whole, parted = _milliseconds(*pair, query_heads=max(1, shared) * pair[0].heads)
        runner.shares = parted <= whole * _MOST_TIMES
        tokens = f"{_FROZEN_TOKENS + _TAIL_TOKENS:,}"
        why = f"over {tokens} tokens in two buffers attention takes {parted / whole:.1f} times as long as in one"
    runner.reason += f"; common beginnings are {'held once' if runner.shares else 'copied'}: {why}"


def _milliseconds(keys: HeadsForm, values: HeadsForm, *, query_heads: int) -> tuple[float, float]:
    """The least time of one layer's attention of one token: over one buffer, and over a frozen part and a tail."""
    dtype = getattr(mx, keys.dtype)
    queries = mx.zeros((1, query_heads, 1, keys.dimension), dtype)
    layers = [_filled(keys, values, is_parted=is_parted) for is_parted in (False, True)]
    least = [float("inf")] * 2
    for done in range(_MOST_ROUNDS):
        if done >= _FEWEST_ROUNDS and least[1] <= least[0] * _MOST_TIMES:
            break
        for index, layer in enumerate(layers):
            began = time.perf_counter()
            mx.eval(SpanView(layer, context=StepContext()).attend(queries, scale=1.0, mask=None, sinks=None))
            least[index] = min(least[index], 1000 * (time.perf_counter() - began))
    return least[0], least[1]


def _filled(keys: HeadsForm, values: HeadsForm, *, is_parted: bool) -> FullKV:
    layer = FullKV()
    layer.reserve(_FROZEN_TOKENS if is_parted else _FROZEN_TOKENS + _TAIL_TOKENS)
    for tokens in (_FROZEN_TOKENS, _TAIL_TOKENS):
        arrays = [mx.zeros((1, form.heads, tokens, form.dimension), getattr(mx, form.dtype)) for form in (keys, values)]
        layer.append(*arrays)
        if is_parted:
            layer.freeze()
    mx.eval(list(layer.arrays()))
    return layer
