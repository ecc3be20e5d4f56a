"""A model of each family as served: its template, its tokenizer, and their detected properties."""

from __future__ import annotations

from functools import cache

from holdfast.front.prompt.dialects import FoundDialect, find_dialect
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from tests.fakes.family_templates import FamilyTemplate


def bundle(family: FamilyTemplate) -> TokenizerBundle:
    """Without known past answers."""
    tokenizer, found = _found(family)
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        answer_frame=frame_of(found.template, tokenizer, found.dialect),
        generation_defaults={},
        known_answers=KnownAnswers(),
        dialect=found.dialect,
        dialect_report=found.report,
        thinking_switch=found.switch,
    )


@cache
def _found(family: FamilyTemplate) -> tuple[Tokenizer, FoundDialect]:
    """Both are immutable, and take a tenth of a second to make."""
    tokenizer = family.tokenizer()
    return tokenizer, find_dialect(family.template(), tokenizer, config={})
