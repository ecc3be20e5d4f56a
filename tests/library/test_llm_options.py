from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.errors import InvalidRequest
from holdfast.front.request import (
    DEFAULT_ANSWER_TOKENS,
    ChatPrompt,
    OutputFormat,
    Thinking,
    ToolChoice,
)
from holdfast.library.llm import chat_request, generation_request

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


OF_SCHEMA = OutputFormat(
    kind="json_schema", schema=SCHEMA, field="response_format.json_schema.schema"
)


def asked(**options: Any) -> Any:
    return chat_request("hi", options)


def test_text_becomes_a_user_message_and_tools_join_the_prompt() -> None:
    request = asked(tools=[TOOL], template_options={"a": 1}, max_tokens=3)
    assert request.prompt == ChatPrompt(
        messages=({"role": "user", "content": "hi"},),
        tools=(TOOL,),
        template_options={"a": 1},
        has_images=False,
    )
    assert (request.max_tokens, request.prompt_field) == (3, "messages")


@pytest.mark.parametrize(("seed", "meant"), [(7, 7), (-2, 2**63 - 2), (0, 0), (-1, None)])
def test_the_seed_of_minus_one_is_random(seed: int, meant: int | None) -> None:
    assert asked(seed=seed).sampling.seed == meant


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ("look_up", ToolChoice(mode="required", names=("look_up",))),
        (
            {"type": "function", "function": {"name": "look_up"}},
            ToolChoice(mode="required", names=("look_up",)),
        ),
    ],
)
def test_a_tool_choice_is_a_word_or_a_name(choice: Any, meant: ToolChoice) -> None:
    assert asked(tools=[TOOL], tool_choice=choice).tool_choice == meant


def test_fields_of_the_chat_api_are_options() -> None:
    request = asked(
        tools=[TOOL],
        parallel_tool_calls=False,
        structured_outputs={"regex": "a+"},
        stop=("a", "b"),
        kv_bits=8,
    )
    assert not request.tool_choice.parallel
    assert request.output_format is not None and request.output_format.pattern == "a+"
    assert (request.stop, request.kv_bits) == (("a", "b"), "8")


@pytest.mark.parametrize(
    ("thinking", "meant"),
    [
        (None, Thinking()),
        (True, Thinking(effort="on")),
        (False, Thinking(effort="off")),
        ("low", Thinking(effort="low")),
        ({"type": "enabled", "budget_tokens": 5}, Thinking(effort="on", budget_tokens=5)),
    ],
)
def test_thinking_is_a_switch_an_effort_or_an_object(thinking: Any, meant: Thinking) -> None:
    assert asked(thinking=thinking).thinking == meant


@pytest.mark.parametrize(
    ("form", "meant"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputFormat(kind="json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            OF_SCHEMA,
        ),
        (SCHEMA, OF_SCHEMA),
    ],
)
def test_a_response_format_is_openais_or_a_schema(form: Any, meant: OutputFormat | None) -> None:
    assert asked(response_format=form).output_format == meant
    assert generation_request("Once", {"response_format": form}).output_format == meant


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [TOOL, {"function": {"name": 5}}]}, "tools.1.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "nobody"}, "tool_choice.function.name"),
        ({"thinking": "much"}, "thinking"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**options)
    assert refused.value.field == field


def test_numbers_of_numpy_are_options() -> None:
    given = asked(
        max_tokens=np.int64(5),
        top_logprobs=np.int32(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(7),
        seed=np.int64(9),
        logit_bias={np.int64(4): np.float64(1.5)},
        template_options={"share": np.float32(0.25), "flag": True},
    )
    meant = asked(
        max_tokens=5,
        top_logprobs=3,
        temperature=0.5,
        top_k=7,
        seed=9,
        logit_bias={4: 1.5},
        template_options={"share": 0.25, "flag": True},
    )
    encoded = [
        msgspec.json.encode(msgspec.structs.replace(each, request_id="")) for each in (given, meant)
    ]
    assert encoded[0] == encoded[1]


@pytest.mark.parametrize("value", [np.zeros(0), np.zeros(2), {}, object()])
@pytest.mark.parametrize("option", ["max_tokens", "stop", "top_logprobs"])
def test_an_option_of_a_wrong_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{option}`"):
        asked(**{option: value})


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_token;"):
        asked(max_token=5)
    with pytest.raises(TypeError, match="tools"):
        generation_request("Once", {"tools": [TOOL]})


def test_answers_have_a_length_limit_by_default() -> None:
    assert chat_request("hello", {}).max_tokens == DEFAULT_ANSWER_TOKENS
    assert chat_request("hello", {"max_tokens": 7}).max_tokens == 7
    assert chat_request("hello", {"max_tokens": None}).max_tokens is None
