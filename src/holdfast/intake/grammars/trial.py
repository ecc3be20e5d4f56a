"""A grammar is tried before a request is accepted: built, and asked once what may come first, within bounds. Any thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Fuel is what llguidance counts its work in. A grammar that needs more makes every token of its answer slow; those of agents'
# tools need less than a tenth. What is refused by these bounds is refused after 5 to 40 ms of one core.
TRIAL_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class _Bytes:
    """A tokenizer of bytes: what a grammar allows does not depend on how a model cuts its text into tokens."""

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [*(bytes([value]) for value in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Token n is the byte n, 256 the end."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def fault_of(grammar: str) -> str:
    """What is wrong with a grammar; empty: nothing. The interpreter is not held up meanwhile."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=TRIAL_LIMITS)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            return "it allows nothing"
    return matcher.get_error()
