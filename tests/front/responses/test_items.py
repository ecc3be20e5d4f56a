from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.responses.items import conversation, items_of
from holdfast.front.server.problem import RequestRefused

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def messages(*items: dict[str, Any], **facts: Any) -> list[dict[str, Any]]:
    return list(conversation(items, **facts))


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def calling(*names: str, content: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(names, 1)
    ]
    return {"role": "assistant", "content": content, **more, "tool_calls": calls}


def test_a_text_is_a_message_of_the_users() -> None:
    assert messages(*items_of("hello"), instructions="Be brief.") == [
        said("system", "Be brief."),
        said("user", "hello"),
    ]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_messages_come_with_and_without_a_type_and_as_parts(role: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    got = messages(
        {"role": role, "content": "x"}, {"type": "message", "role": role, "content": parts}
    )
    assert got == [
        said(role, "x"),
        {"role": role, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


def test_what_the_assistant_thought_said_and_called_in_one_turn_is_one_message() -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
    }
    second = CALL | {"call_id": "c2", "name": "g"}
    got = messages(said("user", "x"), thought, text, CALL, second, RESULT, text)
    assert got == [
        said("user", "x"),
        calling("f", "g", content="Hi", reasoning_content="hm"),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        said("assistant", "Hi"),
    ]


def test_a_thought_or_a_second_text_begins_another_turn() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert messages(said("assistant", "a"), said("assistant", "b")) == [
        said("assistant", "a"),
        said("assistant", "b"),
    ]
    got = messages(CALL, thought, CALL)
    assert got == [calling("f"), calling("f", reasoning_content="hm")]


def test_text_behind_a_call_belongs_to_its_turn_on_a_line_of_its_own() -> None:
    assert messages(said("assistant", "a"), CALL, said("assistant", "b")) == [
        calling("f", content="a\nb")
    ]


def test_a_sealed_thought_is_opened_and_others_are_left_out() -> None:
    opened = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "no"}],
        "encrypted_content": "ours",
    }
    foreign = opened | {"encrypted_content": "gAAAA"}
    unseal = {"ours": "hm"}.get
    assert messages(opened, said("assistant", "a"), unseal=unseal) == [
        said("assistant", "a") | {"reasoning_content": "hm"}
    ]
    assert messages(foreign, said("assistant", "a"), unseal=unseal) == [said("assistant", "a")]
    assert messages({"type": "reasoning", "id": "rs", "summary": []}) == []


def test_calls_of_custom_tools_and_in_namespaces_have_the_names_that_the_model_knows() -> None:
    custom = {
        "type": "custom_tool_call",
        "call_id": "c1",
        "name": "patch",
        "input": "a\n",
        "namespace": "ns",
    }
    result = {
        "type": "custom_tool_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "done"}],
    }
    got = messages(custom, result)
    assert got[0]["tool_calls"][0]["function"] == {
        "name": "ns__patch",
        "arguments": {"input": "a\n"},
    }
    assert got[1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "done"}],
    }


def test_images_of_the_user_and_in_the_output_of_a_call_become_images_of_the_prompt() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    called, said = messages(
        {"type": "function_call_output", "call_id": "c1", "output": [image]},
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
    )
    sources = [called["content"][0]["image"], said["content"][1]["image"]]
    assert [source.decoded(max_bytes=9) for source in sources] == [b"\0\0\0"] * 2
    assert [source.media_type for source in sources] == ["image/png"] * 2
    assert [source.field for source in sources] == [
        "input.0.output.0.image_url",
        "input.1.content.1.image_url",
    ]


@pytest.mark.parametrize(
    ("item", "field", "code"),
    [
        ({"type": "odd"}, "input.0.type", "unsupported_parameter"),
        ({"type": "compaction"}, "input.0.encrypted_content", "missing_required_parameter"),
        ({"type": "compaction_trigger"}, "input.0.type", "invalid_value"),
        ({"content": "x"}, "input.0.role", "missing_required_parameter"),
        ({"role": "tool", "content": "x"}, "input.0.role", "invalid_value"),
        ({"role": "user"}, "input.0.content", "missing_required_parameter"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_data": "x"}]},
            "input.0.content.0",
            "unsupported_content",
        ),
        (
            {"role": "system", "content": [{"type": "image", "image": "0" * 64}]},
            "input.0.content.0",
            "unsupported_content",
        ),
        (
            {"role": "user", "content": [{"type": "poem"}]},
            "input.0.content.0.type",
            "invalid_value",
        ),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "input.0.content.0.text",
            "missing_required_parameter",
        ),
        (
            {"type": "function_call", "name": "f", "call_id": "c"},
            "input.0.arguments",
            "missing_required_parameter",
        ),
        (
            {"type": "function_call", "arguments": "{}", "call_id": "c"},
            "input.0.name",
            "missing_required_parameter",
        ),
        (
            {"type": "function_call_output", "call_id": "c"},
            "input.0.output",
            "missing_required_parameter",
        ),
        (
            {"type": "function_call_output", "output": "x"},
            "input.0.call_id",
            "missing_required_parameter",
        ),
        ({"type": "item_reference", "id": "msg_1"}, "input.0.id", "item_not_found"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    item: dict[str, Any], field: str, code: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        messages(item)
    assert (refused.value.field, refused.value.code) == (field, code)
