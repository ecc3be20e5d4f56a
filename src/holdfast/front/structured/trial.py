"""A grammar is tried before a request is accepted: built, and led through what it forces, within
bounds. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer


_FIRST, _MARKERS = 257, 64
_TOKEN = re.compile(r"<\[\d+\]>")


class _Bytes:
    """A tokenizer of bytes: what a grammar allows does not depend on how a model cuts its text into
    tokens.
    """

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [
        *(bytes([value]) for value in range(256)),
        *(b"<marker %d>" % number for number in range(_MARKERS + 1)),
    ]
    special_token_ids: Sequence[int] = [*range(256, 257 + _MARKERS)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _trial(times: int) -> tuple[LLTokenizer, LLParserLimits]:
    """Token n is the byte n, 256 the end; behind it are the markers. times: so much more than one
    schema may cost.
    """
    # takes 0.1 s, for whoever constrains something
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    # Fuel is what llguidance counts its work in. A grammar that needs more makes every token of its
    # answer slow; those of agents' tools need less than a tenth. What is refused by these bounds is
    # refused after 5 to 40 ms of one core.
    limits = LLParserLimits(
        initial_lexer_fuel=100_000 * times,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000 * times,
        max_grammar_size=50_000 * times,
        verbose_errors=False,
    )
    return LLTokenizer(TokenizerWrapper(_Bytes())), limits


def fault_of(grammar: str) -> str:
    """What is wrong with a grammar; empty: nothing. The interpreter is not held up meanwhile."""
    return _tried(grammar, 1)


def _tried(grammar: str, times: int) -> str:
    from llguidance import LLMatcher

    tokenizer, limits = _trial(times)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            return "it allows nothing"
        if not matcher.is_error():
            # a text that is forced and has no end shows here
            matcher.consume_tokens(matcher.compute_ff_tokens())
    return matcher.get_error()


@lru_cache(maxsize=128)
def fault_of_composed(grammar: str) -> str:
    """The same of a grammar that names tokens of a model.

    Those of agents are kept: they come with every turn.
    """
    numbers: dict[str, int] = {}
    return _tried(
        _TOKEN.sub(
            lambda found: f"<[{numbers.setdefault(found[0], len(numbers) % _MARKERS) + _FIRST}]>",
            grammar,
        ),
        6,
    )
