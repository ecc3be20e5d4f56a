"""Write a bundled model from a checkpoint: `python export.py holdfast-demo WORK_FOLDER
OUTPUT_FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from conversation import TEMPLATE_FILE
from network import Shape
from recipes import BUNDLED, RECIPES, Recipe
from safetensors.torch import load_file, save_file

CONTEXT = 32768
EOS, PAD = 2, 0


def config_of(shape: Shape) -> dict[str, Any]:
    """The `config.json` of a network."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM" if shape.is_gemma else "Qwen3ForCausalLM"],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "vocab_size": shape.vocab,
        "max_position_embeddings": CONTEXT,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }
    if shape.is_gemma:
        return config | {
            "rope_local_base_freq": shape.rope_local,
            "query_pre_attn_scalar": shape.head_dim,
            "sliding_window": shape.window,
            "sliding_window_pattern": shape.pattern,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [
                "sliding_attention" if shape.is_sliding(layer) else "full_attention"
                for layer in range(shape.layers)
            ],
        }
    return config | {"hidden_act": "silu"}


def tokenizer_config() -> dict[str, Any]:
    """The `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE_FILE.read_text(),
    }


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a bundled model as its network in PyTorch names them, in float32: what
    `export` wrote, read back.
    """
    tensors = load_file(str(folder / "model.safetensors"))
    return {key.removeprefix("model."): value.float() for key, value in tensors.items()}


def blended(recipe: Recipe, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights, or for a continued training the mean of them and those that it began
    with, by the recipe's share.
    """
    if recipe.blend == 1.0:
        return trained
    first = exported_weights(BUNDLED / recipe.begins_with)
    # as both would be exported alone
    rounded = {key: value.bfloat16().float() for key, value in trained.items()}
    return {
        key: recipe.blend * value + (1 - recipe.blend) * first[key]
        for key, value in rounded.items()
    }


def export(name: str, work: Path, output: Path) -> None:
    """Weights in bfloat16, and all files that a server reads beside them."""
    output.mkdir(parents=True, exist_ok=True)
    weights = blended(
        RECIPES[name], torch.load(work / "checkpoint.pt", map_location="cpu")["network"]
    )
    tensors = {
        f"model.{key}": value.to(torch.bfloat16).contiguous() for key, value in weights.items()
    }
    save_file(tensors, str(output / "model.safetensors"), metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)
    documents = {
        "config.json": config_of(RECIPES[name].shape),
        "tokenizer_config.json": tokenizer_config(),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [EOS, PAD],
            "pad_token_id": PAD,
        },
    }
    for file_name, document in documents.items():
        (output / file_name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    shutil.copyfile(work / "tokenizer.json", output / "tokenizer.json")
    shutil.copyfile(TEMPLATE_FILE, output / "chat_template.jinja")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("work", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    export(arguments.model, arguments.work, arguments.output)


if __name__ == "__main__":
    main()
