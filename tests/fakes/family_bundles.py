"""A model of each family as served: its template, its tokenizer, and their detected properties."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from holdfast.front.prompt.dialects import FoundDialect, find_dialect
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle, frame_of
from tests.fakes.family_templates import FAMILY_TEMPLATES, FamilyTemplate

# one family of each kind of habits with tools that chat templates have, and two more syntaxes
OF_EACH_HABIT = (
    "cohere deepseek_v32 gigachat gpt_oss granite3_drops kimi_k2 lfm2_drops mistral_v13 qwen3 solar"
).split()


@cache
def found_in(family: FamilyTemplate) -> tuple[FoundDialect, Tokenizer]:
    """Both are immutable, and take a tenth of a second to make."""
    tokenizer = family.tokenizer()
    return find_dialect(family.template(), tokenizer, config={}), tokenizer


@cache
def bundle_of(name: str) -> TokenizerBundle:
    """Without known past answers. All tests share it, so that none may add one."""
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
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


def bundle(name: str) -> TokenizerBundle:
    """The same bundle with a new, empty memory of answers."""
    return replace(bundle_of(name), known_answers=KnownAnswers())
