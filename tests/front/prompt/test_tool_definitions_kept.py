"""Kept tool definitions render like plain ones, and do not affect each other."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.prompt.canonical import CanonicalForm, FirstForms
from holdfast.front.prompt.conversation import arguments_object, template_message
from holdfast.front.prompt.known_answers import KnownAnswers, PastAnswers
from holdfast.front.prompt.template_worker import jinja_environment
from holdfast.front.prompt.tokenize import ControlGuard
from holdfast.front.prompt.tool_definitions import KeptPart, exact_key, made_once
from holdfast.front.request import ChatPrompt

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "dü",
        "parameters": {"properties": {"b": {}, "a": {}}},
    },
}
FORMS = (
    "tool | tojson",
    "tool | tojson(indent=4)",
    "tool | tojson(separators=(',', ':'))",
    "tool | tojson(sort_keys=true)",
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("form", FORMS)
def test_templates_render_it_like_a_plain_one_each_time(form: str) -> None:
    template = jinja_environment().from_string(f"{{{{ {form} }}}}")
    kept = KeptPart(TOOL)
    expected = template.render(tool=TOOL)
    assert [template.render(tool=kept) for _ in range(3)] == [expected] * 3


def test_its_json_forms_are_cached_separately_and_correctly() -> None:
    text = "\n".join(
        f"{{{{ {form} }}}}"
        for form in (*FORMS, *FORMS, "tool | tojson(ensure_ascii=true)", "tool | tojson(indent=1)")
    )
    template, kept = jinja_environment().from_string(text), KeptPart(TOOL)
    assert template.render(tool=kept) == template.render(tool=kept) == template.render(tool=TOOL)


def test_derived_values_are_made_once_and_bounded() -> None:
    kept, asked = KeptPart(TOOL), []
    for kind in (0, 0, *range(1, 10), 9):
        assert made_once(kept, kind, lambda kind=kind: asked.append(kind) or kind) == kind  # type: ignore[misc, func-returns-value]
    assert asked == [*range(10), 9]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda tool: pickle.loads(pickle.dumps(tool))]
)
def test_a_copy_is_a_plain_dictionary_that_shows_changes(copied: Any) -> None:
    kept = KeptPart(TOOL)
    template = jinja_environment().from_string("{{ tool | tojson }}")
    template.render(tool=kept)
    changed = copied(kept)
    assert type(changed) is dict and changed == TOOL
    changed["type"] = "other"
    assert json.loads(template.render(tool=changed))["type"] == "other"
    assert kept == TOOL


def test_a_repeated_definition_is_the_same_object_per_tenant() -> None:
    forms = FirstForms()
    first = forms.tool(copy.deepcopy(TOOL), tenant="1")
    assert forms.tool(copy.deepcopy(TOOL), tenant="1") is first
    assert forms.tool(copy.deepcopy(TOOL), tenant="2") is not first


def test_changing_the_sent_definition_does_not_change_the_kept_one() -> None:
    forms = FirstForms()
    sent = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a"]}}}
    before = copy.deepcopy(sent)
    forms.tool(sent)
    sent["function"]["parameters"]["enum"].append("b")  # type: ignore[index]
    assert forms.tool(sent) == sent
    assert forms.tool(before) == before


@given(one=json_values, other=json_values)
def test_different_spellings_have_different_hashes(one: Any, other: Any) -> None:
    first, second = (exact_key({"parameters": value}, tenant="t") for value in (one, other))
    if json.dumps(one) != json.dumps(other):
        assert first != second
    if repr(one) == repr(other):
        assert first == second
    assert first != exact_key({"parameters": one}, tenant="u")


def test_non_json_values_are_passed_on_without_a_hash() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    assert exact_key({"parameters": deep}, tenant="") is None
    assert exact_key({"parameters": object()}, tenant="") is None
    odd = {"type": "function", "function": object()}
    assert FirstForms().tool(odd) == odd


def test_control_tokens_in_it_are_broken_by_the_given_guard() -> None:
    forms = FirstForms()

    def shown(guard: Any) -> Any:
        prompt = ChatPrompt(messages=(), tools=(TOOL,))
        (tool,) = CanonicalForm(forms=forms, guard=guard).of(prompt)[0].tools
        return tool[guard("function")][guard("description")]

    assert [shown(str.upper), shown(str.upper), shown(str.title)] == ["DÜ", "DÜ", "Dü"]
    assert forms.tool(TOOL) == TOOL


def call_with(arguments: Any, **fields: Any) -> Any:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function, **fields}


@pytest.mark.parametrize("arguments", ['{"a": "x", "b": 1}', {"a": "x", "b": 1}, "no JSON"])
@pytest.mark.parametrize("fields", [{}, {"id": None}], ids=["with id", "without id"])
def test_a_repeated_call_is_not_parsed_again(arguments: Any, fields: Any) -> None:
    forms, known, seen = FirstForms(), KnownAnswers(), []

    class Guard:
        def __call__(self, text: str) -> str:
            seen.append(text)
            return text

        name = __call__

    guard: Any = Guard()

    def turn(arguments: Any, tenant: str = "") -> Any:
        message = {"role": "assistant", "tool_calls": [call_with(arguments, **fields)]}
        sent = ChatPrompt(messages=(copy.deepcopy(message),))
        prompt, _ = CanonicalForm(
            forms=forms, guard=guard, past_answers=PastAnswers(known), tenant=tenant
        ).of(sent)
        (message,) = prompt.messages
        ready = template_message(message, keep_parts=False, arguments_as_text=False, field="")
        return ready["tool_calls"][0]["function"]

    first = turn(arguments)
    assert first == {"name": "f", "arguments": arguments_object(arguments)}
    read = len(seen)
    again = turn(arguments)
    assert again["arguments"] is first["arguments"]
    assert seen[read:] == []
    # another call, or another tenant's, is parsed
    assert turn('{"a": "y"}')["arguments"] == {"a": "y"}
    read = len(seen)
    assert turn(arguments, tenant="t") == first
    assert "arguments" in seen[read:]


GUARD = ControlGuard(["<|x|>"])


def shown_message(forms: FirstForms, sent: Any) -> Any:
    prompt = ChatPrompt(messages=(sent,))
    (message,) = CanonicalForm(forms=forms, guard=GUARD).of(prompt)[0].messages
    return message


def calling(arguments: Any, **fields: Any) -> Any:
    return {"role": "assistant", "content": None, "tool_calls": [call_with(arguments, **fields)]}


def test_changing_the_sent_message_does_not_change_the_kept_one() -> None:
    forms, sent = FirstForms(), calling({"a": ["x"]})
    kept = shown_message(forms, sent)
    sent["tool_calls"][0]["function"]["arguments"]["a"].append("y")
    assert kept == calling({"a": ["x"]})
    assert shown_message(forms, sent) == sent
    assert shown_message(forms, calling({"a": ["x"]})) is kept


def test_a_message_is_guarded_again_for_another_guard() -> None:
    forms, sent = FirstForms(), {"role": "user", "content": "<|x|>"}
    kept = shown_message(forms, sent)
    (other,) = CanonicalForm(forms=forms).of(ChatPrompt(messages=(sent,)))[0].messages
    assert (other["content"], kept["content"] != "<|x|>") == ("<|x|>", True)


def test_the_number_of_kept_messages_is_bounded() -> None:
    forms = FirstForms(max_bytes=10_000)
    first = shown_message(forms, calling("{}", id="first"))
    assert shown_message(forms, calling("{}", id="first")) is first
    for number in range(100):
        shown_message(forms, calling({"a": "x" * 500}, id=f"c{number}"))
        forms.check_invariants()
    assert shown_message(forms, calling("{}", id="first")) is not first
