"""Makes random prompts of a given length from a seed, so that no cache contains them."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from holdfast_bench.lexicon import text_of

_TOKENS_PER_WORD = 1.6  # an estimate, for servers with an unknown tokenizer
_SAMPLE_WORDS = 200


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
        """The tokens of the text; without a tokenizer, words and punctuation."""
        if self._tokenizer is None:
            return re.findall(r"\w+|\W", text)
        # not all servers show control tokens
        for mark in self._marks:
            text = text.replace(mark, "")
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)


def _marks_of(tokenizer: Tokenizer) -> list[str]:
    return [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content
    ]
