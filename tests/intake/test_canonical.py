"""What says the same comes out the same, and what does not stays apart."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.intake.canonical import ToolOrders, canonical, in_usual_order
from holdfast.messages.requests import ChatPrompt

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
                "day": {"anyOf": [{"type": "string", "enum": ["b", "a"]}, {"type": "null"}], "default": None},
                "type": {"type": "array", "items": {"type": "object", "properties": {"y": {}, "x": {}}}},
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
            st.sampled_from(["type", "properties", "items", "anyOf", "required", "default", "enum", "description", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(each, order) for each in value] if isinstance(value, list) else value


def text(value: Any) -> str:
    return json.dumps(value)


@given(seed=st.integers(0, 1000))
def test_a_tool_whose_keys_are_shuffled_is_the_same_tool(seed: int) -> None:
    orders = ToolOrders()
    first = orders.ordered_as_first(WEATHER)
    assert text(first) == text(WEATHER)  # its names stay as they were sent
    assert text(orders.ordered_as_first(shuffled(WEATHER, random.Random(seed)))) == text(first)


@given(seed=st.integers(0, 1000))
def test_keys_with_a_usual_order_have_it_even_in_a_new_process(seed: int) -> None:
    settled = ToolOrders().ordered_as_first(shuffled(WEATHER, random.Random(seed)))
    assert list(settled) == ["type", "function"]
    assert list(settled["function"]) == ["name", "description", "parameters"]
    assert list(settled["function"]["parameters"]) == ["type", "properties", "required"]
    assert list(settled["function"]["parameters"]["properties"]["zone"]) == ["type", "description"]


@given(parameters=json_values, seed=st.integers(0, 1000))
def test_nothing_but_the_order_of_keys_changes(parameters: Any, seed: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert in_usual_order(tool) == tool
    orders = ToolOrders()
    assert text(orders.ordered_as_first(shuffled(tool, random.Random(seed)))) == text(orders.ordered_as_first(tool))
    assert orders.ordered_as_first(tool) == tool


def test_tools_that_differ_stay_apart_and_so_do_tenants() -> None:
    orders = ToolOrders()
    one, other = (
        {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}},
        {"name": "f", "parameters": {"properties": {"b": {}, "a": {}}}},
    )
    assert text(orders.ordered_as_first(one, tenant="1")) == text(one)
    assert text(orders.ordered_as_first(other, tenant="2")) == text(other)
    assert text(orders.ordered_as_first(other, tenant="1")) == text(one)
    assert orders.ordered_as_first({"name": "g"}, tenant="1") == {"name": "g"}


def test_orders_are_remembered_within_bounds() -> None:
    orders = ToolOrders(most_bytes=200)
    for number in range(20):
        orders.ordered_as_first({"name": f"f{number}", "parameters": {"properties": {"b": {}, "a": {}}}})
        assert orders._bytes <= 200
    turned = {"name": "f0", "parameters": {"properties": {"a": {}, "b": {}}}}
    assert text(orders.ordered_as_first(turned)) == text(turned)  # forgotten, so this is the first


@pytest.mark.parametrize(("content", "expected"), [
    (f"{BILLING}\nYou are helpful.", "You are helpful."),
    (f"You are helpful.\n{BILLING}", "You are helpful.\n"),
    (f"One.\n{BILLING}\nTwo.", "One.\nTwo."),
    ([{"type": "text", "text": BILLING}, {"type": "text", "text": "You."}], [{"type": "text", "text": "You."}]),
    ([{"type": "text", "text": f"{BILLING}\nYou."}, "Two."], [{"type": "text", "text": "You."}, "Two."]),
    ([BILLING, "You."], ["You."]),
    ("Ask about x-anthropic-billing-header: now", "Ask about x-anthropic-billing-header: now"),
    (None, None),
])  # fmt: skip
@pytest.mark.parametrize("role", ["system", "developer"])
def test_accounting_in_the_system_prompt_is_left_out(role: str, content: Any, expected: Any) -> None:
    prompt = canonical(ChatPrompt(messages=({"role": role, "content": content},)), ToolOrders())
    assert prompt.messages == ({"role": role, "content": expected},)


def test_what_users_write_is_not_touched() -> None:
    messages = ({"role": "user", "content": BILLING}, {"role": "assistant", "content": [{"type": "text", "text": BILLING}]})
    assert canonical(ChatPrompt(messages=messages), ToolOrders()).messages == messages
