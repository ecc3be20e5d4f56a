"""Tools for templates without tools: only texts of ordinary messages remain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.front.prompt.conversation import (
    Message,
    RoleHabits,
    ToolHabits,
    tools_in_text,
    with_roles,
    with_tools_described,
)
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.request import ChatPrompt
from holdfast.front.toolcalls.call_format import Call, CallFormat
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Größe {x}", "parameters": {}},
}


@dataclass(frozen=True)
class Written(TaggedParameters):
    """Writes calls in a form that is easy to recognize."""

    def write(self, calls: Sequence[Call]) -> str:
        return ";".join(f"CALL {call.name} {json.dumps(call.arguments)}" for call in calls)


FORM: CallFormat = Written()


def conversation(*before: Message) -> list[Message]:
    calls = [
        {"id": at, "function": {"name": name, "arguments": {}}}
        for at, name in (("1", "f"), ("2", "g"))
    ]
    return [
        *before,
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be kind."}]])
def test_tools_are_described_in_the_system_message(before: list[Message]) -> None:
    first, *_ = tools_in_text(conversation(*before), [TOOL], FORM)
    assert first["role"] == "system"
    assert first["content"].startswith("Be kind.\n\n# Tools" if before else "# Tools")
    assert json.dumps(TOOL["function"], ensure_ascii=False) in first["content"]


def test_tools_may_be_described_in_another_syntax() -> None:
    first, *rest = with_tools_described(
        conversation({"role": "system", "content": "Be kind."}), [TOOL], FORM
    )
    assert rest == conversation()
    assert first["content"].startswith("Be kind.\n\n# Tools")
    assert json.dumps(TOOL["function"], ensure_ascii=False) in first["content"]
    assert "CALL first_function" in first["content"]
    assert "<tool_call>" not in first["content"]
    assert with_tools_described(conversation(), [], FORM) == conversation()


def test_without_tools_the_messages_are_unchanged() -> None:
    assert tools_in_text([{"role": "user", "content": "go"}], [], FORM) == [
        {"role": "user", "content": "go"}
    ]


def test_calls_become_answer_text_and_results_a_user_message() -> None:
    _, _, answer, results = tools_in_text(conversation(), [TOOL], FORM)
    assert answer == {"role": "assistant", "content": "CALL f {};CALL g {}"}
    assert results["role"] == "user"
    assert (
        results["content"]
        == "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )


@pytest.mark.parametrize(
    ("habits", "roles"),
    [
        (RoleHabits(), ["system", "user", "user"]),
        (RoleHabits(same_in_a_row=False), ["system", "user"]),
        (RoleHabits(system=False), ["user"]),
    ],
)
def test_roles_refused_by_a_template_are_joined(habits: RoleHabits, roles: list[str]) -> None:
    messages: list[Message] = [
        {"role": role, "content": role} for role in ("system", "user", "user")
    ]
    ready = with_roles(messages, habits)
    assert [each["role"] for each in ready] == roles
    assert "\n\n".join(each["content"] for each in ready) == "system\n\nuser\n\nuser"


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('alternate!') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_strict_template_without_system_role_still_serves_tools() -> None:
    template = ChatTemplate({"default": STRICT}, special_tokens={}).with_tool_habits(
        ToolHabits(tools_in_text_format=FORM)
    )
    messages = (
        *conversation({"role": "system", "content": "Be kind."}),
        {"role": "user", "content": "and?"},
    )
    text = template.render(ChatPrompt(messages=messages, tools=(TOOL,)))
    assert [part.partition("]")[0] for part in text.split("[")[1:]] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert text.startswith("[user]Be kind.\n\n# Tools")
    assert text.endswith("two\n</tool_response>\n\nand?[assistant]")
