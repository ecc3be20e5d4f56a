"""Makes benchmark models in another process: `python -m holdfast_bench.model_maker random NAME
FOLDER`.

Imports MLX.

Weights are scaled so that every part of the model affects the logits and greedy decoding does not
loop: attention is sharp (large query norms), and the output matrix is separate. Its rows for tokens
that are not whole words are zero, so such a token is never the likeliest: answers do not end early,
and characters are not split.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from holdfast.worker.engine import mlx_lm_hooks
from holdfast_bench.models import CONFIGS, CONTEXT_TOKENS
from holdfast_bench.prompts import text_of, words

_SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_TRAINING_WORDS = 60_000
_SHARP_QUERIES = 3.0
_NOT_COPIED = ("generation_config.json", "README.md")
_WIDE = {
    "hidden_size": 768,
    "num_hidden_layers": 17,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2304,
}
# With decays near 1, a recurrent state remembers more than a few tokens.
_CENTRES = {"A_log": -3.0, "q_norm.weight": _SHARP_QUERIES}


def make_model(name: str, folder: Path) -> None:
    """Write the model `name` into `folder`."""
    mlx_lm_hooks.prepare()
    config, vocabulary = CONFIGS[name], CONFIGS[name]["vocab_size"]
    folder.mkdir(parents=True)
    tokenizer = _write_tokenizer(folder, vocabulary)
    config = {**config, "eos_token_id": tokenizer.token_to_id(_SPECIALS[0])}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: list[tuple[str, mx.array]] = list(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    weights = {path: _well_scaled(path, value) for path, value in parameters}
    weights["lm_head.weight"] *= _drawable(tokenizer, vocabulary)[:, None]
    _write_weights(weights, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def make_endless(original: Path, folder: Path) -> None:
    """Copy a model into `folder`, in float32, with an end token that it never generates."""
    _write_weights(_copied_in_float32(original, folder), folder)
    token, token_id = _last_added_token(folder)
    _change(folder / "config.json", {"eos_token_id": token_id, "torch_dtype": "float32"})
    _change(folder / "tokenizer_config.json", {"eos_token": token})


def make_wide(original: Path, folder: Path) -> None:
    """Copy a Qwen3 model into `folder`, in float32, with the shape `_WIDE` and the same answers.

    All added weights are zeros, except those of added layers, whose outputs are multiplied by
    zeros. Zeros in the hidden states divide their mean square by a number, which must be a square;
    the norms' weights compensate for its root.
    """
    weights = _copied_in_float32(original, folder)
    config = json.loads((folder / "config.json").read_text())
    widened = math.isqrt(_WIDE["hidden_size"] // config["hidden_size"])
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    wide_group = _WIDE["num_attention_heads"] // _WIDE["num_key_value_heads"]
    rows = {
        "q_proj": _WIDE["num_attention_heads"] * config["head_dim"],
        "k_proj": _WIDE["num_key_value_heads"] * config["head_dim"],
        "v_proj": _WIDE["num_key_value_heads"] * config["head_dim"],
        "gate_proj": _WIDE["intermediate_size"],
        "up_proj": _WIDE["intermediate_size"],
    }
    wide: dict[str, mx.array] = {}
    for name, value in weights.items():
        part = name.split(".")[-2]
        if part in ("q_norm", "k_norm"):
            wide[name] = value
        elif value.ndim == 1:
            wide[name] = _padded(value / widened, (_WIDE["hidden_size"],))
        elif part == "embed_tokens":
            wide[name] = _padded(value, (value.shape[0], _WIDE["hidden_size"]))
        elif part == "down_proj":
            wide[name] = _padded(value, (_WIDE["hidden_size"], _WIDE["intermediate_size"]))
        elif part == "o_proj":
            heads = _regrouped(value.T, config["head_dim"], group, wide_group).T
            wide[name] = _padded(heads, (_WIDE["hidden_size"], rows["q_proj"]))
        else:
            if part == "q_proj":
                value = _regrouped(value, config["head_dim"], group, wide_group)
            wide[name] = _padded(value, (rows[part], _WIDE["hidden_size"]))
    mx.random.seed(0)
    first = "model.layers.0."
    for layer in range(config["num_hidden_layers"], _WIDE["num_hidden_layers"]):
        for name in [name for name in wide if name.startswith(first)]:
            like = wide[name]
            added = mx.zeros(like.shape)
            if like.ndim == 1:
                added = mx.ones(like.shape)
            elif not name.endswith(("o_proj.weight", "down_proj.weight")):
                added = mx.random.normal(like.shape) * like.shape[1] ** -0.5
            wide[name.replace(first, f"model.layers.{layer}.")] = added
    _write_weights(wide, folder)
    epsilon = config["rms_norm_eps"] / widened**2
    _change(folder / "config.json", {**_WIDE, "rms_norm_eps": epsilon, "torch_dtype": "float32"})


def _regrouped(heads: mx.array, dimension: int, group: int, wide_group: int) -> mx.array:
    """Insert zero heads after the query heads of each group. heads: [heads * dimension, any]."""
    by_group = heads.reshape(-1, group * dimension, heads.shape[1])
    shape = (by_group.shape[0], wide_group * dimension, heads.shape[1])
    return _padded(by_group, shape).reshape(-1, heads.shape[1])


def _padded(value: mx.array, shape: tuple[int, ...]) -> mx.array:
    missing = [(0, wanted - size) for size, wanted in zip(value.shape, shape, strict=True)]
    return mx.pad(value, missing)


def _copied_in_float32(original: Path, folder: Path) -> dict[str, mx.array]:
    """Copy a model's files into a new folder, except the weights; returns these in float32."""
    folder.mkdir(parents=True)
    for file in original.iterdir():
        is_copied = file.suffix != ".safetensors" and file.name not in _NOT_COPIED
        if file.is_file() and is_copied:
            shutil.copyfile(file, folder / file.name)
    weights: dict[str, mx.array] = {}
    for file in original.glob("*.safetensors"):
        loaded: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        weights |= loaded
    return {
        name: value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
        for name, value in weights.items()
    }


