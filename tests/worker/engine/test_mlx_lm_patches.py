"""Adapted modules of mlx-lm compute many positions like mlx-lm one."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.engine import mlx_lm_hooks, mlx_lm_patches
from holdfast.worker.engine.layouts import mlx_lm_caches
from tests.fakes.every_config import tiny_config
from tests.fakes.tiny_models import VOCAB_SIZE, make_model

mlx_lm_hooks.prepare()
rope_utils: Any = importlib.import_module("mlx_lm.models.rope_utils")
PLAIN_NTK = rope_utils.DynamicNTKScalingRoPE.__call__
TRAINED = 6
TOKENS = 12


def ntk(*, traditional: bool) -> Any:
    return rope_utils.DynamicNTKScalingRoPE(
        dims=8, max_position_embeddings=TRAINED, traditional=traditional, base=100.0, factor=2.0
    )


def keys(tokens: int = TOKENS) -> mx.array:
    return mx.random.normal((1, 2, tokens, 10), key=mx.random.key(3))


def assert_close(got: mx.array, expected: mx.array) -> None:
    assert got.shape == expected.shape
    assert float(mx.abs(got - expected).max()) < 1e-4


def rotated(rope: Any, x: mx.array, offset: Any = 0) -> mx.array:
    return mlx_lm_patches._rotated_by_position(rope, x, offset)


@pytest.mark.parametrize("traditional", [False, True])
def test_dynamic_ntk_rotates_a_chunk_like_mlx_lm_its_tokens(traditional: bool) -> None:
    rope = ntk(traditional=traditional)
    x = keys()
    one_by_one = [PLAIN_NTK(rope, x[:, :, at : at + 1], offset=at) for at in range(TOKENS)]
    assert_close(rotated(rope, x), mx.concatenate(one_by_one, axis=2))


def test_dynamic_ntk_does_not_depend_on_chunk_sizes() -> None:
    rope = ntk(traditional=False)
    x = keys()
    whole = rotated(rope, x)
    cut = [rotated(rope, x[:, :, :7]), rotated(rope, x[:, :, 7:], 7)]
    assert_close(mx.concatenate(cut, axis=2), whole)
    plain = [PLAIN_NTK(rope, x[:, :, :7], offset=0), PLAIN_NTK(rope, x[:, :, 7:], offset=7)]
    difference = mx.abs(mx.concatenate(plain, axis=2) - PLAIN_NTK(rope, x)).max()
    assert float(difference) > 0.1, "mlx-lm's own does"


def test_dynamic_ntk_gives_each_row_its_own_position() -> None:
    rope = ntk(traditional=False)
    x = keys()
    whole = rotated(rope, x)
    positions = [3, 11, 6]
    rows = mx.concatenate([x[:, :, at : at + 1] for at in positions])
    expected = mx.concatenate([whole[:, :, at : at + 1] for at in positions])
    assert_close(rotated(rope, rows, mx.array(positions)), expected)


def test_within_the_trained_context_dynamic_ntk_equals_mlx_lm() -> None:
    rope = ntk(traditional=False)
    x = keys(TRAINED)
    assert_close(rotated(rope, x), PLAIN_NTK(rope, x))


def test_positions_are_a_range_or_one_column_per_row() -> None:
    positions = mx.array([4, 9])
    assert mlx_lm_patches._positions_of_rows(3, 5).tolist() == [3, 4]
    assert mlx_lm_patches._positions_of_rows(positions, positions + 1).tolist() == [[4], [9]]
    assert mlx_lm_patches._positions_to_scale(3, 5).tolist() == [3, 4]
    assert mlx_lm_patches._positions_to_scale(positions, positions + 1).tolist() == [[[4]], [[9]]]


@pytest.mark.parametrize("name", ["olmo", "phi3small"])
def test_a_prompt_in_one_chunk_equals_its_tokens_singly(name: str) -> None:
    """mlx-lm itself fails (olmo), or lets tokens see later ones (phi3small)."""
    config = tiny_config(name)
    model: Any = make_model({**config, "num_hidden_layers": 2, "n_layers": 2})
    mlx_lm_patches.patch(model)
    ids = mx.array([[5, 99, 41, 7, 5, 230]])
    at_once = model(ids, cache=mlx_lm_caches(model))[0]
    caches = mlx_lm_caches(model)
    one_by_one = [model(ids[:, at : at + 1], cache=caches)[0] for at in range(ids.size)]
    assert_close(at_once[:, :VOCAB_SIZE], mx.concatenate(one_by_one)[:, :VOCAB_SIZE])
