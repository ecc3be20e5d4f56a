"""Random words and, from a seed, prompts of a given length, so that no cache contains them."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

WORDS = 6000
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sp st str t th tr v w z".split()
_VOWELS = "a e i o u ai ea ee oa ou".split()
_ENDS = ["", "", "", "l", "m", "n", "nd", "ng", "r", "rk", "s", "st", "t"]
_TOKENS_PER_WORD = 1.6  # an estimate, for servers with an unknown tokenizer
_SAMPLE_WORDS = 200


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


class PromptMaker:
    """Makes texts of about `tokens` tokens. Without the model's tokenizer, the length is an
    estimate.

    Figures use the token counts in the servers' usage.
    """

    def __init__(self, folder: Path | None) -> None:
        file = folder / "tokenizer.json" if folder is not None else None
        self._tokenizer = (
            Tokenizer.from_file(str(file)) if file is not None and file.exists() else None
        )
        added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer else {}
        self._marks = [token.content for token in added.values() if token.content]
        sample = text_of(_SAMPLE_WORDS, seed="sample")
        self._tokens_per_word = (
            len(self.tokens(sample)) / _SAMPLE_WORDS if self._tokenizer else _TOKENS_PER_WORD
        )

    def text(self, tokens: int, *, seed: str) -> str:
        """A text of this many tokens."""
        count = max(1, round(tokens / self._tokens_per_word * 1.05) + 4)
        text = text_of(count, seed=seed)
        if self._tokenizer is None:
            return " ".join(text.split()[: max(1, round(tokens / self._tokens_per_word))])
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= tokens:
            return text
        cut = text.rfind(" ", 0, max(1, offsets[tokens][0] + 1))
        return text[:cut] if cut > 0 else text[: offsets[tokens][0]]

    def tokens(self, text: str) -> list[str]:
        """The tokens of the text; without a tokenizer, words and punctuation."""
        if self._tokenizer is None:
            return re.findall(r"\w+|\W", text)
        # not all servers show control tokens
        for mark in self._marks:
            text = text.replace(mark, "")
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)
