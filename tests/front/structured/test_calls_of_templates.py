"""A family's grammar accepts its own template's output up to the end of the turn.

The same is tested with the templates of real models in `tests/slow/test_real_templates.py`.
"""

from __future__ import annotations

import pytest

from holdfast.front.toolcalls.call_format import Call
from tests.fakes.family_bundles import found_in
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.template_answers import (
    CHOICES,
    WrittenAnswer,
    grammar_of,
    pairs,
    refusal,
    written,
)

# Unlike the model, the template does not put text before a call into a separate message.
_NOT_WRITTEN = {("gpt_oss", "a text and a call")}


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_templates_output_is_allowed_to_the_turns_end(name: str) -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    tried = []
    for answer, choice in pairs():
        as_written = written(found, answer)
        if as_written is None or (name, answer) in _NOT_WRITTEN:
            continue
        grammar = grammar_of(found.dialect, as_written, CHOICES[choice])
        fault = refusal(tokenizer, found.dialect, grammar, as_written.text, by_masks=True)
        assert not fault, (answer, choice, fault)
        tried.append(answer)
    assert "one call" in tried or found.report.calls_kept is False


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_after_a_call_and_a_new_line_the_answer_can_end(name: str) -> None:
    """Models also write the line break that separates two calls after the last call."""
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    form = found.dialect.calls
    assert form is not None
    call_id = {"alnum9": "abc123XYZ", "number": "0"}.get(form.id_form, "")
    call = Call("find_places", {"query": "Rome"}, call_id)
    text = form.grammar_layouts[0].write([call], form.id_form)
    asked = WrittenAnswer(prompt="", text="", in_reasoning=False)
    for choice in CHOICES.values():
        grammar = grammar_of(found.dialect, asked, choice)
        for space in ("", "\n", "\n\n"):
            assert not refusal(tokenizer, found.dialect, grammar, text + space)


@pytest.mark.parametrize("name", ["qwen3", "mistral_v13", "cohere"])
def test_arguments_may_be_indented_as_in_a_list_of_calls(name: str) -> None:
    """As Command R+ writes them: four spaces per level, two of which are the list and the call."""
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    form = found.dialect.calls
    assert form is not None
    call_id = {"alnum9": "abc123XYZ", "number": "0"}.get(form.id_form, "")
    text = form.grammar_layouts[0].write(
        [Call("find_places", {"query": "Rome"}, call_id)], form.id_form
    )
    indented = text.replace('{"query": "Rome"}', '{\n            "query": "Rome"\n        }')
    assert indented != text
    asked = WrittenAnswer(prompt="", text="", in_reasoning=False)
    grammar = grammar_of(found.dialect, asked, CHOICES["required"])
    assert not refusal(tokenizer, found.dialect, grammar, indented)
