"""Walks through a grammar like a model's tokens: along a text, or at random."""

from __future__ import annotations

import json
import random
import re
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

import holdfast.models

DEMO = Path(holdfast.models.__file__).parent / "bundled" / "holdfast-demo"
END = 0  # <|endoftext|> of the bundled tokenizer


@cache
def demo_tokenizer() -> LLTokenizer:
    """The bundled model's: 1,536 tokens, with <think> and <tool_call> as single ones."""
    return LLTokenizer((DEMO / "tokenizer.json").read_text(), eos_token=END)


@cache
def demo_token_ids() -> dict[str, int]:
    """Its added tokens: text → id."""
    return {
        token["content"]: token["id"]
        for token in json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
    }


@cache
def plain_tokenizer() -> LLTokenizer:
    """The same without them, for families whose markers are text."""
    described = json.loads((DEMO / "tokenizer.json").read_text())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    return LLTokenizer(json.dumps(described), eos_token=END, n_vocab=demo_tokenizer().vocab_size)


def matcher_of(grammar: str) -> LLMatcher:
    """A matcher over the bundled tokenizer. The grammar must be valid: an error fails the test.

    Markers are tokens if the grammar names any, otherwise text.
    """
    return _compiled(grammar).deep_copy()


@lru_cache(maxsize=64)
def _compiled(grammar: str) -> LLMatcher:
    tokenizer = demo_tokenizer() if _names_tokens(grammar) else plain_tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is a possible answer.

    Markers in it count as tokens if they are single ones.
    """
    tokenizer = demo_tokenizer() if _names_tokens(grammar) else plain_tokenizer()
    matcher, token_ids = matcher_of(grammar), tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def random_answer(grammar: str, *, seed: int, most: int = 4000) -> str:
    """An answer drawn uniformly from the allowed tokens.

    Fails if it has not ended after this many tokens.
    """
    matcher, draw, token_ids = matcher_of(grammar), random.Random(seed), list[int]()
    while len(token_ids) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed, (matcher.get_error(), text_of(token_ids))
        token_id = draw.choice(allowed)
        if token_id == END:
            return text_of(token_ids)
        token_ids.append(token_id)
        assert matcher.consume_token(token_id), matcher.get_error()
        if matcher.is_stopped():
            return text_of(token_ids)
    raise AssertionError(f"no end after {most} tokens: {text_of(token_ids)[-300:]!r}")


def text_of(token_ids: list[int]) -> str:
    """The text of tokens, markers included."""
    return demo_tokenizer().decode_str(token_ids)


def _names_tokens(grammar: str) -> bool:
    return re.search(r"<\[\d+\]>", grammar) is not None
