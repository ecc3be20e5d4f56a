"""Draft models for tests: noisy copies of the tiny models, so that some of their drafts are right,
and a gain that always uses them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from holdfast.models.download import demo_folder
from holdfast.worker.drafting import draft_model as draft_models
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.drafting.suffix import MOST_DRAFTED
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.loop import sequences
from holdfast.worker.scheduler import scheduler
from holdfast.worker.scheduler.draft_gain import Offers
from tests.fakes.forced_drafts import EagerGain
from tests.fakes.tiny_configs import CONTEXT_TOKENS
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

# of tiny models that draft for themselves: half of the drafted tokens or more are right
_NOISE = {"llama": 0.1, "gpt_oss": 0.05, "gemma3_text": 0.01, "qwen3_next": 0.01}
_USUAL_NOISE = 0.02
_WARM_UP_TOKENS = 40  # a prefill, and the first pass of a draft


@cache
def noisy_runner(name: str, noise: float, head_dimensions: int | None = None) -> Runner:
    """The tiny model `name` with random changes of its weights of size `noise`."""
    model = make_tiny(name, **({} if head_dimensions is None else {"head_dim": head_dimensions}))
    mx.random.seed(7)
    changed = [
        (path, value + noise * mx.abs(value).mean() * mx.random.normal(value.shape))
        for path, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(changed))
    mx.eval(model.parameters())
    return choose_layout(model, vocab_size=VOCAB_SIZE)


def draft_model(
    name: str = "llama",
    *,
    noise: float | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    most_cached_bytes: int = 1 << 30,
    engine: type[Engine] = Engine,
    head_dimensions: int | None = None,
) -> DraftModel:
    """A draft model for the tiny model `name`. Without noise, all greedy drafts are right."""
    if noise is None:
        noise = _NOISE.get(name, _USUAL_NOISE)
    runner = noisy_runner(name, noise, head_dimensions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_models, "_WARM_UP_TOKENS", _WARM_UP_TOKENS)
        return DraftModel(
            engine(runner, vocab_size=VOCAB_SIZE),
            name=f"noisy {name}",
            vocab_size=VOCAB_SIZE,
            context_tokens=context_tokens,
            most_cached_bytes=most_cached_bytes,
        )


def ask_always(monkeypatch: pytest.MonkeyPatch, *, seed: str) -> None:
    """Make workers use their draft model whether profitable or not, for drafts of random lengths,
    and verify all drafts.
    """
    rng = random.Random(seed)

    class AskingGain(EagerGain):
        def passes(
            self,
            offers: Offers,
            modelled: Offers,
            *,
            rows: int,
            most: int,
            pass_seconds: float,
        ) -> int:
            return rng.randrange(MOST_DRAFTED + 1) if modelled else 0

        def approve_prefill(
            self,
            chances: Sequence[float],
            *,
            rows: int,
            pass_seconds: float,
            seconds: float,
            generated: int,
        ) -> bool:
            return True

    monkeypatch.setattr(scheduler, "DraftGain", AskingGain)
    monkeypatch.setattr(sequences, "LEAST_GENERATED", 1)


def write_larger_demo(folder: Path, *, more_layers: int = 24) -> Path:
    """Write the bundled model with additional layers that change nothing: its answers are the same,
    but a step takes several times as long, so that a draft model is profitable.
    """
    shutil.copytree(demo_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    for name, value in list(weights.items()):
        if name.startswith("model.layers.0."):
            adds_nothing = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(layers, layers + more_layers):
                copy = name.replace(".0.", f".{layer}.", 1)
                weights[copy] = mx.zeros_like(value) if adds_nothing else value
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config["num_hidden_layers"] = layers + more_layers
    (folder / "config.json").write_text(json.dumps(config))
    return folder