def _write_weights(weights: dict[str, mx.array], folder: Path) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _change(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def _last_added_token(folder: Path) -> tuple[str, int]:
    """The last added token, which is the least used one: end-of-turn tokens come first."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    last = max(added, key=lambda token: int(token["id"]))
    return last["content"], last["id"]


def _well_scaled(path: str, parameter: mx.array) -> mx.array:
    for ending, centre in _CENTRES.items():
        if path.endswith(ending):
            return centre + 0.1 * mx.random.normal(parameter.shape)
    if parameter.ndim < 2:
        return parameter + 0.1 * mx.random.normal(parameter.shape)
    fan_in = parameter.shape[-1] if parameter.shape[-1] > 1 else math.prod(parameter.shape[1:])
    scaled: mx.array = mx.random.normal(parameter.shape) * fan_in**-0.5
    return scaled


def _drawable(tokenizer: Tokenizer, vocabulary: int) -> mx.array:
    """1 for each token that is a space and a whole word and encodes to itself; 0 for others."""
    wanted = [0.0] * vocabulary
    for word in words():
        ids = tokenizer.encode(f" {word}", add_special_tokens=False).ids
        if len(ids) == 1:
            wanted[ids[0]] = 1.0
    return mx.array(wanted)


def _write_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    """Byte-level BPE over the lexicon, with special tokens and a chat template."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in _SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        text_of(_TRAINING_WORDS, seed="tokenizer"),
        " ".join(words()),
        " ".join(reversed(words())),
    ]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIALS[0],
        "pad_token": _SPECIALS[2],
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer


if __name__ == "__main__":
    kind, what, where = sys.argv[1:]
    if kind == "random":
        make_model(what, Path(where))
    else:
        {"endless": make_endless, "wide": make_wide}[kind](Path(what), Path(where))
    mx.clear_streams()
