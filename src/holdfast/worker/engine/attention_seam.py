"""The one place where unmodified mlx-lm models hand their attention to Holdfast.

mlx-lm models bind `scaled_dot_product_attention` by name when their module is imported, so the seam
has to stand in `mlx_lm.models.base` before that; modules that were imported earlier (library users)
are mended in place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx

_NAME = "scaled_dot_product_attention"
_MARK = "_holdfast_plain_attention"


class AttentionShape(NamedTuple):
    """Of one call; keys and values have the same head dimension."""

    heads: int
    kv_heads: int
    head_dimension: int
    dtype_bytes: int
    scale: float


_heard: set[AttentionShape] | None = None


@contextmanager
def heard_shapes() -> Iterator[set[AttentionShape]]:
    """The shapes of all attention that comes through the seam, with plain keys and values, within
    the block.
    """
    global _heard
    _heard = heard = set[AttentionShape]()
    try:
        yield heard
    finally:
        _heard = None


def _seam(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A cache view that wants to do the attention itself returns in place of keys and values
    something that can `attend`.
    """

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if _heard is not None and isinstance(keys, mx.array) and keys.shape[-1] == values.shape[-1]:
            shape = AttentionShape(
                queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype.size, scale
            )
            _heard.add(shape)
        if hasattr(keys, "attend"):
            attended: mx.array = keys.attend(queries, scale=scale, mask=mask, sinks=sinks)
            return attended
        return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    setattr(scaled_dot_product_attention, _MARK, plain)
    return scaled_dot_product_attention


def install() -> None:
    """Put the seam into mlx-lm. Idempotent; call before the first model module is imported."""
    base = importlib.import_module("mlx_lm.models.base")
    plain = getattr(base, _NAME)
    if hasattr(plain, _MARK):
        return
    seam = _seam(plain)
    for module in _model_modules():
        if getattr(module, _NAME, None) is plain:
            setattr(module, _NAME, seam)


def _model_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm.models.") and module is not None
    ]


def reaches(model: object) -> bool:
    """Whether every module that the model's classes come from, if it does attention through mlx-lm,
    holds the seam.
    """
    modules = {type(part).__module__ for _, part in model.named_modules()}  # type: ignore[attr-defined]
    bound = [
        getattr(sys.modules[name], _NAME)
        for name in modules
        if hasattr(sys.modules.get(name), _NAME)
    ]
    return all(hasattr(function, _MARK) for function in bound)
