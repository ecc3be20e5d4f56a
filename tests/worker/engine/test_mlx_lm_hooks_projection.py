"""Only wanted rows go through the vocabulary projection, for any head of a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from holdfast.worker.engine.mlx_lm_hooks import ProjectionHook
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

IDS = mx.array([[5, 6, 7, 8], [9, 10, 11, 12]])
ROWS = mx.array([0, 3, 6])


def softcapped() -> nn.Module:
    return make_tiny("gemma2")


def quantized(name: str, **changes: Any) -> nn.Module:
    model = make_tiny(name, **changes)
    nn.quantize(
        model, group_size=32, bits=4, class_predicate=lambda _, part: hasattr(part, "to_quantized")
    )
    return model


def with_bias() -> nn.Module:
    model: Any = make_tiny("llama", tie_word_embeddings=False)
    head = nn.Linear(64, VOCAB_SIZE, bias=True)
    head.bias = mx.arange(VOCAB_SIZE) / 100
    model.lm_head = head
    return model  # type: ignore[no-any-return]


HEADS = {
    "tied": lambda: make_tiny("llama"),
    "its own": lambda: make_tiny("llama", tie_word_embeddings=False),
    "with a bias": with_bias,
    "nested": lambda: make_tiny("qwen3_5"),
    "softcapped": softcapped,
    "scaled": lambda: make_tiny("cohere2", logit_scale=0.25),
    "divided": lambda: make_tiny("minicpm3"),
    "rwkv": lambda: make_tiny("rwkv7"),
    "quantized, tied": lambda: quantized("llama"),
    "quantized, its own": lambda: quantized("llama", tie_word_embeddings=False),
}


def test_without_a_selection_the_model_is_unchanged() -> None:
    model: Any = make_tiny("llama")
    names = [name for name, _ in tree_flatten(model.parameters())]
    expected = model(IDS)
    hook = ProjectionHook(model)
    with hook.selecting(None) as selection:
        assert mx.array_equal(model(IDS), expected)
    assert not selection.used
    assert mx.array_equal(model(IDS), expected)
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def test_a_selection_ends_even_if_the_model_raises() -> None:
    model: Any = make_tiny("llama")
    expected, hook = model(IDS), ProjectionHook(model)
    with pytest.raises(RuntimeError, match="in the middle"), hook.selecting(ROWS):
        raise RuntimeError("in the middle")
    assert mx.array_equal(model(IDS), expected)


def test_removing_the_seam_restores_the_modules_classes() -> None:
    model: Any = make_tiny("llama", tie_word_embeddings=False)
    hook = ProjectionHook(model)
    assert type(model.lm_head) is not nn.Linear
    assert isinstance(model.lm_head, nn.Linear)
    hook.remove()
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding


def test_a_head_unknown_to_the_seam_is_reported() -> None:
    model: Any = make_tiny("llama")
    table = model.model.embed_tokens.weight
    model.__class__ = type(
        "Odd",
        (type(model),),
        {"__call__": lambda self, ids, cache=None: self.model(ids, cache) @ table.T},
    )
    with ProjectionHook(model).selecting(ROWS) as selection:
        logits = model(IDS)
    assert not selection.used
    assert logits.shape == (2, 4, VOCAB_SIZE)


@pytest.mark.parametrize("head", HEADS)
def test_selected_rows_and_deferred_rows_have_their_usual_logits(head: str) -> None:
    model: Any = HEADS[head]()
    expected = model(IDS).reshape(-1, VOCAB_SIZE)
    hook = ProjectionHook(model)
    with hook.selecting(ROWS, deferred=mx.arange(8)) as selection:
        selected = model(IDS)
    assert selection.used
    assert selected.shape == (ROWS.size, 1, VOCAB_SIZE)
    deferred = hook.take_deferred()
    assert deferred is not None
    assert hook.take_deferred() is None
    assert float(mx.abs(selected[:, 0] - expected[ROWS]).max()) < 1e-4
    for start, stop in ((0, 8), (0, 1), (1, 6), (6, 8)):
        later = hook.project(deferred[start:stop])
        assert later.shape == (stop - start, VOCAB_SIZE)
        assert float(mx.abs(later - expected[start:stop]).max()) < 1e-4
    assert mx.array_equal(model(IDS).reshape(-1, VOCAB_SIZE), expected)


def test_rows_can_be_deferred_during_a_full_projection() -> None:
    model: Any = make_tiny("llama")
    expected, hook = model(IDS), ProjectionHook(model)
    with hook.selecting(None, deferred=ROWS):
        assert float(mx.abs(model(IDS) - expected).max()) < 1e-4
    deferred = hook.take_deferred()
    assert deferred is not None
    assert (
        float(mx.abs(hook.project(deferred) - expected.reshape(-1, VOCAB_SIZE)[ROWS]).max()) < 1e-4
    )


def test_projecting_later_computes_no_layer() -> None:
    model: Any = make_tiny("llama")
    hook = ProjectionHook(model)
    with hook.selecting(None, deferred=ROWS):
        mx.eval(model(IDS))
    deferred = hook.take_deferred()
    assert deferred is not None
    mx.eval(deferred)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.up_proj.weight * float("nan")
    assert bool(mx.isfinite(hook.project(deferred)).all())
    assert not bool(mx.isfinite(model(IDS)).any())
