"""Encodes conversations with the bundled tokenizer: byte-level BPE, each digit a token."""

from __future__ import annotations

from pathlib import Path

from conversation import Conversation, weighted_parts
from plain_text import PlainText
from tokenizers import Tokenizer

END_OF_TEXT = 0


class Encoder:
    """Encodes conversations with a loss weight for each token."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.vocabulary = self.tokenizer.get_vocab_size()

    def encode(self, conversation: Conversation | PlainText) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the model writes it. It writes all of a raw text."""
        if isinstance(conversation, PlainText):
            ids = [*self.tokenizer.encode(conversation.text).ids, END_OF_TEXT]
            return ids, [True] * len(ids)
        tokens: list[int] = []
        written: list[bool] = []
        for text, own in weighted_parts(conversation):
            ids = self.tokenizer.encode(text).ids
            tokens += ids
            written += [own] * len(ids)
        return tokens, written
