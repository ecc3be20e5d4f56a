"""The three models: their shapes and how long they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import agent_mix
import first_mix
import mixture
import notes_mix
from conversation import Conversation
from network import Shape
from plain_text import PlainText
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
    warm_up: float = 0.01
    """The share of the training in which the learning rate rises."""
    cool_down: float = 0.45
    """The share of the training, its last, in which the learning rate falls."""
    conversation_at: Callable[[Random, float], Conversation | PlainText] = mixture.conversation_at
    longest_at: Callable[[float], int] = mixture.longest_at
    begins_with: str = ""
    """The bundled model that this training goes on from; it keeps that model's tokenizer."""
    other_weight: float = 0.1
    """What a token counts in the loss that the model does not write itself."""
    blend: float = 1.0
    """The share of the trained weights in those that are exported; the rest are the weights that it
    began with.
    """

    def done(self, tokens: int) -> float:
        """The share of the training that is done: the drill counts as its fixed share, however long
        it is.
        """
        millions = tokens / 1e6
        if self.begins_with:
            return millions / self.million_tokens
        if millions < self.drill_million:
            return mixture.DRILL_UNTIL * millions / self.drill_million
        return mixture.DRILL_UNTIL + (1 - mixture.DRILL_UNTIL) * (millions - self.drill_million) / (
            self.million_tokens - self.drill_million
        )


BUNDLED = Path(__file__).resolve().parents[1] / "src" / "holdfast" / "models" / "bundled"
_DEMO = Shape("qwen3", 192, 6, 4, 2, 512, VOCABULARY)
_DRAFT = Shape("qwen3", 128, 3, 2, 1, 320, VOCABULARY)
_WINDOW = Shape("gemma3_text", 192, 6, 4, 2, 512, VOCABULARY, window=128, pattern=3)


def _first_words(
    name: str, shape: Shape, million_tokens: float, seed: int, rate: float = 1.0
) -> Recipe:
    """A continued training that adds first words: a lower rate, warmed again, then straight down."""
    return Recipe(
        f"{name}-first-words",
        shape,
        million_tokens,
        drill_million=0.0,
        seed=seed,
        muon_rate=0.01 * rate,
        adam_rate=0.002 * rate,
        warm_up=0.03,
        cool_down=0.97,
        batch_tokens=4096,
        conversation_at=first_mix.conversation_at,
        longest_at=first_mix.longest_at,
        begins_with=name,
    )


def _agent(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The second continued training, of tools never seen and files: as the first, on another
    mixture.
    """
    first = _first_words(name, shape, million_tokens, seed)
    return replace(
        first, name=f"{name}-agent", conversation_at=agent_mix.conversation_at, blend=0.7
    )


def _json(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The third continued training, short and slow: JSON as the answer, all else replayed."""
    first = _first_words(name, shape, million_tokens, seed, rate=0.3)
    return replace(
        first,
        name=f"{name}-json",
        conversation_at=agent_mix.with_json_at,
        warm_up=0.06,
        cool_down=0.94,
    )


def _forms(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The fourth continued training, shorter and slower still: calls that are forced end."""
    first = _first_words(name, shape, million_tokens, seed, rate=0.2)
    return replace(
        first,
        name=f"{name}-forms",
        conversation_at=agent_mix.with_forms_at,
        warm_up=0.08,
        cool_down=0.92,
    )


def _notes(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The fifth continued training: notes in anybody's words.

    Invented words cannot be foretold, so prompts count less.
    """
    first = _first_words(name, shape, million_tokens, seed)
    return replace(
        first,
        name=f"{name}-notes",
        conversation_at=notes_mix.conversation_at,
        longest_at=notes_mix.longest_at,
        other_weight=0.05,
    )


def _balance(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The sixth, short and slower: tools, sums and small talk are strengthened again beside the
    notes.
    """
    notes = _notes(name, shape, million_tokens, seed)
    return replace(
        notes,
        name=f"{name}-balance",
        conversation_at=notes_mix.balanced_at,
        longest_at=notes_mix.longest_of_all,
        muon_rate=0.004,
        adam_rate=0.0008,
        warm_up=0.05,
        cool_down=0.95,
    )


def _written(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The seventh: frames of notes written by hand, in the place of half of the generated ones."""
    notes = _notes(name, shape, million_tokens, seed)
    return replace(notes, name=f"{name}-written", conversation_at=notes_mix.written_at)


def _settled(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The eighth, short and slower: what the seventh weakened comes back."""
    balance = _balance(name, shape, million_tokens, seed)
    return replace(
        balance,
        name=f"{name}-settled",
        conversation_at=notes_mix.settled_at,
        muon_rate=0.006,
        adam_rate=0.0012,
    )


def _evened(name: str, shape: Shape, million_tokens: float, seed: int) -> Recipe:
    """The ninth, from the best mean after the eighth: raw text and files come back."""
    settled = _settled(name, shape, million_tokens, seed)
    return replace(settled, name=f"{name}-evened", conversation_at=notes_mix.evened_at)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("holdfast-demo", _DEMO, million_tokens=24.0, drill_million=3.12, seed=11),
        Recipe("holdfast-demo-draft", _DRAFT, million_tokens=11.5, drill_million=2.4, seed=12),
        Recipe(
            "holdfast-demo-window",
            _WINDOW,
            million_tokens=5.6,
            drill_million=1.8,
            seed=13,
        ),
        _first_words("holdfast-demo", _DEMO, 13.2, seed=21),
        _first_words("holdfast-demo-draft", _DRAFT, 3.0, seed=22),
        _agent("holdfast-demo", _DEMO, 22.0, seed=31),
        _json("holdfast-demo", _DEMO, 5.0, seed=41),
        _forms("holdfast-demo", _DEMO, 2.5, seed=51),
        _notes("holdfast-demo", _DEMO, 5.8, seed=71),
        _balance("holdfast-demo", _DEMO, 0.8, seed=81),
        _written("holdfast-demo", _DEMO, 8.0, seed=91),
        _settled("holdfast-demo", _DEMO, 4.0, seed=101),
        _evened("holdfast-demo", _DEMO, 4.0, seed=111),
        _written("holdfast-demo-draft", _DRAFT, 2.5, seed=92),
        _written("holdfast-demo-window", _WINDOW, 1.2, seed=93),
    )
}
