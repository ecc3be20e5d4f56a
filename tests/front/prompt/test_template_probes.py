"""Which templates render past answers differently from the generated text."""

from __future__ import annotations

import pytest

from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.template_probes import rewritten_turns
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect, ReasoningFormat
from holdfast.models.download import demo_folder
from tests.fakes.thinking_bundle import TEMPLATE

THINKING = ModelDialect(family="hermes", reasoning=ReasoningFormat(start="<think>", end="</think>"))


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={})


def test_thoughts_dropped_before_a_question_rewrite_user_turns() -> None:
    assert rewritten_turns(template(TEMPLATE), THINKING, options={}) == {"user"}


def test_thoughts_that_are_always_dropped() -> None:
    source = TEMPLATE.replace("m.reasoning_content and", "false and")
    assert rewritten_turns(template(source), THINKING, options={}) == {"user", "results"}


def test_thoughts_that_are_kept() -> None:
    source = TEMPLATE.replace(" and loop.index0 > ns.last", "")
    assert rewritten_turns(template(source), THINKING, options={}) == set()


def test_thoughts_that_an_option_keeps() -> None:
    source = TEMPLATE.replace("loop.index0 > ns.last", "(keep or loop.index0 > ns.last)")
    assert rewritten_turns(template(source), THINKING, options={}) == {"user"}
    assert rewritten_turns(template(source), THINKING, options={"keep": True}) == set()


def test_a_generation_prompt_unlike_the_history_rewrites_all_turns() -> None:
    source = TEMPLATE.replace(
        "{%- if add_generation_prompt %}", "{%- if add_generation_prompt %}{{ '\\n' }}"
    )
    assert rewritten_turns(template(source), PLAIN, options={}) == {"user", "results"}


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[0].content }}"])
def test_templates_that_fail_the_probe_are_left_alone(
    source: str,
) -> None:
    assert rewritten_turns(template(source), THINKING, options={}) == set()


def test_without_a_template_turns_are_not_rewritten() -> None:
    assert rewritten_turns(None, THINKING, options={}) == set()


def test_the_bundled_model_shows_thoughts_that_are_sent() -> None:
    assert rewritten_turns(load_template(demo_folder()), THINKING, options={}) == set()
