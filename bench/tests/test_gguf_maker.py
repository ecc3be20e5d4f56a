"""Tests of models converted to GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from holdfast.errors import HoldfastError
from holdfast.models.download import demo_folder
from holdfast_bench.gguf_maker import make_gguf, with_neighbours_as_pairs
from holdfast_bench.model_maker import make_model
from tests.fakes.tiny_models import write_tiny

pytest.importorskip("gguf", reason="needs the benchmarks' extra llama-cpp")


def test_the_file_contains_the_bundled_models_weights_and_tokens(tmp_path: Path) -> None:
    model = demo_folder()
    make_gguf(model, tmp_path / "m.gguf")
    written, told = mx.load(str(tmp_path / "m.gguf"), return_metadata=True)
    original = mx.load(str(next(model.glob("*.safetensors"))))
    assert len(written) == len(original)
    for ours, theirs in (
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert mx.array_equal(written[theirs], original[ours].astype(mx.float32))
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    texts = told["tokenizer.ggml.tokens"]
    assert all(texts[number] == text for text, number in vocabulary.items())
    assert told["tokenizer.ggml.pre"] == "smollm"


def test_rotating_neighbours_gives_the_scores_of_rotating_halves() -> None:
    source = np.random.default_rng(0)
    queries, keys = (source.normal(size=(2 * 8, 12)).astype(np.float32) for _ in range(2))
    inputs = mx.array(source.normal(size=(5, 12)).astype(np.float32))

    def scores(left: np.ndarray, right: np.ndarray, *, neighbours: bool) -> mx.array:
        rotated = [
            mx.fast.rope(
                (inputs @ mx.array(weight).T).reshape(5, 2, 8).swapaxes(0, 1)[None],
                8,
                traditional=neighbours,
                base=1e4,
                scale=1.0,
                offset=3,
            )
            for weight in (left, right)
        ]
        return rotated[0] @ rotated[1].swapaxes(-1, -2)

    pairs = [with_neighbours_as_pairs(weight, head_dim=8) for weight in (queries, keys)]
    expected = scores(queries, keys, neighbours=False)
    assert mx.allclose(scores(*pairs, neighbours=True), expected, atol=1e-4)
    assert not mx.allclose(scores(queries, keys, neighbours=True), expected, atol=1e-1)


def test_a_4_bit_model_keeps_its_size_and_nearly_its_weights(tmp_path: Path) -> None:
    model = tmp_path / "llama-6m-4bit"
    make_model(model.name, model)
    make_gguf(model, tmp_path / "m.gguf")
    sizes = [file.stat().st_size for file in (tmp_path / "m.gguf", model / "model.safetensors")]
    assert sizes[0] < sizes[1] + 400_000  # the tokenizer is in the file too
    written, original = (
        mx.load(str(file)) for file in (tmp_path / "m.gguf", model / "model.safetensors")
    )
    ours, theirs = (
        mx.dequantize(
            weights[f"{name}.weight"],
            weights[f"{name}.scales"],
            weights[f"{name}.biases"],
            group_size=group_size,
            bits=4,
        ).astype(mx.float32)
        for weights, name, group_size in (
            (original, "model.layers.1.mlp.up_proj", 64),
            (written, "blk.1.ffn_up", 32),
        )
    )
    steps = mx.abs(ours.reshape(-1, 32)).max(axis=-1, keepdims=True) / 8
    error = mx.abs(ours - theirs).reshape(-1, 32) / steps
    assert error.max().item() < 1.05  # the largest value of the other sign is out of reach
    assert error.mean().item() < 0.3


def test_models_of_other_architectures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="only Llama and Qwen3 models"):
        make_gguf(write_tiny(tmp_path / "tiny", "gemma3_text"), tmp_path / "m.gguf")
