"""The three models: their shapes and how long they are trained."""

from __future__ import annotations

from dataclasses import dataclass

from network import Shape
from tokenizer import VOCABULARY


@dataclass(frozen=True)
class Recipe:
    """A model and its training."""

    name: str
    shape: Shape
    million_tokens: float
    seed: int
    batch_tokens: int = 6144
    """Tokens of one forward pass."""
    passes: int = 2
    """Passes of one step."""
    muon_rate: float = 0.02
    adam_rate: float = 0.004


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("holdfast-demo", Shape("qwen3", 192, 6, 4, 2, 512, VOCABULARY), million_tokens=26.0, seed=11),
        Recipe("holdfast-demo-draft", Shape("qwen3", 128, 3, 2, 1, 320, VOCABULARY), million_tokens=20.0, seed=12),
        Recipe(
            "holdfast-demo-window",
            Shape("gemma3_text", 192, 6, 4, 2, 512, VOCABULARY, window=128, pattern=3),
            million_tokens=20.0,
            seed=13,
        ),
    )
}
