"""The models that are measured: random weights in real shapes, made on the spot and kept, and the bundled one.

How fast a model runs does not depend on what it knows. Those made here need no download, end no answer early (the token that
ends answers can not be drawn) and draw whole words, so that texts can be compared token by token.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.models.demo import demo_folder

VERSION = 1  # of the recipe; another one makes the models anew
CONTEXT_TOKENS = 32768
FOUR_BIT = "-4bit"
ENDLESS = "-endless"
_LONGEST_MAKING_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a benchmark model is made from."""

    model_type: str
    vocabulary: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model folder that any server can load."""

    name: str
    folder: Path


def _plain(hidden: int, layers: int, *, heads: int, kv_heads: int, head: int, intermediate: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": intermediate,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
    }


def _experts(count: int, *, per_token: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


_DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
}
SHAPES = {
    "qwen3-9m": Shape(model_type="qwen3", vocabulary=8192, config=_plain(256, 6, heads=4, kv_heads=2, head=64, intermediate=768)),
    "qwen3-30m": Shape(
        model_type="qwen3", vocabulary=8192, config=_plain(512, 7, heads=8, kv_heads=4, head=64, intermediate=1536)
    ),
    "qwen3-120m": Shape(
        model_type="qwen3", vocabulary=16384, config=_plain(768, 14, heads=12, kv_heads=4, head=64, intermediate=2304)
    ),
    "gemma3-60m": Shape(
        model_type="gemma3_text",
        vocabulary=16384,
        config={
            **_plain(512, 12, heads=4, kv_heads=1, head=128, intermediate=2048),
            "query_pre_attn_scalar": 128,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "qwen3_next-60m": Shape(
        model_type="qwen3_next",
        vocabulary=8192,
        config={
            **_plain(512, 8, heads=8, kv_heads=2, head=64, intermediate=1024),
            **_DELTA,
            **_experts(12, per_token=2, intermediate=256),
        },
    ),
    "moe-100m": Shape(
        model_type="qwen3_moe",
        vocabulary=8192,
        config={
            **_plain(512, 8, heads=8, kv_heads=4, head=64, intermediate=1536),
            **_experts(16, per_token=2, intermediate=448),
        },
    ),
}
DEMO = "holdfast-demo"
MODEL_NAMES = (*(name + bits for name in SHAPES for bits in ("", FOUR_BIT)), DEMO, DEMO + ENDLESS)


def cache_folder() -> Path:
    """Where made models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "holdfast" / "bench"


def ensure_model(name: str) -> BenchModel:
    """The model of this name, made if it is not there yet; or any model folder by its path. Raises HoldfastError.

    `…-endless` after the name or path of a model that has learnt to end its answers: the same weights with another end token,
    for scenarios that need answers of a given length.
    """
    if name.endswith(ENDLESS):
        return _endless(ensure_model(name.removesuffix(ENDLESS)))
    if name == DEMO:
        folder = demo_folder(DEMO)
        if folder is None:
            raise HoldfastError(f"the bundled model {DEMO} is not in this installation")
        return BenchModel(name=name, folder=folder)
    if name.removesuffix(FOUR_BIT) in SHAPES:
        return _made(name)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise HoldfastError(f"{name} is neither a model folder nor one of: {', '.join(MODEL_NAMES)}")
    return BenchModel(name=folder.name, folder=folder.resolve())


def _made(name: str) -> BenchModel:
    folder = cache_folder() / f"{name}-v{VERSION}"
    if not (folder / "config.json").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        command = [sys.executable, "-m", "holdfast.bench.model_maker", name, str(partial)]
        done = subprocess.run(command, capture_output=True, timeout=_LONGEST_MAKING_SECONDS, check=False)
        if done.returncode != 0:
            raise HoldfastError(f"the model {name} could not be made: {done.stderr.decode(errors='replace').strip()[-500:]}")
        _put_in_place(partial, folder)
    return BenchModel(name=name, folder=folder)


def _endless(model: BenchModel) -> BenchModel:
    folder = cache_folder() / f"{model.name}{ENDLESS}-v{VERSION}"
    if folder.exists() and not _is_older(folder, model.folder):
        return BenchModel(name=model.name + ENDLESS, folder=folder)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    for file in model.folder.iterdir():
        if file.is_file() and file.name != "generation_config.json":
            shutil.copyfile(file, partial / file.name)
    token, token_id = _unused_token(partial)
    for file_name, change in (("config.json", {"eos_token_id": token_id}), ("tokenizer_config.json", {"eos_token": token})):
        content = json.loads((partial / file_name).read_text())
        (partial / file_name).write_text(json.dumps({**content, **change}))
    if folder.exists():
        shutil.rmtree(folder)
    _put_in_place(partial, folder)
    return BenchModel(name=model.name + ENDLESS, folder=folder)


def _is_older(copy: Path, original: Path) -> bool:
    file = "model.safetensors"
    return (copy / file).stat().st_mtime < (original / file).stat().st_mtime


def _unused_token(folder: Path) -> tuple[str, int]:
    """A special token that the model practically never draws: not the one that ends its turns."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ending = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
    ending = ending["content"] if isinstance(ending, dict) else ending
    special = [token for token in added if token.get("special") and token["content"] != ending]
    if not special:
        raise HoldfastError(f"{folder} has no special token besides the one that ends answers")
    padding = [token for token in special if "endoftext" in token["content"] or "pad" in token["content"]]
    token = (padding or special)[0]
    return token["content"], token["id"]


def _put_in_place(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
