"""Models written as GGUF, for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.errors import HoldfastError
from holdfast.models.download import demo_folder
from holdfast_bench.gguf_maker import make_gguf
from tests.fakes.tiny_models import write_tiny


def test_all_weights_and_tokens_of_the_bundled_model_are_in_the_file(tmp_path: Path) -> None:
    model = demo_folder()
    make_gguf(model, tmp_path / "m.gguf")
    written, told = mx.load(str(tmp_path / "m.gguf"), return_metadata=True)
    original = mx.load(str(next(model.glob("*.safetensors"))))
    assert len(written) == len(original)
    for ours, theirs in (
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert mx.array_equal(written[theirs], original[ours].astype(mx.float32))
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    texts = told["tokenizer.ggml.tokens"]
    assert all(texts[number] == text for text, number in vocabulary.items())
    assert told["tokenizer.ggml.pre"] == "smollm"


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="only Qwen3 models"):
        make_gguf(write_tiny(tmp_path / "tiny", "llama"), tmp_path / "m.gguf")
