"""The models to measure: the bundled one, and random weights in real shapes, made on demand and
cached.

Speed does not depend on training. Random models need no download, never end an answer early (their
end token cannot be generated) and generate whole words, so answers can be compared token by token.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.models.download import DEMO_ID, DEMO_IDS, demo_folder

VERSION = 1  # a new version makes the models again
CONTEXT_TOKENS = 32768
LONG_CONTEXT_TOKENS = 131072
PEERS_CONTEXT_TOKENS = 8192  # llama.cpp reserves KV for the whole context
FOUR_BIT = "-4bit"
ENDLESS = "-endless"
_LONGEST_MAKING_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a random model."""

    model_type: str
    vocabulary: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model folder that any server can load."""

    name: str
    folder: Path

    @property
    def is_endless(self) -> bool:
        """Whether requests ask it to ignore its end token."""
        return self.name.endswith(ENDLESS)


def _plain(
    hidden: int,
    layers: int,
    *,
    heads: int,
    kv_heads: int,
    head: int,
    intermediate: int,
    context_tokens: int = CONTEXT_TOKENS,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": intermediate,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": context_tokens,
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
    "qwen3-9m": Shape(
        model_type="qwen3",
        vocabulary=8192,
        config=_plain(256, 6, heads=4, kv_heads=2, head=64, intermediate=768),
    ),
    "qwen3-30m": Shape(
        model_type="qwen3",
        vocabulary=8192,
        config=_plain(512, 7, heads=8, kv_heads=4, head=64, intermediate=1536),
    ),
    "qwen3-120m": Shape(
        model_type="qwen3",
        vocabulary=16384,
        config=_plain(768, 14, heads=12, kv_heads=4, head=64, intermediate=2304),
    ),
    "llama-6m": Shape(
        model_type="llama",
        vocabulary=8192,
        config=_plain(
            256,
            2,
            heads=4,
            kv_heads=2,
            head=64,
            intermediate=768,
            context_tokens=PEERS_CONTEXT_TOKENS,
        ),
    ),
    "llama-95m": Shape(
        model_type="llama",
        vocabulary=8192,
        config=_plain(
            768,
            12,
            heads=12,
            kv_heads=4,
            head=64,
            intermediate=2304,
            context_tokens=PEERS_CONTEXT_TOKENS,
        ),
    ),
    "qwen3-long": Shape(
        model_type="qwen3",
        vocabulary=8192,
        config=_plain(
            128,
            2,
            heads=2,
            kv_heads=1,
            head=64,
            intermediate=256,
            context_tokens=LONG_CONTEXT_TOKENS,
        ),
    ),
    "qwen3_next-long": Shape(
        model_type="qwen3_next",
        vocabulary=8192,
        config={
            **_plain(
                128,
                4,
                heads=2,
                kv_heads=1,
                head=64,
                intermediate=256,
                context_tokens=LONG_CONTEXT_TOKENS,
            ),
            **_DELTA,
            **_experts(4, per_token=2, intermediate=64),
        },
    ),
}
WIDE_DEMO = f"{DEMO_ID}-120m"
MODEL_NAMES = (
    *(name + bits for name in SHAPES for bits in ("", FOUR_BIT)),
    *DEMO_IDS,
    WIDE_DEMO,
    DEMO_ID + ENDLESS,
)


def cache_folder() -> Path:
    """The folder of cached models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "holdfast" / "bench"


def ensure_model(name: str) -> BenchModel:
    """The benchmark model with this name, or the model in this folder; made on demand.

    Raises HoldfastError.

    `…-endless` after a name or path: a copy of a trained model with another end token, for
    scenarios that need answers of a given length. Its weights are float32, in which Holdfast
    computes on a CPU, so that answers of peers can be compared. `ignore_eos` tells servers that
    detect the end of a turn from the chat template to continue.

    `holdfast-demo-120m` gives the answers of the bundled model at the cost of 120M parameters: the
    added weights are zeros or do not affect the output.
    """
    if name.endswith(ENDLESS):
        original = ensure_model(name.removesuffix(ENDLESS))
        return _copied("endless", original.folder, name=original.name + ENDLESS)
    if name in DEMO_IDS:
        return BenchModel(name=name, folder=demo_folder(name))
    if name == WIDE_DEMO:
        return _copied("wide", demo_folder(DEMO_ID), name=name)
    if name.removesuffix(FOUR_BIT) in SHAPES:
        return _made(name)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise HoldfastError(
            f"{name} is neither a model folder nor one of: {', '.join(MODEL_NAMES)}"
        )
    return BenchModel(name=folder.name, folder=folder.resolve())


def _made(name: str) -> BenchModel:
    folder = cache_folder() / f"{name}-v{VERSION}"
    if not (folder / "config.json").exists():
        _make(folder, ["random", name])
    return BenchModel(name=name, folder=folder)


def _copied(how: str, original: Path, *, name: str) -> BenchModel:
    folder = cache_folder() / f"{name}-v{VERSION}"
    if folder.exists() and _is_older(folder, original):
        shutil.rmtree(folder)
    if not folder.exists():
        _make(folder, [how, str(original)])
    return BenchModel(name=name, folder=folder)


def ensure_gguf(model: Path) -> Path:
    """The model as a GGUF file, made if it is missing or outdated.

    Raises HoldfastError if GGUF cannot represent the model.
    """
    model = model.resolve()
    digest = hashlib.blake2s(str(model).encode(), digest_size=4).hexdigest()
    file = cache_folder() / f"{model.name}-{digest}-v{VERSION}.gguf"
    if not file.exists() or file.stat().st_mtime < (model / "config.json").stat().st_mtime:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial.gguf")
        _run_maker("holdfast_bench.gguf_maker", [str(model), str(partial)], what=file.name)
        partial.replace(file)
    return file


def _is_older(copy: Path, original: Path) -> bool:
    file = "config.json"
    return (copy / file).stat().st_mtime < (original / file).stat().st_mtime


def _make(folder: Path, arguments: list[str]) -> None:
    """Make the folder atomically in another process, which imports MLX. Raises HoldfastError."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    _run_maker("holdfast_bench.model_maker", [*arguments, str(partial)], what=folder.name)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def _run_maker(module: str, arguments: list[str], *, what: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, timeout=_LONGEST_MAKING_SECONDS, check=False
    )
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[-500:]
        raise HoldfastError(f"cannot make the model {what}: {reason}")
