"""Tests of the benchmark models."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.model_maker import make_endless
from holdfast_bench.models import MODEL_NAMES, SHAPES, ensure_model
from tests.fakes.tiny_models import write_tiny


def test_a_model_is_a_folder_or_a_known_name(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "mine", "llama")
    assert ensure_model(str(folder)).folder == folder
    assert ensure_model(str(folder)).name == "mine"
    with pytest.raises(HoldfastError, match="neither a model folder nor one of"):
        ensure_model(str(tmp_path))
    assert {
        "qwen3-30m",
        "qwen3-30m-4bit",
        "holdfast-demo",
        "holdfast-demo-endless",
    } <= set(MODEL_NAMES)


def test_shapes_fit_the_group_size_of_quantization() -> None:
    for shape in SHAPES.values():
        assert shape.config["hidden_size"] % 64 == 0
        assert shape.config["num_attention_heads"] % shape.config["num_key_value_heads"] == 0


def test_an_endless_copy_has_another_end_token_and_float32_weights(tmp_path: Path) -> None:
    original = write_tiny(tmp_path / "mine", "qwen3", dtype=mx.bfloat16)
    make_endless(original, tmp_path / "copy")
    before, after = (
        dict(mx.load(str(folder / "model.safetensors"))) for folder in (original, tmp_path / "copy")
    )
    assert before.keys() == after.keys()
    assert all(value.dtype == mx.float32 for value in after.values())
    assert all(mx.array_equal(before[name].astype(mx.float32), after[name]) for name in before)
    ends = [
        json.loads((folder / "config.json").read_text())["eos_token_id"]
        for folder in (original, tmp_path / "copy")
    ]
    assert ends[0] != ends[1]
