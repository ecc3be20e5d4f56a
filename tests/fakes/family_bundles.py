"""A model of each family as it is served: its template, its tokenizer, and what was found of them."""

from __future__ import annotations

from holdfast.front.prompt.dialects import find_dialect
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from tests.fakes.family_templates import FamilyTemplate


def bundle(family: FamilyTemplate) -> TokenizerBundle:
    """With nothing known yet of earlier answers."""
    tokenizer = family.tokenizer()
    found = find_dialect(family.template(), tokenizer, config={})
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
