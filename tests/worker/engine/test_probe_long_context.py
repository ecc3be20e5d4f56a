"""The check of kernels used only for long contexts, forced on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.engine import probe
from holdfast.worker.engine.mlx_lm_hooks import AttentionShape, recorded_shapes
from holdfast.worker.engine.probe import attention_error, warnings_about_kernels
from tests.fakes.slow import slow
from tests.fakes.tiny_models import kept_tiny

PLAIN = mx.fast.scaled_dot_product_attention
FAULTS = ["last key", "heads", "key at a boundary", "first key", "second half of the values"]
SHAPES = [AttentionShape(4, 2, 16, 4, 0.25), AttentionShape(4, 4, 64, 2, 0.125)]


def test_correct_kernels_give_no_warning() -> None:
    assert warnings_about_kernels(kept_tiny("llama"), force=True) == ()


def test_on_a_cpu_the_check_runs_only_if_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong_by("last key"))
    assert warnings_about_kernels(kept_tiny("llama")) == ()


def test_the_shapes_are_those_of_the_model() -> None:
    with recorded_shapes() as shapes:
        kept_tiny("llama")(mx.array([[0]]))
    assert shapes == {AttentionShape(4, 2, 16, 4, 0.25)}


def wrong_by(fault: str) -> Any:
    """Fused attention that is correct for short contexts and has one fault in long ones."""

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        tokens = keys.shape[2]
        if tokens <= 1024:
            return PLAIN(queries, keys, values, **more)
        positions = mx.arange(tokens)
        hidden = {
            "last key": tokens - min(queries.shape[2], probe.COMPARED_QUERIES),
            "key at a boundary": 1024,
            "first key": 0,
        }.get(fault)
        if hidden is not None:
            keys = mx.where((positions == hidden)[:, None], mx.zeros_like(keys), keys)
        elif fault == "second half of the values":
            values = mx.concatenate(
                [values[:, :, : tokens // 2], values[:, :, : tokens - tokens // 2]], axis=2
            )
        elif fault == "heads":
            values = mx.concatenate([values[:, 1:], values[:, :1]], axis=1)
        return PLAIN(queries, keys, values, **more)

    return attend


def errors(shape: AttentionShape) -> list[float]:
    return [attention_error(shape, keys=1_500, queries=queries) for queries in (1, 32)]


errors_of_right_kernels = cache(errors)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        *((SHAPES[0], fault) for fault in FAULTS),
        *((SHAPES[1], fault) for fault in FAULTS[:2]),
        *slow(*((SHAPES[1], fault) for fault in FAULTS[2:])),
    ],
)
def test_a_wrong_kernel_for_long_contexts_is_found(
    shape: AttentionShape, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = errors_of_right_kernels(shape)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong_by(fault))
    wrong = errors(shape)
    allowed = probe.ALLOWED_ERROR[shape.dtype_bytes]
    assert max(right) <= allowed / 2
    assert min(wrong) > 4 * allowed


def test_a_fault_is_reported_with_shape_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong_by("heads"))
    monkeypatch.setattr(probe, "KEYS", (1_500,))
    monkeypatch.setattr(probe, "QUERIES", (1,))
    first, *_ = warnings_about_kernels(kept_tiny("llama"), force=True)
    assert (
        "attention of 1 query over 1,500 keys (4 heads, 2 key heads, dimension 16) is off by "
        in first
    )
