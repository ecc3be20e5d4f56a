"""Equal content gets one form, and different content stays different."""

from __future__ import annotations

import copy
import gc
import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.prompt import beginnings
from holdfast.front.prompt.canonical import CanonicalForm, FirstForms
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import ControlGuard
from holdfast.front.prompt.tool_definitions import in_usual_order
from holdfast.front.request import ChatPrompt
from tests.fakes import toy_tokenizers

BILLING = "x-anthropic-billing-header: cc_version=2.1.7.e2b; cc_entrypoint=cli; cch=1f83a;"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {
                "zone": {"type": "string", "description": "Where"},
                "day": {
                    "anyOf": [{"type": "string", "enum": ["b", "a"]}, {"type": "null"}],
                    "default": None,
                },
                "type": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"y": {}, "x": {}}},
                },
            },
            "required": ["zone"],
        },
    },
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "anyOf",
                    "required",
                    "default",
                    "enum",
                    "description",
                    "x",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


def canonical(prompt: ChatPrompt, forms: FirstForms, **options: Any) -> ChatPrompt:
    return CanonicalForm(forms=forms, **options).of(prompt)[0]


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(each, order) for each in value] if isinstance(value, list) else value


def text(value: Any) -> str:
    return json.dumps(value)


@given(seed=st.integers(0, 1000))
def test_a_tool_with_shuffled_keys_is_the_same_tool(seed: int) -> None:
    forms = FirstForms()
    first = forms.tool(WEATHER)
    assert text(first) == text(WEATHER)  # its names are kept as sent
    assert text(forms.tool(shuffled(WEATHER, random.Random(seed)))) == text(first)


@given(seed=st.integers(0, 1000))
def test_keys_have_their_usual_order_even_in_a_new_process(seed: int) -> None:
    settled = FirstForms().tool(shuffled(WEATHER, random.Random(seed)))
    assert list(settled) == ["type", "function"]
    assert list(settled["function"]) == ["name", "description", "parameters"]
    assert list(settled["function"]["parameters"]) == ["type", "properties", "required"]
    assert list(settled["function"]["parameters"]["properties"]["zone"]) == ["type", "description"]


@given(parameters=json_values, seed=st.integers(0, 1000))
def test_only_the_order_of_keys_changes(parameters: Any, seed: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert in_usual_order(tool) == tool
    forms = FirstForms()
    assert text(forms.tool(shuffled(tool, random.Random(seed)))) == text(forms.tool(tool))
    assert forms.tool(tool) == tool


def test_different_tools_and_tenants_stay_separate() -> None:
    forms = FirstForms()
    one, other = (
        {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}},
        {"name": "f", "parameters": {"properties": {"b": {}, "a": {}}}},
    )
    assert text(forms.tool(one, tenant="1")) == text(one)
    assert text(forms.tool(other, tenant="2")) == text(other)
    assert text(forms.tool(other, tenant="1")) == text(one)
    assert forms.tool({"name": "g"}, tenant="1") == {"name": "g"}


def test_forms_are_remembered_within_bounds() -> None:
    forms = FirstForms(max_bytes=2000)
    for number in range(20):
        forms.tool({"name": f"f{number}", "parameters": {"properties": {"b": {}, "a": {}}}})
        forms._forms.check_invariants()
    turned = {"name": "f0", "parameters": {"properties": {"a": {}, "b": {}}}}
    assert text(forms.tool(turned)) == text(turned)  # forgotten, so this one is the first


def test_empty_arguments_take_room_too() -> None:
    forms = FirstForms(max_bytes=10_000)
    for number in range(1000):
        forms.remember_arguments("", call_id=f"call_{number}")
    assert len(forms._forms._entries) < 100


@pytest.mark.parametrize(("content", "expected"), [
    (f"{BILLING}\nYou are helpful.", "You are helpful."),
    (f"You are helpful.\n{BILLING}", "You are helpful.\n"),
    (f"One.\n{BILLING}\nTwo.", "One.\nTwo."),
    (f"{BILLING}\n\nYou.", "You."),
    ([{"type": "text", "text": BILLING}, {"type": "text", "text": "You."}], "You."),
    ([{"type": "text", "text": f"{BILLING}\nYou."}, "Two."], "You.\nTwo."),
    ([BILLING, "You."], "You."),
    ([BILLING], None),
    ("Ask about x-anthropic-billing-header: now", "Ask about x-anthropic-billing-header: now"),
    (None, None),
])  # fmt: skip
@pytest.mark.parametrize("role", ["system", "developer"])
def test_accounting_in_the_system_prompt_is_left_out(
    role: str, content: Any, expected: Any
) -> None:
    prompt = canonical(ChatPrompt(messages=({"role": role, "content": content},)), FirstForms())
    assert prompt.messages == ({"role": role, "content": expected},)


