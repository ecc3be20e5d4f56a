"""Random LoRA adapters in mlx-lm's format, and the models that mlx-lm itself loads with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from holdfast.models.adapter_folder import checked_adapters
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.lora import attach
from holdfast.worker.engine.probe import choose_layout, choose_mixing
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

RANK = 4
SCALE = 4.0
_LEAVES = ("lora_a", "lora_b", "m")


def write_adapter(
    folder: Path,
    model: nn.Module,
    /,
    *,
    seed: int,
    kind: str = "lora",
    keys: Sequence[str] | None = None,
    num_layers: int | None = None,
    rank: int = RANK,
    scale: float = SCALE,
    **more: Any,
) -> Path:
    """Write an adapter with random weights for a model, and return its folder.

    The model is changed: it gets mlx-lm's own adapter layers. keys: paths of the layers to adapt;
    None: mlx-lm's default. scale: how much the adapter changes; the default suits tiny models with
    random weights. more: further keys of the configuration.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    folder.mkdir(parents=True)
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    layers = len(model.layers) if num_layers is None else num_layers
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters, **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {
        path: _random(path, array)
        for path, array in tree_flatten(model.parameters())
        if path.rsplit(".", 1)[-1] in _LEAVES
    }
    assert weights, "no layer was adapted"
    for key in keys or ():
        assert any(f"{key}.lora_a" in path for path in weights), f"{key} was not adapted"
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def _random(path: str, array: mx.array) -> mx.array:
    """Values that affect the logits as much as the layers themselves."""
    if path.endswith(".m"):
        return array * (1.0 + 0.2 * mx.random.normal(array.shape))
    return mx.random.normal(array.shape) * (0.5 / max(array.shape)) ** 0.5


def write_tiny_adapter(folder: Path, name: str, *, seed: int, **how: Any) -> Path:
    """Like `write_adapter`, for the tiny model `name`."""
    return write_adapter(folder, make_tiny(name), seed=seed, **how)


def adapted_by_mlx_lm(model: nn.Module, folder: Path) -> nn.Module:
    """Let mlx-lm load an adapter into a model, which is changed."""
    from mlx_lm.tuner.utils import load_adapters

    load_adapters(model, str(folder))
    model.eval()
    return model


def adapted_runner(name: str, folders: Mapping[str, Path]) -> Runner:
    """A tiny model with adapters in the layout that the probe chooses, as a worker loads it."""
    model = make_tiny(name)
    listed = [f"{adapter}={folder}" for adapter, folder in folders.items()]
    adapters = attach(model, checked_adapters(listed), compute_dtype=mx.float32)
    runner = choose_layout(model, vocab_size=VOCAB_SIZE)
    runner.adapters = adapters
    choose_mixing(runner, vocab_size=VOCAB_SIZE)
    return runner
