"""The graph of a decode step as on a GPU."""

from __future__ import annotations

from functools import cache

import mlx.nn as nn
import pytest

from tests.fakes.graph_operations import VOCABULARY, decode_steps, generate_step
from tests.fakes.slow import slow
from tests.fakes.tiny_models import make_tiny

LAYERS = 2


@cache
def model_of(layers: int) -> nn.Module:
    return make_tiny("qwen3", num_hidden_layers=layers, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("streams", "turn"), [(1, 3), (3, 2), *slow((1, 1), (1, 2), (3, 1), (3, 3))]
)
def test_plain_decode_steps_do_not_join_keys_and_values(streams: int, turn: int) -> None:
    # The keys of all rows are joined to their values for one write, and the results of attention
    # are joined for the next product.
    of_rows = 0 if streams == 1 else 2 * LAYERS
    steps = decode_steps(model_of(LAYERS), streams=streams, turn=turn)
    assert [step.gpu_concatenations for step in steps[1:]] == [of_rows] * (len(steps) - 1)
    joins_token_ids = int(streams > 1)  # drawn by each of them in a separate step
    assert steps[0].gpu_concatenations == of_rows + joins_token_ids


def test_joining_several_parts_is_counted() -> None:
    steps = decode_steps(model_of(LAYERS), streams=1, turn=2, shares=True)
    assert [step.gpu_concatenations for step in steps] == [LAYERS] * len(steps)


def test_a_single_streams_decode_step_has_mlx_lms_operation_count() -> None:
    model = model_of(8)
    ours, theirs = decode_steps(model, streams=1, turn=2)[-1], generate_step(model)
    assert ours.gpu_nodes <= 1.05 * theirs.gpu_nodes
    assert ours.gpu_kernels <= 1.05 * theirs.gpu_kernels


@pytest.mark.parametrize("streams", [2, *slow(4)])
def test_another_stream_adds_three_kernels_per_layer(streams: int) -> None:
    def kernels_of_a_layer(streams: int) -> int:
        few, many = (decode_steps(model_of(layers), streams=streams)[-1] for layers in (2, 3))
        return many.gpu_kernels - few.gpu_kernels

    assert kernels_of_a_layer(streams + 1) - kernels_of_a_layer(streams) == 3
