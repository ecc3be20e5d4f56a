from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.responses.items import conversation, items_of
from holdfast.front.server.problem import RequestRefused

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def messages(*items: dict[str, Any], **facts: Any) -> list[dict[str, Any]]:
    return list(conversation(items, **facts)[0])


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def calling(*names: str, content: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(names, 1)
    ]
    return {"role": "assistant", "content": content, **more, "tool_calls": calls}


def test_a_text_is_a_user_message() -> None:
    assert messages(*items_of("hello"), instructions="Be brief.") == [
        said("system", "Be brief."),
        said("user", "hello"),
    ]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_messages_may_omit_their_type_or_have_parts(role: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    got = messages(
        {"role": role, "content": "x"}, {"type": "message", "role": role, "content": parts}
    )
    assert got == [
        said(role, "x"),
        {"role": role, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
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


def test_text_after_a_call_becomes_a_separate_line() -> None:
    assert messages(said("assistant", "a"), CALL, said("assistant", "b")) == [
        calling("f", content="a\nb")
    ]


def test_a_sealed_thought_is_opened_and_foreign_ones_are_dropped() -> None:
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


def test_custom_and_namespaced_calls_have_the_models_names() -> None:
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


def test_user_and_tool_output_images_become_prompt_images() -> None:
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
def test_unsupported_items_are_refused_by_name(item: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        messages(item)
    assert (refused.value.field, refused.value.code) == (field, code)
