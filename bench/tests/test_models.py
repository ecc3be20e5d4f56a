"""Tests of the benchmark models, and of models converted to GGUF."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from holdfast.errors import HoldfastError
from holdfast.models.download import demo_folder
from holdfast_bench.gguf_maker import make_gguf, with_neighbours_as_pairs
from holdfast_bench.model_maker import make_endless
from holdfast_bench.models import MODEL_NAMES, ensure_model
from tests.fakes.tiny_models import write_tiny

NEEDS_GGUF = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="needs the benchmarks' extra llama-cpp"
)


def test_a_model_is_a_folder_or_a_known_name(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "mine", "llama")
    assert ensure_model(str(folder)).folder == folder
    assert ensure_model(str(folder)).name == "mine"
    with pytest.raises(HoldfastError, match="neither a model folder nor one of"):
        ensure_model(str(tmp_path))
    assert {"qwen3-30m", "holdfast-demo", "holdfast-demo-endless"} <= set(MODEL_NAMES)


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


@NEEDS_GGUF
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


@NEEDS_GGUF
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


@NEEDS_GGUF
def test_models_of_other_architectures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="only Llama and Qwen3 models"):
        make_gguf(write_tiny(tmp_path / "tiny", "gemma3_text"), tmp_path / "m.gguf")
