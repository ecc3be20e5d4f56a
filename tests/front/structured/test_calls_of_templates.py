"""What a family's own template writes is accepted by the family's grammar, to the end of the turn.

The same is tested with the templates of real models in `tests/slow/test_real_templates.py`.
"""

from __future__ import annotations

import pytest

from holdfast.front.prompt.dialects import find_dialect
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.template_answers import CHOICES, grammar_of, pairs, refusal, written

# The template writes no text before a call as the model does it: in a message of its own.
_NOT_WRITTEN = {("gpt_oss", "a text and a call")}


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_a_model_may_write_what_its_template_writes_to_the_end_of_the_turn(name: str) -> None:
    family = FAMILY_TEMPLATES[name]
    tokenizer = family.tokenizer()
    found = find_dialect(family.template(), tokenizer, config={})
    tried = []
    for answer, choice in pairs():
        as_written = written(found, answer)
        if as_written is None or (name, answer) in _NOT_WRITTEN:
            continue
        grammar = grammar_of(found.dialect, as_written, CHOICES[choice])
        fault = refusal(tokenizer, found.dialect, grammar, as_written.text)
        assert not fault, (answer, choice, fault)
        tried.append(answer)
    assert "one call" in tried or found.report.calls_kept is False
