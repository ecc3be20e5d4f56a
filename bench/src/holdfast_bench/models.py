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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.models.download import DEMO_ID, DEMO_IDS, demo_folder

VERSION = 1  # a new version makes the models again
CONTEXT_TOKENS = 32768
LONG_CONTEXT_TOKENS = 131072
PEERS_CONTEXT_TOKENS = 8192  # llama.cpp reserves KV for the whole context
ENDLESS = "-endless"
_LONGEST_MAKING_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model folder that any server can load."""

    name: str
    folder: Path

    @property
    def is_endless(self) -> bool:
        """Whether requests ask it to ignore its end token."""
        return self.name.endswith(ENDLESS)


def _config(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    vocabulary: int = 8192,
    context_tokens: int = CONTEXT_TOKENS,
    **more: Any,
) -> dict[str, Any]:
    """The configuration of a random model. kind: mlx-lm's model type."""
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "intermediate_size": intermediate,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": False,
        **more,
    }


_RECURRENT: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LONG = LONG_CONTEXT_TOKENS
CONFIGS = {
    "qwen3-9m": _config("qwen3", 256, 6, 4, 2, 768),
    "qwen3-30m": _config("qwen3", 512, 7, 8, 4, 1536),
    "qwen3-120m": _config("qwen3", 768, 14, 12, 4, 2304, vocabulary=16384),
    "llama-95m": _config("llama", 768, 12, 12, 4, 2304, context_tokens=PEERS_CONTEXT_TOKENS),
    "qwen3-long": _config("qwen3", 128, 2, 2, 1, 256, context_tokens=_LONG),
    "qwen3_next-long": _config("qwen3_next", 128, 4, 2, 1, 256, context_tokens=_LONG, **_RECURRENT),
}
WIDE_DEMO = f"{DEMO_ID}-120m"
MODEL_NAMES = (*CONFIGS, *DEMO_IDS, WIDE_DEMO, DEMO_ID + ENDLESS)


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
        return _made("endless", original.name + ENDLESS, original.folder)
    if name in DEMO_IDS:
        return BenchModel(name=name, folder=demo_folder(name))
    if name == WIDE_DEMO:
        return _made("wide", name, demo_folder(DEMO_ID))
    if name in CONFIGS:
        return _made("random", name)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise HoldfastError(
            f"{name} is neither a model folder nor one of: {', '.join(MODEL_NAMES)}"
        )
    return BenchModel(name=folder.name, folder=folder.resolve())


def _made(how: str, name: str, original: Path | None = None) -> BenchModel:
    """The model in its folder, which is made if it is missing or older than the original."""
    folder = cache_folder() / f"{name}-v{VERSION}"
    if not _is_current(folder, original):
        shutil.rmtree(folder, ignore_errors=True)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        _run_maker("model_maker", how, str(original or name), str(partial))
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return BenchModel(name=name, folder=folder)


def ensure_gguf(model: Path) -> Path:
    """The model as a GGUF file, made if it is missing or outdated.

    Raises HoldfastError if GGUF cannot represent the model.
    """
    model = model.resolve()
    digest = hashlib.blake2s(str(model).encode(), digest_size=4).hexdigest()
    file = cache_folder() / f"{model.name}-{digest}-v{VERSION}.gguf"
    if not _is_current(file, model):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial.gguf")
        _run_maker("gguf_maker", str(model), str(partial))
        partial.replace(file)
    return file


def _is_current(made: Path, original: Path | None) -> bool:
    """Whether it exists and is not older than the original."""
    if not made.exists() or original is None:
        return made.exists()
    return made.stat().st_mtime >= (original / "config.json").stat().st_mtime


def _run_maker(module: str, *arguments: str) -> None:
    """Run a maker in another process, which imports MLX. Raises HoldfastError."""
    command = [sys.executable, "-m", f"holdfast_bench.{module}", *arguments]
    done = subprocess.run(
        command, capture_output=True, timeout=_LONGEST_MAKING_SECONDS, check=False
    )
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[-500:]
        raise HoldfastError(f"cannot make the model {Path(arguments[-1]).name}: {reason}")
