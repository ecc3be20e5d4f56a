"""Decoder layers whose decode steps take few operations compute what mlx-lm's layers compute."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from holdfast.config import ModelSettings
from holdfast.kernels.build import SWITCH
from holdfast.kernels.packed_products import MOST_ROWS
from holdfast.machine import platform
from holdfast.worker.engine import fused_layers
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.fast_on_cpu import Rotations, step
from holdfast.worker.engine.load import load_model
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.engine.views import RowsView, StepContext
from holdfast.worker.kv.full import FullKV
from tests.fakes.interleaving import assert_as_alone, play, random_sequences
from tests.fakes.live_state import open_sequences
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny, write_tiny

pytestmark = pytest.mark.skipif(bool(fused_layers.unavailable()), reason=fused_layers.unavailable())
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# models with every part that a layer may have: (name, changes of the configuration)
MODELS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_traditional": True}),
    ("llama", {"rope_scaling": LLAMA3_ROPE}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def one_token_each(
    block: Any, x: mx.array, layers: list[FullKV], offset: mx.array, rotations: Rotations
) -> mx.array:
    """What a layer returns in a decode step of several sequences. Lazy."""
    view = RowsView(
        layers, tokens=[1] * len(layers), offset=rotations.share(offset), context=StepContext()
    )
    result: mx.array = block(x, None, view)
    return result


@pytest.mark.parametrize("rows", [1, 2, 7, MOST_ROWS])
@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_a_layer_computes_what_mlx_lm_defines(
    name: str, changes: dict[str, Any], rows: int, tmp_path: Path
) -> None:
    plain: Any = make_tiny(name, **changes)
    model: Any = make_tiny(name, **changes)
    assert fused_layers.fuse(model, mx.float32) == len(model.layers)
    rotations = Rotations()
    states = [[FullKV() for _ in range(rows)] for _ in range(2)]
    rng = random.Random(rows)
    starts = [rng.choice([0, 3, 60, 70_000]) for _ in range(rows)]
    for number in range(4):
        x = mx.random.normal((rows, 1, model.args.hidden_size), key=mx.random.key(number))
        with step(rotations):
            expected, found = (
                one_token_each(each.layers[0], x, layers, mx.array(starts) + number, rotations)
                for each, layers in zip((plain, model), states, strict=True)
            )
        assert found.shape == expected.shape
        if rows == 1:
            assert operations(found, tmp_path) < 0.6 * operations(expected, tmp_path)
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-4)


def operations(array: mx.array, folder: Path) -> int:
    """The number of operations in the graph of what is not computed yet."""
    file = folder / "graph.dot"
    mx.export_to_dot(str(file), array)
    return len(re.findall(r'\[label ="\w+', file.read_text()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "quantization", [None, *slow({"group_size": 32, "bits": 8}, {"group_size": 64, "bits": 4})]
)
@pytest.mark.parametrize("kv_bits", ["native", *slow("8", "4")])
def test_each_sequence_draws_what_it_draws_alone(
    name: str, quantization: dict[str, int] | None, kv_bits: Any, tmp_path: Path
) -> None:
    write_tiny(tmp_path, name, quantization)
    loaded = load_model(tmp_path, ModelSettings(), progress=lambda *_: None)
    assert fused_count(loaded.model) == len(loaded.model.layers)
    rng = random.Random(f"{name} fused")
    runner = choose_layout(loaded.model, vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    runner.learn_form(engine.measure_costs().form)
    sequences = random_sequences(rng, vocab_size=VOCAB_SIZE, count=6, longest_prompt=40)
    play(engine, sequences, rng, depth=0, kv_bits=kv_bits)
    for each in sequences:  # mlx-lm's caches: as mlx-lm defines the layers
        assert_as_alone(loaded.model, each, tolerance=2e-3 if kv_bits == "native" else 0.5)
    assert open_sequences(engine) == 0


def fused_count(model: Any) -> int:
    return sum(hasattr(each, "_parts") for each in model.modules())


def test_a_bad_number_reaches_its_own_row_only() -> None:
    model: Any = make_tiny("qwen3")
    fused_layers.fuse(model, mx.float32)
    rotations = Rotations()
    for bad in (float("nan"), float("inf")):
        x = mx.random.normal((3, 1, model.args.hidden_size))
        x[1, 0, 5] = bad
        with step(rotations):
            states = [FullKV() for _ in range(3)]
            found = one_token_each(model.layers[0], x, states, mx.array([4, 5, 6]), rotations)
        assert not mx.isfinite(found[1]).any()
        assert mx.isfinite(found[0]).all() and mx.isfinite(found[2]).all()


def test_models_that_are_built_otherwise_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gemma3_text", "qwen3_moe", "gpt_oss"):
        assert fused_layers.fuse(make_tiny(name), mx.float32) == 0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert fused_layers.fuse(make_tiny("llama", rope_scaling=yarn), mx.float32) == 0
    model = make_tiny("llama")
    assert fused_layers.fuse(model, mx.bfloat16) == 0
    monkeypatch.setenv(SWITCH, "products,few_rows")
    assert fused_layers.fuse(model, mx.float32) == 0
    monkeypatch.delenv(SWITCH)
    assert fused_layers.fuse(model, mx.float32) == len(model.layers)


def test_on_a_gpu_no_layer_is_fused_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, products do not go through the shim: a stand-in would be read as a matrix."""
    write_tiny(tmp_path, "llama")
    plain = platform.report()
    monkeypatch.setattr(platform, "report", lambda: replace(plain, device="gpu"))
    loaded = load_model(tmp_path, ModelSettings(), progress=lambda *_: None)
    assert fused_count(loaded.model) == loaded.kept_layers == 0


def test_layers_that_disagree_with_mlx_lm_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_tiny("llama")
    plain = fused_layers._rope_forms
    monkeypatch.setattr(
        fused_layers,
        "_rope_forms",
        lambda ropes: [form._replace(base=form.base * 2) for form in plain(ropes) or ()],
    )
    assert fused_layers.fuse(model, mx.float32) == 0
    assert fused_count(model) == 0
