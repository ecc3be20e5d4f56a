from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from holdfast.errors import InvalidRequest
from holdfast.front.anthropic.conversation import Conversation, Turn, referenced_tools
from holdfast.front.images.sources import with_notes
from holdfast.front.server.access import Seal

SEAL = Seal()
TURNS: TypeAdapter[list[Turn]] = TypeAdapter(list[Turn])


def talk(*turns: tuple[str, Any], system: Any = None) -> list[dict[str, Any]]:
    conversation = Conversation(seal=SEAL)
    if system is not None:
        conversation.add_system(system)
    given = TURNS.validate_python([{"role": role, "content": content} for role, content in turns])
    for place, turn in enumerate(given):
        conversation.add_turn(turn, f"messages.{place}.content")
    return conversation.messages


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "call_1", "name": name, "input": arguments}


def result(content: Any = "out", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "call_1", "content": content, **more}


def test_texts_are_unchanged() -> None:
    assert talk(("user", "a"), ("assistant", "b"), ("system", "c")) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "c"},
    ]


def test_a_system_prompt_keeps_its_parts_and_comes_first() -> None:
    assert talk(("user", "a"), system=[text("s"), text("t")])[0] == {
        "role": "system",
        "content": [text("s"), text("t")],
    }
    assert talk(system="s") == [{"role": "system", "content": [text("s")]}]
    assert talk(system=[]) == []


def test_texts_before_and_after_a_call_are_separate_lines() -> None:
    (message,) = talk(
        ("assistant", [text("I "), text("look."), use(city="Rome"), text("I answer.")])
    )
    assert message["content"] == "I look.\nI answer."


def test_an_answer_keeps_thoughts_texts_and_calls_apart() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": SEAL.sign("hm")}
    (message,) = talk(("assistant", [thought, text("I "), text("call"), use(city="Rom☃")]))
    assert (message["reasoning_content"], message["content"]) == ("hm", "I call")
    (call,) = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_1", "f")
    assert call["function"]["arguments"] == '{"city": "Rom☃"}'


@given(thought=st.text(min_size=1, max_size=50))
def test_a_hidden_thought_is_restored_from_its_signature(thought: str) -> None:
    (message,) = talk(
        (
            "assistant",
            [{"type": "thinking", "thinking": "", "signature": SEAL.encrypt(thought)}, text("x")],
        )
    )
    assert message["reasoning_content"] == thought


@pytest.mark.parametrize("thinking", ["hm", ""])
@pytest.mark.parametrize(
    "signature",
    ["", "EqQBCgIYAhIM1gbcDa9GJwZA", Seal().sign("hm"), Seal().encrypt("hm"), SEAL.sign("ha")],
    ids=["none", "another's", "signed elsewhere", "closed elsewhere", "of another thought"],
)
def test_a_foreign_thought_is_left_out(thinking: str, signature: str) -> None:
    block = {"type": "thinking", "thinking": thinking, "signature": signature}
    assert talk(("assistant", [block, text("x")])) == [{"role": "assistant", "content": "x"}]


def test_tool_results_become_separate_messages_in_order() -> None:
    assert talk(
        ("user", [result(), result([text("a"), text("b")], is_error=True), text("and now?")])
    ) == [
        {"role": "tool", "tool_call_id": "call_1", "content": "out"},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [text("The call failed."), text("a"), text("b")],
        },
        {"role": "user", "content": [text("and now?")]},
    ]


def test_the_model_is_told_that_a_call_failed() -> None:
    (told,) = talk(("user", [result("no such file", is_error=True)]))
    assert told["content"] == "The call failed.\nno such file"


@pytest.mark.parametrize(("more", "content"), [({}, ""), ({"is_error": True}, "The call failed.")])
def test_a_result_may_be_empty(more: dict[str, Any], content: str) -> None:
    assert talk(("user", [{**result(**more), "content": None}]))[0]["content"] == content


@pytest.mark.parametrize(
    "block",
    [
        {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "a"},
        },
        {"type": "document", "title": "T", "source": {"type": "content", "content": "a"}},
        {"type": "document", "title": "T", "source": {"type": "content", "content": [text("a")]}},
        {"type": "search_result", "source": "https://x", "title": "T", "content": [text("a")]},
    ],
)
def test_documents_and_search_results_of_text_are_text(block: dict[str, Any]) -> None:
    assert talk(("user", [block])) == [{"role": "user", "content": [text("T\na")]}]
    assert talk(("user", [result([block])]))[0]["content"] == [text("T\na")]


def test_media_in_results_become_images_or_notes() -> None:
    png = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
    }
    read, image, note = talk(("user", [result([text("read"), png, pdf])]))[0]["content"]
    assert image["image"].field == "messages.0.content.0.content.1.source"
    assert [read, note] == [
        text("read"),
        text("[application/pdf left out: this model takes text only]"),
    ]


def test_a_found_tool_is_named_in_the_text_and_recorded() -> None:
    turns: Any = [
        {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "g"}])]}
    ]
    assert [*referenced_tools(turns)] == ["g"]
    assert talk(("user", turns[0]["content"]))[0]["content"] == [
        {"type": "tool_reference", "tool_name": "g"}
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "compaction",
        "mcp_tool_use",
        "mcp_tool_listing",
    ],
)
def test_content_for_anthropics_servers_is_left_out(kind: str) -> None:
    assert talk(("assistant", [{"type": kind, "data": "x"}, text("x")])) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("role", "blocks", "field"),
    [
        ("user", [{"type": "document", "source": {"type": "base64"}}], "messages.0.content.0"),
        (
            "user",
            [{"type": "document", "source": {"type": "text", "data": 1}}],
            "messages.0.content.0",
        ),
        (
            "user",
            [{"type": "search_result", "content": [{"type": "image"}]}],
            "messages.0.content.0",
        ),
        ("user", [{"type": "mystery"}], "messages.0.content.0.type"),
        ("user", [use()], "messages.0.content.0.type"),
        ("assistant", [result()], "messages.0.content.0.type"),
        ("system", [{"type": "image"}], "messages.0.content.0"),
    ],
)
def test_unsupported_content_is_refused_by_field(role: str, blocks: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        with_notes(talk((role, blocks)))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "image", "source": {}}, "messages.0.content.1.source"),
        ({"type": "image"}, "messages.0.content.1"),
    ],
)
def test_an_image_block_without_an_image_is_refused_by_field(
    block: dict[str, Any], field: str
) -> None:
    (turn,) = talk(("user", [text("x"), block]))
    with pytest.raises(InvalidRequest) as error:
        turn["content"][1]["image"].decoded(max_bytes=9)
    assert error.value.field == field


@given(
    st.recursive(
        st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
)
def test_arguments_are_the_same_json_again(value: Any) -> None:
    (message,) = talk(("assistant", [use(value=value)]))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"value": value}