def test_user_text_is_unchanged() -> None:
    messages = ({"role": "user", "content": BILLING}, {"role": "assistant", "content": BILLING})
    assert canonical(ChatPrompt(messages=messages), FirstForms()).messages == messages


def system(content: Any, forms: FirstForms, tenant: str = "") -> Any:
    return canonical(
        ChatPrompt(messages=({"role": "system", "content": content},)), forms, tenant=tenant
    ).messages[0]["content"]


SAME_TEXT = (
    ("one\ntwo", ["one", "two"]),
    ("one", [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]),
)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("text", "parts"), [*SAME_TEXT, (None, ""), (None, []), (None, [{"type": "text", "text": ""}])]
)
def test_text_as_a_string_or_in_parts_is_equal(role: str, text: str | None, parts: Any) -> None:
    forms = FirstForms()
    sent = [
        canonical(ChatPrompt(messages=({"role": role, "content": each},)), forms)
        for each in (text, parts)
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "", " "])
@pytest.mark.parametrize("parts_first", [True, False])
def test_a_system_prompt_keeps_its_first_form(separator: str, parts_first: bool) -> None:
    forms = FirstForms()
    parts = [
        {"type": "text", "text": "You are helpful."},
        {"type": "text", "text": "Today is Monday."},
    ]
    joined = separator.join(part["text"] for part in parts)
    sent = [system(each, forms) for each in ((parts, joined) if parts_first else (joined, parts))]
    assert sent[0] == sent[1]
    assert system(joined, forms, tenant="other") == joined


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "text"}],
        7,
        [7],
        {"text": "a"},
    ],
)
def test_non_text_content_is_kept_for_the_error_message(content: Any) -> None:
    messages = ({"role": "user", "content": content},)
    assert canonical(ChatPrompt(messages=messages), FirstForms()).messages == messages


def with_call(arguments: Any, call_id: str = "call_1") -> ChatPrompt:
    call = {"type": "function", "id": call_id, "function": {"name": "f", "arguments": arguments}}
    return ChatPrompt(messages=({"role": "assistant", "content": None, "tool_calls": [call]},))


@given(
    arguments=st.dictionaries(st.text(max_size=4), json_values, max_size=4),
    seed=st.integers(0, 1000),
)
def test_arguments_rewritten_by_a_client_get_their_first_form(
    arguments: dict[str, Any], seed: int
) -> None:
    forms = FirstForms()
    given_text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    again = json.dumps(shuffled(arguments, random.Random(seed)), indent=1)
    assert (
        canonical(with_call(given_text), forms)
        == canonical(with_call(again), forms)
        == with_call(given_text)
    )
    assert canonical(with_call(again, "call_2"), forms) == with_call(again, "call_2")


def test_arguments_changed_by_a_client_are_kept() -> None:
    forms = FirstForms()
    for arguments in ('{"path": "a"}', '{"path": "b"}', "no json", "", {"path": "an object"}, None):
        assert canonical(with_call(arguments), forms) == with_call(arguments)


def test_a_found_tool_is_defined_once_and_then_named() -> None:
    reference = {"type": "tool_reference", "tool_name": "weather"}
    unknown = {"type": "tool_reference", "tool_name": "nobody"}
    messages = tuple(
        {"role": "tool", "content": [each, {"type": "text", "text": "x"}]}
        for each in (reference, reference, unknown)
    )
    ready = canonical(
        ChatPrompt(messages=messages, tools=(WEATHER,), found_tools=("weather",)), FirstForms()
    )
    first, second, third = (message["content"] for message in ready.messages)
    said, definition, rest = first.split("\n")
    assert said == "The tool weather can be called from now on. This is its definition:"
    assert (json.loads(definition), rest) == (WEATHER["function"], "x")
    assert second == "The tool weather can be called from now on.\nx"
    assert third == "The tool nobody can be called from now on.\nx"
    assert (ready.tools, ready.listed_tools) == ((WEATHER,), ())


