"""Past calls and results get the form that the template requires."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.front.prompt.conversation import Message, ToolHabits, with_habits
from holdfast.front.toolcalls.call_format import Call, CallFormat, IdForm
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters


def answer(*names: str, content: Any = "", ids: Sequence[str] = ("x-1", "x-2", "x-3")) -> Message:
    calls = [
        {"id": ids[at], "function": {"name": name, "arguments": {"at": at}}}
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call_id: str | None, text: str, **more: Any) -> Message:
    return {
        "role": "tool",
        "content": text,
        **({} if call_id is None else {"tool_call_id": call_id}),
        **more,
    }


def ids(messages: Sequence[Message]) -> list[str]:
    return [call["id"] for message in messages for call in message.get("tool_calls", ())]


def results(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    return [
        (each["tool_call_id"], each["name"], each["content"])
        for each in messages
        if each["role"] == "tool"
    ]


def test_results_follow_the_order_of_calls_and_have_names() -> None:
    ready = with_habits(
        [answer("f", "g"), result("x-2", "second"), result("x-1", "first")], ToolHabits()
    )
    assert results(ready) == [("x-1", "f", "first"), ("x-2", "g", "second")]


def test_results_without_ids_match_calls_by_name_then_order() -> None:
    ready = with_habits(
        [
            answer("f", "g", "f"),
            result(None, "2", tool_name="g"),
            result(None, "1"),
            result(None, "3"),
        ],
        ToolHabits(),
    )
    assert results(ready) == [("x-1", "f", "1"), ("x-2", "g", "2"), ("x-3", "f", "3")]


def test_calls_of_the_same_id_each_keep_a_result() -> None:
    ready = with_habits(
        [answer("f", "g", ids=("a", "a")), result("a", "1"), result("a", "2")], ToolHabits()
    )
    assert results(ready) == [("a", "f", "1"), ("a", "g", "2")]


@pytest.mark.parametrize("content", ["?", [{"type": "text", "text": "?"}]])
def test_a_result_without_a_call_becomes_a_user_message(content: Any) -> None:
    strange = {**result("unknown", ""), "content": content}
    ready = with_habits([answer("f"), strange, result("x-1", "1")], ToolHabits())
    assert [each["role"] for each in ready] == ["assistant", "tool", "user"]
    assert ready[1]["content"] == "1"
    assert "?" in str(ready[2]["content"])
    assert type(ready[2]["content"]) is type(content)


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        ("random", "toolu_01", "toolu_01"),
        ("alnum9", "Abc123xyZ", "Abc123xyZ"),
        ("function_number", "functions.f:7", "functions.f:7"),
        ("function_number", "call_1", "functions.f:0"),
        ("number", "call_1", "0"),
        ("random", "", "call_0"),
    ],
)
def test_ids_have_the_familys_format(form: IdForm, given: str, expected: str) -> None:
    ready = with_habits(
        [answer("f", ids=(given,)), result(given or None, "r")], ToolHabits(id_form=form)
    )
    assert ids(ready) == [expected]
    assert results(ready) == [(expected, "f", "r")]


def test_foreign_ids_become_stable_nine_character_ids() -> None:
    habits = ToolHabits(id_form="alnum9")
    first = ids(with_habits([answer("f", "g")], habits))
    again = ids(with_habits([{"role": "user", "content": "more"}, answer("f", "g")], habits))
    assert first == again
    assert len(set(first)) == 2
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in first)


def test_calls_are_numbered_over_the_whole_conversation() -> None:
    messages = [answer("f", "g"), result("x-1", ""), result("x-2", ""), answer("h")]
    assert ids(with_habits(messages, ToolHabits(id_form="function_number"))) == [
        "functions.f:0",
        "functions.g:1",
        "functions.h:2",
    ]


@pytest.mark.parametrize("content", ["text", [{"type": "text", "text": "text"}]])
def test_parallel_calls_become_pairs_for_templates_that_refuse_them(content: Any) -> None:
    ready = with_habits(
        [answer("f", "g", content=content), result("x-2", "2"), result("x-1", "1")],
        ToolHabits(parallel=False),
    )
    assert [each["role"] for each in ready] == ["assistant", "tool", "assistant", "tool"]
    assert [each["content"] for each in ready] == [content, "1", content[:0], "2"]
    assert ids(ready) == ["x-1", "x-2"]


@dataclass(frozen=True)
class Written(TaggedParameters):
    """Writes calls in a form that is easy to recognize."""

    def write(self, calls: Sequence[Call]) -> str:
        return json.dumps([[call.name, call.arguments] for call in calls])


WRITTEN: CallFormat = Written()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", '[["f", {"at": 0}]]'),
        ("text", 'text\n[["f", {"at": 0}]]'),
        (
            [{"type": "text", "text": "a"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": '[["f", {"at": 0}]]'}],
        ),
    ],
)
def test_calls_omitted_by_a_template_are_written_into_the_text(content: Any, expected: Any) -> None:
    ready = with_habits(
        [answer("f", content=content), result("x-1", "1")], ToolHabits(written_calls_format=WRITTEN)
    )
    assert ready[0]["content"] == expected
    assert "tool_calls" not in ready[0]
    assert results(ready) == [("x-1", "f", "1")]


def test_an_answer_is_inserted_between_result_and_user_if_required() -> None:
    messages = [answer("f"), result("x-1", "1"), {"role": "user", "content": "and?"}]
    ready = with_habits(messages, ToolHabits(answer_after_results=""))
    assert [each["role"] for each in ready] == ["assistant", "tool", "assistant", "user"]


def test_messages_without_tools_are_unchanged() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert (
        with_habits(
            messages,
            ToolHabits(
                id_form="alnum9",
                parallel=False,
                written_calls_format=WRITTEN,
                answer_after_results="",
            ),
        )
        == messages
    )


@pytest.mark.parametrize(("content", "thinks"), [("text", False), ("", True)])
def test_a_thought_is_dropped_where_text_excludes_it(content: str, thinks: bool) -> None:
    turn = answer("f", content=content) | {"reasoning_content": "hm", "thinking": "hm"}
    (ready,) = with_habits([turn], ToolHabits(thought_beside_text=False))
    assert ("thinking" in ready, "reasoning_content" in ready) == (thinks, thinks)
    assert with_habits([turn], ToolHabits())[0]["thinking"] == "hm"
