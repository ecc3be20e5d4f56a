"""Prompts of a wanted length in tokens, made from a seed, so that every contender reads the same
and no cache knows it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from holdfast_bench.lexicon import text_of

_TOKENS_PER_WORD = 1.6  # a guess, for servers whose tokenizer is not at hand
_SAMPLE_WORDS = 200


class PromptMaker:
    """Makes texts of about `tokens` tokens: exact to a word with the model's tokenizer, a guess
    without.

    What a server really read is in its usage; nothing is computed from the wish.
    """

    def __init__(self, folder: Path | None) -> None:
        file = folder / "tokenizer.json" if folder is not None else None
        self._tokenizer = (
            Tokenizer.from_file(str(file)) if file is not None and file.exists() else None
        )
        self._marks = [] if self._tokenizer is None else _marks_of(self._tokenizer)
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
        """The text cut into tokens; into words and marks when there is no tokenizer."""
        if self._tokenizer is None:
            return re.findall(r"\w+|\W", text)
        # ends of turns, calls, thoughts: some servers show them, others do not
        for mark in self._marks:
            text = text.replace(mark, "")
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)


def _marks_of(tokenizer: Tokenizer) -> list[str]:
    return [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content
    ]
