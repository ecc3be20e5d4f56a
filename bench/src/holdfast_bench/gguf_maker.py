"""Writes a model of Qwen3's kind as GGUF, for llama.cpp: `python -m holdfast_bench.gguf_maker
MODEL_FOLDER FILE`. Imports MLX.

The weights are written in float32, which is what the other servers compute in on a CPU; the
tokenizer and the chat template are the model's own. What this cannot say exactly in GGUF is
refused: a peer that reads other tokens would be measured at something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from holdfast.errors import HoldfastError

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_A_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens in GGUF


def make_gguf(model: Path, file: Path) -> None:
    """Write the model folder as one file. Raises HoldfastError for models of other kinds."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3" or "quantization" in config:
        raise HoldfastError(
            f"{model.name} cannot be written as GGUF here: only Qwen3 models that are not "
            "quantized can"
        )
    weights: dict[str, mx.array] = {}
    for part in model.glob("*.safetensors"):
        loaded: dict[str, mx.array] = mx.load(str(part))  # type: ignore[assignment]
        weights |= {_gguf_name(name): value.astype(mx.float32) for name, value in loaded.items()}
    mx.save_gguf(str(file), weights, {**_shape(config), **_tokens(model, config)})


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_OF_A_LAYER[part]}.weight"


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    counts = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
    }
    fractions = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
    return {
        "general.architecture": "qwen3",
        **{
            f"qwen3.{name}": mx.array(config[field], dtype=mx.uint32)
            for name, field in counts.items()
        },
        **{
            f"qwen3.{name}": mx.array(config[field], dtype=mx.float32)
            for name, field in fractions.items()
        },
    }


def _tokens(model: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = model / "chat_template.jinja"
    size = config["vocab_size"]
    texts, types = [f"[unused {number}]" for number in range(size)], [_UNUSED] * size
    for text, number in tokenizer["model"]["vocab"].items():
        texts[number], types[number] = text, _NORMAL
    for token in tokenizer["added_tokens"]:
        texts[token["id"]], types[token["id"]] = (
            token["content"],
            _CONTROL if token["special"] else _USER_DEFINED,
        )
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(tokenizer["pre_tokenizer"]),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": mx.array(types, dtype=mx.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": mx.array(config["eos_token_id"], dtype=mx.uint32),
        "tokenizer.ggml.add_bos_token": mx.array(False),
        "tokenizer.chat_template": template.read_text()
        if template.exists()
        else settings["chat_template"],
    }


def _splitting(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for how text is cut before its pairs are merged.

    Raises HoldfastError for ways that have none here.
    """
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    found = [
        (part["type"], part.get("pattern", {}).get("Regex", ""), part.get("behavior", ""))
        for part in parts
    ]
    match found:
        case [("ByteLevel", _, _)]:
            return "gpt-2"
        case [("Split", "\\d", "Isolated"), ("ByteLevel", _, _)]:
            return "smollm"
    raise HoldfastError(f"llama.cpp has no name for a tokenizer that cuts by {found}")


if __name__ == "__main__":
    make_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    mx.clear_streams()
