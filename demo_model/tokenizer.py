"""The tokenizer of all three models: byte-level BPE that keeps every byte and splits digits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from conversation import Conversation, render, weighted_parts
from mixture import task
from plain_text import PlainText
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1536
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Added tokens that are text all the same: clients see them."""


def training_texts(count: int = 6000) -> Iterator[str]:
    """Seeded texts to learn the merges from."""
    rng = Random(1)
    for _ in range(count):
        yield render(task(rng, 12))


def train() -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=added,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return tokenizer


class Encoder:
    """Encodes conversations with a loss weight for each token."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.vocabulary = self.tokenizer.get_vocab_size()

    def encode(self, conversation: Conversation | PlainText) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the model writes it itself (of raw text all, and the end
        of text after it).
        """
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


if __name__ == "__main__":
    learned = train()
    learned.save(sys.argv[1])
    settings = json.loads(Path(sys.argv[1]).read_text())
    print(
        "vocabulary",
        learned.get_vocab_size(),
        "added",
        [token["content"] for token in settings["added_tokens"]],
    )
