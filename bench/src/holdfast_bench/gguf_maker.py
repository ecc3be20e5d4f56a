"""Converts a Llama or Qwen3 model to GGUF, for llama.cpp: `python -m holdfast_bench.gguf_maker
MODEL_FOLDER FILE`.

Imports MLX; needs the package `gguf`. Weights are written in float32, which the other servers use
on a CPU. Tokenizer and chat template are those of the model. A model that GGUF cannot describe
exactly is rejected: other tokens would be other work.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from holdfast.errors import HoldfastError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types of GGUF


_KINDS = ("llama", "qwen3")


def make_gguf(model: Path, file: Path) -> None:
    """Convert the model in a folder to one GGUF file. Raises HoldfastError unless it is a Llama or
    Qwen3 model that is not quantized.
    """
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in _KINDS or "quantization" in config or config.get("rope_scaling"):
        raise HoldfastError(
            f"{model.name} cannot be written as GGUF here: only Llama and Qwen3 models that are not "
            "quantized can"
        )
    library = importlib.import_module("gguf")
    writer = library.GGUFWriter(file, kind)
    names = library.get_tensor_name_map(
        library.MODEL_ARCH[kind.upper()], config["num_hidden_layers"]
    )
    _add_shape(writer, config)
    _add_tokens(writer, model, config)
    for part in model.glob("*.safetensors"):
        loaded: dict[str, mx.array] = mx.load(str(part))  # type: ignore[assignment]
        for name, value in loaded.items():
            weight = np.array(value.astype(mx.float32))
            if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = with_neighbours_as_pairs(weight, head_dim=_head_dim(config))
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_neighbours_as_pairs(weight: np.ndarray, *, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head, because llama.cpp rotates neighbouring elements of Llama
    models, not elements of the two halves.

    weight: [heads * head_dim, inputs].
    """
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _head_dim(config: dict[str, Any]) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    head_dim = _head_dim(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _add_tokens(writer: Any, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = model / "chat_template.jinja"
    size = config["vocab_size"]
    texts, types = [f"[unused {number}]" for number in range(size)], [_UNUSED] * size
    for text, number in tokenizer["model"]["vocab"].items():
        texts[number], types[number] = text, _NORMAL
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(tokenizer["pre_tokenizer"]))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        template.read_text() if template.exists() else settings["chat_template"]
    )


def _splitting(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for a pre-tokenizer. Raises HoldfastError if it is unknown."""
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
    raise HoldfastError(f"llama.cpp has no name for a tokenizer that splits by {found}")


if __name__ == "__main__":
    make_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    mx.clear_streams()
