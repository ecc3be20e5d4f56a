"""The last training of each bundled model: its data and its rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import mixtures
from mixtures import Drawn


@dataclass(frozen=True)
class Recipe:
    """A training that continues from the bundled weights of the model `name`."""

    name: str
    conversation_at: Callable[[Random, float], Drawn]
    """Makes a conversation; the second argument is the completed share of the training."""
    longest_at: Callable[[float], int]
    """The longest conversation, in tokens, at this share of the training."""
    million_tokens: float
    seed: int
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    warm_up: float = 0.03
    """The share of the training in which the learning rate rises; afterwards it falls."""
    batch_tokens: int = 4096
    """Tokens per forward pass."""
    passes: int = 2
    """Forward passes per step."""
    other_weight: float = 0.05
    """Loss weight of tokens that the model does not write itself."""
    blend: float = 1.0
    """Share of the trained weights in the exported ones; the rest are the initial weights."""


RECIPES = {
    "holdfast-demo": Recipe(
        "holdfast-demo",
        mixtures.evened_at,
        mixtures.longest_evened,
        million_tokens=4.0,
        seed=111,
        muon_rate=0.006,
        adam_rate=0.0012,
        warm_up=0.05,
        blend=0.7,
    ),
    "holdfast-demo-draft": Recipe(
        "holdfast-demo-draft",
        mixtures.written_at,
        mixtures.longest_written,
        million_tokens=2.5,
        seed=92,
    ),
}
