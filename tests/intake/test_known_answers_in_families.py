"""Families of models: the next turn of an agent begins with all that was read and written."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from holdfast.intake.dialects import find_dialect
from holdfast.intake.known_answers import KnownAnswers
from holdfast.intake.tokenizer_bundle import TokenizerBundle, frame_of
from tests.fakes.agent_turns import QUESTION, spoken, turn
from tests.fakes.family_templates import FAMILY_TEMPLATES


@cache
def bundle_of(name: str) -> TokenizerBundle:
    family = FAMILY_TEMPLATES[name]
    tokenizer = family.tokenizer()
    found = find_dialect(family.template(), tokenizer, config={})
    return TokenizerBundle(
        tokenizer=tokenizer,
        template=found.template,
        answer_frame=frame_of(found.template, tokenizer, found.dialect),
        generation_defaults={},
        context_tokens=100_000,
        known_answers=KnownAnswers(),
        dialect=found.dialect,
    )


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_the_next_turn_of_each_family_begins_with_all_that_was_read_and_written(name: str, keeps_thoughts: bool) -> None:
    bundle, choose = bundle_of(name), random.Random(3)
    messages: list[dict[str, Any]] = [QUESTION]
    for number in range(1, 4):
        before, said = turn(bundle, messages, spoken(bundle, messages, number), choose, keeps_thoughts=keeps_thoughts)
        messages += said
        after, _ = turn(bundle, messages, "", choose)
        assert after[: len(before)] == before