@given(seed=st.integers(0, 1000))
def test_a_found_tool_is_defined_in_its_first_form(seed: int) -> None:
    forms, order = FirstForms(), random.Random(seed)
    message = {"role": "tool", "content": [{"type": "tool_reference", "tool_name": "weather"}]}
    prompts = [
        ChatPrompt(messages=(message,), tools=(tool,), found_tools=("weather",))
        for tool in (WEATHER, shuffled(WEATHER, order))
    ]
    assert canonical(prompts[0], forms).messages == canonical(prompts[1], forms).messages


TEMPLATE = ChatTemplate({"default": toy_tokenizers.CHATML}, special_tokens={})
ARGUMENTS = st.sampled_from(
    ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', {"a": 1}, {"a": 1.0}, {"a": True}]
)
TURN = st.one_of(
    st.sampled_from(["user", "system", "assistant"]).flatmap(
        lambda role: st.fixed_dictionaries(
            {"role": st.just(role), "content": st.sampled_from(["a", "b <|x|>", ["a", "b"]])}
        )
    ),
    ARGUMENTS.map(lambda arguments: with_call(arguments).messages[0]),
    st.just({"role": "tool", "content": "found", "tool_call_id": "call_1"}),
)


@settings(max_examples=60)
@given(
    turns=st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=2, max_size=5),
    edited=st.integers(0, 10),
    tenants=st.lists(st.sampled_from(["", "t"]), min_size=10, max_size=10),
    continued=st.booleans(),
)
def test_a_later_turn_is_canonical_like_a_whole_conversation(
    turns: list[list[Any]], edited: int, tenants: list[str], continued: bool
) -> None:
    guard = ControlGuard(["<|x|>"])
    remembering, forgetful = FirstForms(), FirstForms()
    sent: tuple[Any, ...] = ()
    for number, turn in enumerate(turns):
        sent = (*sent, *turn)
        changed = (*sent[:edited], {"role": "user", "content": "c"}, *sent[edited + 1 :])
        for place, messages in enumerate((sent, changed)):
            prompt = ChatPrompt(
                messages=copy.deepcopy(messages),
                continue_last=continued and messages[-1]["role"] == "assistant",
            )
            made = []
            for forms, least in ((remembering, 0), (forgetful, 1 << 30)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(beginnings, "_MIN_LENGTH", least)
                    patch.setattr(beginnings, "_END_LENGTH", 8)
                    made.append(
                        CanonicalForm(
                            forms=forms,
                            guard=guard,
                            template=TEMPLATE,
                            tenant=tenants[2 * number + place],
                        ).of(prompt)
                    )
                forms.check_invariants()
            # `repr`, because 1 == 1.0 == True
            assert repr(made[0]) == repr(made[1])


@pytest.mark.parametrize("character", ["a", "é", "字", "🙂"])
def test_a_conversation_takes_at_most_the_memory_that_is_counted(character: str) -> None:
    forms = FirstForms()
    tracemalloc.start()
    try:
        taken = tracemalloc.get_traced_memory()[0]
        for turns in (500, 1000):
            messages = tuple(
                {"role": ("user", "assistant")[turn % 2], "content": f"{character * 100} {turn}"}
                for turn in range(turns)
            )
            CanonicalForm(forms=forms, template=TEMPLATE).of(ChatPrompt(messages=messages))
        del messages
        for key, value in forms._messages.items():  # only the conversation has them
            forms._messages.put(key, value, size=forms._messages._limit + 1)
        del key, value
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - taken
    finally:
        tracemalloc.stop()
    forms.check_invariants()
    counted = forms._conversations._texts._used
    assert counted / 2 < taken < 1.05 * counted


def test_the_conversations_of_four_agents_are_remembered_by_default() -> None:
    forms = FirstForms()
    for agent in range(4):
        messages = tuple(
            {"role": ("user", "assistant")[turn % 2], "content": f"{agent}{turn} {'a' * 1600}"}
            for turn in range(256)
        )
        CanonicalForm(forms=forms, template=TEMPLATE).of(ChatPrompt(messages=messages))
    assert len(forms._conversations.items()) == 4


def test_a_conversation_may_be_sent_again_to_continue_its_last_message() -> None:
    forms = FirstForms()
    messages = tuple({"role": role, "content": "a" * 2000} for role in ("user", "assistant") * 2)
    finished = ChatPrompt(messages=messages)
    continued = ChatPrompt(messages=messages, continue_last=True)
    turn = ChatPrompt(messages=(*messages, {"role": "user", "content": "c"}))
    for prompt in (finished, continued, finished, continued, turn):
        made, _ = CanonicalForm(forms=forms).of(prompt)
        assert made.messages == prompt.messages
        forms.check_invariants()
