"""The three models: their shapes and how long they are trained."""

from __future__ import annotations

from dataclasses import dataclass

from mixture import DRILL_UNTIL
from network import Shape
from tokenizer import VOCABULARY


@dataclass(frozen=True)
class Recipe:
    """A model and its training."""

    name: str
    shape: Shape
    million_tokens: float
    drill_million: float
    """Tokens of the first stage, the drill."""
    seed: int
    batch_tokens: int = 6144
    """Tokens of one forward pass."""
    passes: int = 2
    """Passes of one step."""
    muon_rate: float = 0.02
    adam_rate: float = 0.004

    def done(self, tokens: int) -> float:
        """The share of the training that is done: the drill counts as its fixed share, however long it is."""
        millions = tokens / 1e6
        if millions < self.drill_million:
            return DRILL_UNTIL * millions / self.drill_million
        return DRILL_UNTIL + (1 - DRILL_UNTIL) * (millions - self.drill_million) / (self.million_tokens - self.drill_million)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("holdfast-demo", Shape("qwen3", 192, 6, 4, 2, 512, VOCABULARY), million_tokens=24.0, drill_million=3.12, seed=11),
        Recipe(
            "holdfast-demo-draft", Shape("qwen3", 128, 3, 2, 1, 320, VOCABULARY), million_tokens=11.5, drill_million=2.4, seed=12
        ),
        Recipe(
            "holdfast-demo-window",
            Shape("gemma3_text", 192, 6, 4, 2, 512, VOCABULARY, window=128, pattern=3),
            million_tokens=5.6,
            drill_million=1.8,
            seed=13,
        ),
    )
}
