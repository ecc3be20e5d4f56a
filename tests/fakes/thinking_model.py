"""A scripted model that thinks long before every answer, with a chat template that leaves thoughts
of earlier turns out.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.fakes.scripted_model import write_scripted

_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
_TOKENS_PER_WORD = 1.55  # of such words, as the model generates them


def words(tokens: int, *, seed: object) -> str:
    """A text of about so many tokens, none of which another such text has."""
    drawn = random.Random(str(seed))
    return " ".join(
        "".join(drawn.choices(_SYLLABLES, k=3)) for _ in range(round(tokens / _TOKENS_PER_WORD))
    )


def write_thinking(
    folder: Path, *, turns: int, thought_tokens: int = 500, answer_tokens: int = 200
) -> Path:
    """Write the model; it answers so many turns."""
    answers = [
        f"<think>\n{words(thought_tokens, seed=('thought', turn))}\n</think>\n\n{words(answer_tokens, seed=('answer', turn))}."
        for turn in range(turns)
    ]
    return write_scripted(folder, answers, drops_thoughts=True)
