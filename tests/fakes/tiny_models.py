"""Tiny random models of real mlx-lm architectures: in memory, or written as a folder that a real
server can load.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from holdfast.worker.engine import backend, mlx_lm_hooks
from holdfast.worker.loop.device import backend_of_device
from tests.fakes.tiny_configs import CONTEXT_TOKENS, TINY, VOCAB_SIZE

__all__ = [
    "TINY",
    "VOCAB_SIZE",
    "kept_tiny",
    "make_model",
    "make_tiny",
    "well_scaled",
    "write_model",
    "write_tiny",
    "write_tokenizer",
]

backend.use(backend_of_device())  # they are computed as a worker on this device does

# ids 256 to 263
_SPECIALS = (
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|pad|>",
    "<|start|>",
    "<|spare|>",
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# Added to a random value. Decays near 1 (A = -exp(-3), …), so that a recurrent state remembers more
# than a few tokens.
_CENTRES = {
    "A_log": -3.0,
    "rg_lru.recurrent_param": -5.0,
    "w_lora.lora.2.bias": -3.0,
    "g_norm.weight": 1.0,
    "attn.k_k": 1.0,
}


def well_scaled(path: str, parameter: mx.array) -> mx.array:
    """Random values of a size at which every part of the model affects the logits: attention,
    gates, sinks, biases, norms.
    """
    if parameter.dtype == mx.uint32 and path.endswith(".weight"):  # packed codes
        return mx.random.randint(0, 1 << 31, parameter.shape).astype(mx.uint32)
    if not mx.issubdtype(parameter.dtype, mx.floating) or path.endswith(".signs"):
        return parameter
    for ending, centre in _CENTRES.items():
        if path.endswith(ending):
            return centre + 0.1 * mx.random.normal(parameter.shape)
    if parameter.ndim < 2:
        return parameter + 0.1 * mx.random.normal(parameter.shape)
    fan_in = parameter.shape[-1] if parameter.shape[-1] > 1 else math.prod(parameter.shape[1:])
    return mx.random.normal(parameter.shape) * fan_in**-0.5


def make_tiny(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random fp32 model of the architecture `name` (a key of TINY).

    The same name, seed and changes give the same weights.
    """
    return make_model({**TINY[name], **changes}, seed)


def make_model(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A random fp32 model with this configuration, which must have a `model_type`."""
    model_class, arguments = mlx_lm_hooks.mlx_lm_utils()._get_classes(config=dict(config))
    mx.random.seed(seed)
    # a copy: some models change their configuration
    model: nn.Module = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    model.update(
        tree_unflatten(
            [(path, well_scaled(path, value)) for path, value in tree_flatten(model.parameters())]
        )
    )
    mx.eval(model.parameters())
    model.eval()
    return model


@cache
def kept_tiny(name: str) -> nn.Module:
    """`make_tiny(name)`, built once per test session. For tests that only read the model."""
    return make_tiny(name)


def write_tiny(
    folder: Path,
    name: str,
    quantize: dict[str, Any] | None = None,
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a model folder that any server can load, and return it; `quantize` like {"group_size":
    32, "bits": 4}.
    """
    return write_model(folder, {**TINY[name], **(changes or {})}, quantize, dtype=dtype, seed=seed)


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    quantize: dict[str, Any] | None = None,
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
) -> Path:
    """Write a random model with this configuration as a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _files_of_model(json.dumps(dict(config)), json.dumps(quantize), dtype, seed)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


@cache
def _files_of_model(
    config_json: str, quantize_json: str, dtype: mx.Dtype, seed: int
) -> dict[str, bytes]:
    config, quantize = json.loads(config_json), json.loads(quantize_json)
    model = make_model(config, seed)
    model.set_dtype(dtype)
    config |= {"eos_token_id": VOCAB_SIZE - len(_SPECIALS)}
    if quantize:
        group_size = quantize["group_size"]

        def fits(_: str, module: nn.Module) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

        nn.quantize(model, class_predicate=fits, **quantize)
        config |= {"quantization": quantize, "quantization_config": quantize}
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        mx.save_safetensors(
            str(folder / "model.safetensors"),
            dict(tree_flatten(model.parameters())),
            metadata={"format": "mlx"},
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        write_tokenizer(folder)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_tokenizer(
    folder: Path,
    special_tokens: Sequence[str] = _SPECIALS,
    *,
    merges: Sequence[tuple[str, str]] = (),
    template: str = _TEMPLATE,
    **settings: Any,
) -> None:
    """A tokenizer with one token per byte, then those of `merges` and special ones, and a chat
    template.

    merges: pairs of tokens, as byte-level tokenizers write them, that make one token.
    settings: more of tokenizer_config.json. Unless they say otherwise, the first special token
        ends answers.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    for place, (left, right) in enumerate(merges):
        vocabulary[left + right] = 256 + place
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    first = len(vocabulary)
    special = [{"id": first + i, "content": text, **plain} for i, text in enumerate(special_tokens)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [*merges]},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens[0],
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **settings,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte: itself if printable,
    else one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, shifted = [], 0
    for byte in range(256):
        characters.append(chr(byte) if byte in printable else chr(0x100 + shifted))
        shifted += byte not in printable
    return characters
