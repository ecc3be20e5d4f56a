"""Random words for the prompts and the tokenizer of the benchmark models."""

from __future__ import annotations

import random
from functools import cache

WORDS = 6000
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sp st str t th tr v w z".split()
_VOWELS = "a e i o u ai ea ee oa ou".split()
_ENDS = ["", "", "", "l", "m", "n", "nd", "ng", "r", "rk", "s", "st", "t"]


@cache
def words() -> tuple[str, ...]:
    """All words, without repetition and always the same."""
    source = random.Random(5)
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = source.choice((1, 2, 2, 2, 3))
        found[
            "".join(source.choice(_ONSETS) + source.choice(_VOWELS) for _ in range(syllables))
            + source.choice(_ENDS)
        ] = None
    return tuple(found)


def text_of(count: int, *, seed: str) -> str:
    """`count` random words in sentences. Equal seeds give equal texts; others differ from the first
    words on.
    """
    source = random.Random(seed)
    sentences: list[str] = []
    left = count
    while left > 0:
        length = min(left, source.randint(6, 14))
        sentences.append(" ".join(source.choices(words(), k=length)) + ".")
        left -= length
    return " ".join(sentences)
