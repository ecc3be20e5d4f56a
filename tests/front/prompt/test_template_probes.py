"""Which templates render past answers differently from the generated text."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from holdfast.front.prompt.template import ChatTemplate, load_template
from holdfast.front.prompt.template_probes import ThinkingSwitch, find_switch, rewritten_turns
from holdfast.front.request import Thinking, ThinkingEffort
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
def test_templates_that_fail_the_probe_are_left_alone(source: str) -> None:
    assert rewritten_turns(template(source), THINKING, options={}) == set()


def test_without_a_template_turns_are_not_rewritten() -> None:
    assert rewritten_turns(None, THINKING, options={}) == set()


def test_the_bundled_model_shows_thoughts_that_are_sent() -> None:
    assert rewritten_turns(load_template(demo_folder()), THINKING, options={}) == set()


# Thinking switches are detected by rendering; no unrequested option is sent.

EFFORTS: tuple[ThinkingEffort, ...] = get_args(ThinkingEffort)
BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOGGLE = (
    BODY
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
PRINTED = "effort: {{ reasoning_effort | default('medium') }}" + BODY
WORDS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    "{% if reasoning_effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('unknown') "
    "}}{% endif %}" + BODY + "{{ reasoning_effort }}"
)
ONLY_MAX = (
    BODY
    + "{% if thinking %}<think>{% if reasoning_effort == 'max' %}Think hard.{% endif %}{% endif %}"
)
MODES = (
    BODY
    + "{% if thinking_mode == 'disabled' %}</t>{% elif thinking_mode == 'enabled' %}<t>{% endif %}"
)
BUDGET = BODY + "{% if thinking_budget is defined %}{{ thinking_budget }}{% endif %}"
LOW = BODY + "{% if enable_thinking %}<think>{% if low_effort %}briefly{% endif %}{% endif %}"


def switch(source: str) -> ThinkingSwitch:
    return find_switch(ChatTemplate({"default": source}, special_tokens={}))


def options(source: str, effort: ThinkingEffort) -> dict[str, Any]:
    return switch(source).options_for(Thinking(effort=effort))


def test_a_boolean_switch_means_low_effort_when_off() -> None:
    asked = {effort: options(TOGGLE, effort).get("enable_thinking") for effort in EFFORTS}
    assert asked == {
        "off": False,
        "minimal": False,
        "on": True,
        "low": True,
        "medium": True,
        "high": True,
        "max": True,
    }


def test_an_effort_that_is_only_printed_has_three_levels() -> None:
    asked = [
        options(PRINTED, effort).get("reasoning_effort")
        for effort in ("minimal", "low", "medium", "high", "max")
    ]
    assert asked == ["low", "low", "medium", "high", "high"]


def test_a_refused_effort_becomes_the_nearest_accepted_one() -> None:
    asked = {effort: options(WORDS, effort).get("reasoning_effort") for effort in EFFORTS}
    assert asked == {
        "off": "no_think", "on": "high", "minimal": "low", "low": "low", "medium": "high", "high": "high", "max": "high"
    }  # fmt: skip


def test_other_efforts_than_max_may_omit_the_option() -> None:
    assert options(ONLY_MAX, "max") == {"thinking": True, "reasoning_effort": "max"}
    assert options(ONLY_MAX, "high") == options(ONLY_MAX, "low") == {"thinking": True}
    assert options(ONLY_MAX, "off") == {"thinking": False}


def test_modes_have_words_for_on_and_off() -> None:
    assert options(MODES, "off") == {"thinking_mode": "disabled"}
    assert options(MODES, "high") == {"thinking_mode": "enabled"}


def test_a_budget_uses_the_templates_own_option() -> None:
    found = switch(BUDGET)
    assert found.options_for(Thinking(effort="off")) == {"thinking_budget": 0}
    assert found.options_for(Thinking(budget_tokens=777)) == {"thinking_budget": 777}
    assert found.options_for(Thinking(effort="on")) == {"thinking_budget": -1}


def test_some_templates_have_a_separate_low_effort_switch() -> None:
    assert options(LOW, "low") == {"enable_thinking": True, "low_effort": True}
    assert options(LOW, "high") == {"enable_thinking": True}


def test_a_budget_enables_thinking_and_zero_disables_it() -> None:
    assert switch(TOGGLE).options_for(Thinking(budget_tokens=100)) == {"enable_thinking": True}
    assert switch(TOGGLE).options_for(Thinking(budget_tokens=0)) == {"enable_thinking": False}


@pytest.mark.parametrize("source", [TOGGLE, PRINTED, WORDS, MODES, BUDGET, BODY])
def test_without_a_request_no_option_is_set(source: str) -> None:
    assert switch(source).options_for(Thinking()) == {}


def test_a_named_option_without_effect_is_ignored() -> None:
    assert switch(BODY + "{# enable_thinking #}").options == {}


def test_options_that_keep_past_thoughts_are_known_by_name() -> None:
    assert switch(BODY + "{% if clear_thinking %}{% endif %}").keeping == {"clear_thinking": False}
