"""The hook in mlx-lm: plain models pass through it unchanged, and views take over attention."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.engine import mlx_lm_hooks
from tests.fakes.tiny_models import kept_tiny


class Attending:
    """Keys that do the attention themselves."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def attend(
        self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        self.asked = {"scale": scale, "mask": mask, "sinks": sinks}
        return queries + 1


def attention() -> Any:
    kept_tiny("llama")
    return importlib.import_module("mlx_lm.models.base").scaled_dot_product_attention


def test_arrays_get_mlx_lms_own_attention() -> None:
    q, k, v = (mx.random.normal((1, 2, 3, 4), key=mx.random.key(seed)) for seed in range(3))
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
    assert mx.array_equal(attention()(q, k, v, cache=None, scale=0.5, mask="causal"), plain)


@pytest.mark.parametrize("sinks", [None, mx.zeros((2,))])
def test_keys_that_attend_get_all_arguments(sinks: mx.array | None) -> None:
    keys, queries = Attending(), mx.zeros((1, 2, 1, 4))
    given = {} if sinks is None else {"sinks": sinks}
    result = attention()(queries, keys, keys, cache=keys, scale=0.5, mask="m", **given)
    assert mx.array_equal(result, queries + 1)
    assert keys.asked == {"scale": 0.5, "mask": "m", "sinks": sinks}


def test_installing_twice_wraps_once() -> None:
    before = attention()
    mlx_lm_hooks.install()
    assert attention() is before


def test_a_module_imported_earlier_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    base = importlib.import_module("mlx_lm.models.base")
    hook = attention()
    plain = getattr(hook, mlx_lm_hooks._ORIGINAL)
    early = ModuleType("mlx_lm.models.early")
    early.scaled_dot_product_attention = plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_lm.models.early", early)
    monkeypatch.setattr(base, "scaled_dot_product_attention", plain)
    mlx_lm_hooks.install()
    try:
        assert early.scaled_dot_product_attention is base.scaled_dot_product_attention
        assert hasattr(early.scaled_dot_product_attention, mlx_lm_hooks._ORIGINAL)
    finally:
        base.scaled_dot_product_attention = hook  # type: ignore[attr-defined]
