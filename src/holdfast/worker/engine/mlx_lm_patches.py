"""Patches for the modules of mlx-lm that fail, or compute wrong results, when sequences are batched
or prompts are prefilled in chunks.

Every row of a batch has its own position, so the cache views (`views`) pass an array of positions
as `offset`. Most models only pass the offset on to `mx.fast.rope`. These modules also compute with
it:

- `gpt_bigcode` looks up learned positions, and `llama4` scales queries by their position; both call
  `arange` with the position as its start. The patched modules get an `arange` that takes arrays.
- `DynamicNTKScalingRoPE` chooses the base of the rotation by the position of the last token of the
  forward pass. Beyond the trained context, mlx-lm's keys therefore depend on how a prompt is cut
  into chunks, and a cached prefix would differ from a new prefill. The patched class chooses the
  base by the position of each token, as mlx-lm computes if a prompt is fed token by
  token.

`olmo` and `phi3small` add the mask to the attention scores, but mlx-lm's mask is a string or
boolean: `olmo` fails, and in `phi3small` a token sees the later tokens of its chunk. They get a
mask of 0 and -inf.

`plamo3` lets a token see `window_size` earlier tokens, but its cache keeps one less, so the first
token of each chunk would see fewer tokens than the others. Its cache is made one token larger.

A patch changes a module or class of mlx-lm once, for the whole process. For a single position, the
patched code computes the same as before (`plamo3`: the same as for a prompt that is prefilled in
one chunk).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

_PATCHED = "_holdfast_patched"


def patch(model: Any) -> None:
    """Patch the modules of mlx-lm that this model is built from. Idempotent."""
    classes = {type(part) for part in model.modules()}
    names = {each.__module__ for each in classes}
    for name, change in _PATCHES.items():
        module = sys.modules.get(name)
        if name in names and module is not None and not hasattr(module, _PATCHED):
            change(module)
            setattr(module, _PATCHED, True)


class _ModuleProxy:
    """Replaces a module: has the given functions, and all other attributes of the module."""

    def __init__(self, module: ModuleType, **functions: Callable[..., Any]) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _patch_gpt_bigcode(module: Any) -> None:
    """Let the lookup of learned positions take one position per row."""
    module.np = _ModuleProxy(np, arange=_positions_of_rows)


def _positions_of_rows(start: Any, stop: Any) -> Any:
    """Replaces `np.arange` in gpt_bigcode. If `start` has one position for each row, returns these
    positions, [rows, 1].
    """
    if isinstance(start, mx.array) and start.ndim:
        return start[:, None]
    return np.arange(int(start), int(stop))


def _patch_llama4(module: Any) -> None:
    """Let the scaling of queries by position take one position per row."""
    module.mx = _ModuleProxy(mx, arange=_positions_to_scale)


def _positions_to_scale(*limits: Any) -> mx.array:
    """Replaces `mx.arange` in llama4. If the first limit has one position for each row, returns
    these positions, [rows, 1, 1]: llama4 adds a last dimension and multiplies queries [rows, heads,
    1, head_dim] by the result.
    """
    first = limits[0]
    if isinstance(first, mx.array) and first.ndim:
        return first[:, None, None]
    return mx.arange(*limits)


def _patch_rope(module: Any) -> None:
    """Choose the base of dynamic NTK scaling by the position of each token."""
    module.DynamicNTKScalingRoPE.__call__ = _rotated_by_position


def _rotated_by_position(rope: Any, x: mx.array, offset: Any = 0) -> mx.array:
    """Rotate each token with the base for its own position. x: [rows, heads, tokens, head_dim]."""
    dims = rope.dims
    trained_tokens = rope.max_position_embeddings
    starts = mx.array(offset).reshape(-1, 1)
    positions = starts + mx.arange(x.shape[-2])  # [rows or 1, tokens]
    context_lengths = mx.maximum(positions + 1, trained_tokens).astype(mx.float32)
    stretch = (rope.factor * context_lengths / trained_tokens) - (rope.factor - 1)
    bases = rope.base * stretch ** (dims / (dims - 2))
    exponents = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    frequencies = mx.exp(-mx.log(bases)[..., None] * exponents)
    angles = (positions[..., None] * frequencies)[:, None]  # [rows or 1, 1, tokens, dims / 2]
    cosines = mx.cos(angles)
    sines = mx.sin(angles)
    rotated = x[..., :dims].astype(mx.float32)
    if rope.traditional:
        first = rotated[..., ::2]
        second = rotated[..., 1::2]
    else:
        first = rotated[..., : dims // 2]
        second = rotated[..., dims // 2 :]
    pairs = [first * cosines - second * sines, first * sines + second * cosines]
    joined = mx.stack(pairs, axis=-1) if rope.traditional else mx.concatenate(pairs, axis=-1)
    return mx.concatenate([joined.reshape(rotated.shape).astype(x.dtype), x[..., dims:]], axis=-1)


def _patch_added_masks(module: Any) -> None:
    """Make masks of 0 and -inf, for models that add the mask to the attention scores."""
    create_mask = module.create_attention_mask

    def mask_of_numbers(hidden: mx.array, cache: Any = None, **options: Any) -> Any:
        mask = create_mask(hidden, cache, **{**options, "return_array": True})
        if not isinstance(mask, mx.array):
            return mask
        return mx.where(mask, 0.0, -math.inf).astype(hidden.dtype)

    module.create_attention_mask = mask_of_numbers


def _patch_plamo3(module: Any) -> None:
    """Let the caches of sliding windows keep one more token."""
    original_cache = module.RotatingKVCache
    module.RotatingKVCache = lambda max_size: original_cache(max_size=max_size + 1)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "mlx_lm.models.gpt_bigcode": _patch_gpt_bigcode,
    "mlx_lm.models.llama4": _patch_llama4,
    "mlx_lm.models.olmo": _patch_added_masks,
    "mlx_lm.models.phi3small": _patch_added_masks,
    "mlx_lm.models.plamo3": _patch_plamo3,
    "mlx_lm.models.rope_utils": _patch_rope,
}
