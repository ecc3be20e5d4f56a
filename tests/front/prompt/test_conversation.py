"""Messages of clients become messages that templates understand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.conversation import (
    RoleHabits,
    arguments_object,
    template_message,
    with_roles,
)


def ready(
    *messages: dict[str, Any], keep_parts: bool = False, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    return [
        template_message(
            message,
            keep_parts=keep_parts,
            arguments_as_text=arguments_as_text,
            field=f"messages.{place}",
        )
        for place, message in enumerate(messages)
    ]


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
    }


def test_parts_are_joined_line_by_line() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ready({"role": "user", "content": parts}) == [{"role": "user", "content": "one\ntwo"}]


def test_text_becomes_parts_for_a_template_that_iterates_over_them() -> None:
    assert ready({"role": "user", "content": "one"}, keep_parts=True)[0]["content"] == [
        {"type": "text", "text": "one"}
    ]


def test_developer_is_system_and_null_content_is_empty() -> None:
    assert ready({"role": "developer", "content": "x"}, {"role": "assistant", "content": None}) == [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": ""},
    ]


def test_keys_without_value_are_left_out() -> None:
    assert ready(
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "name": None}
    ) == [{"role": "assistant", "content": "x"}]
    assert "tool_calls" not in ready({"role": "assistant", "content": "x", "tool_calls": []})[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_past_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    (message,) = ready({"role": "assistant", "content": "x", name: "because"})
    assert message == {"role": "assistant", "content": "x"} | dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"), "because"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("not JSON", {"raw": "not JSON"}),
        ("[1]", {"raw": "[1]"}),
        pytest.param("[" * 10**5, {"raw": "[" * 10**5}, id="too deep"),
    ],
)
def test_arguments_become_objects(arguments: Any, expected: Any) -> None:
    assert ready(call(arguments))[0]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"a": 1}', '{"a": 1}'), ({"a": "é"}, '{"a": "é"}'), ("", "{}")]
)
def test_arguments_stay_text_for_templates_that_print_them(arguments: Any, expected: str) -> None:
    assert (
        ready(call(arguments), arguments_as_text=True)[0]["tool_calls"][0]["function"]["arguments"]
        == expected
    )


def test_the_clients_messages_are_not_modified() -> None:
    message = call('{"a": 1}')
    ready(message)
    assert message == call('{"a": 1}')


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages.0"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": 3, "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": [3]}, "messages.0.content.0"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content.0.type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function"),
        ({"role": "assistant", "tool_calls": 3}, "messages.0.tool_calls"),
    ],
)
def test_unreadable_messages_are_refused_by_name(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ready(message)
    assert caught.value.field == field


@given(st.text())
def test_any_text_is_accepted_as_arguments(arguments: str) -> None:
    assert isinstance(arguments_object(arguments), dict)


@pytest.mark.parametrize(
    ("habits", "roles", "expected"),
    [
        (RoleHabits(), "ssuasu", "ssuasu"),
        (RoleHabits(system_anywhere=False), "ssuasu", "suauu"),
        (RoleHabits(system_anywhere=False, same_in_a_row=False), "ssuasu", "suau"),
        (RoleHabits(system=False), "suu", "u"),
        (RoleHabits(system=False, same_in_a_row=False), "sua", "ua"),
        (RoleHabits(same_in_a_row=False), "sau", "suau"),
        (RoleHabits(same_in_a_row=False), "auua", "uaua"),
        (RoleHabits(same_in_a_row=False), "uattu", "uattu"),
    ],
)
def test_roles_are_reordered_for_the_template(
    habits: RoleHabits, roles: str, expected: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = [
        {"role": names[each], "content": str(at)} for at, each in enumerate(roles)
    ]
    ready = with_roles(messages, habits)
    assert "".join(each["role"][0] for each in ready) == expected
    assert "".join(each["content"] for each in ready).replace("\n\n", "") == "".join(
        map(str, range(len(roles)))
    )
