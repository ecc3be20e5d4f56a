"""Grammars of calls for every family: random samples are read as valid calls, and the family's own
calls are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

import jsonschema
import pytest

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.request import (
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    PromptText,
    ToolChoice,
)
from holdfast.front.structured.answer import AnswerGrammar, answer_grammar
from holdfast.front.structured.values import CallableTool, Members
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.families import FAMILIES
from tests.fakes.grammar_walker import accepts, demo_token_ids, random_answer
from tests.fakes.schemas import AGENTS
from tests.fakes.told_answers import told


def _tool(name: str, properties: Mapping[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*required], **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_NODE: Final = {
    "type": "object",
    "properties": {
        "value": {"type": "number", "minimum": 0, "maximum": 9},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
    },
    "required": ["value"],
}
_EDIT: Final = {
    "type": "object",
    "properties": {
        "line": {"type": "integer"},
        "text": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["line"],
}
_TOOLS: Final = (
    _tool(
        "get_weather",
        {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "maximum": 14},
            "unit": {"enum": ["C", "F"]},
        },
        "city",
    ),
    _tool("list_all", {}),
    _tool(
        "edit",
        {
            "path": {"type": "string", "pattern": "^/[a-z/]{1,12}$"},
            "edits": {"type": "array", "items": _EDIT, "minItems": 1, "maxItems": 2},
            "dry_run": {"type": "boolean"},
            "day": {"type": "string", "format": "date"},
        },
        *("path", "edits"),
    ),
    _tool(
        "tree",
        {
            "node": {"$ref": "#/$defs/node"},
            "mixed": {
                "anyOf": [
                    {"type": "string", "maxLength": 9},
                    {"type": "integer", "minimum": 5},
                    {"type": "null"},
                ]
            },
        },
        "node",
        **{"$defs": {"node": _NODE}},
    ),
)
_SCHEMAS: Final = {tool["function"]["name"]: tool["function"]["parameters"] for tool in _TOOLS}
_WEATHER: Final = Call("get_weather", {"city": 'Rome é"x', "days": 3})
_CALLS: Final = (
    _WEATHER,
    Call(
        "edit", {"path": "/a/b", "edits": [{"line": 1, "text": "x"}, {"line": 2}], "dry_run": True}
    ),
    Call("list_all", {}),
    Call("tree", {"node": {"value": 1.5, "parts": [{"value": 0}]}, "mixed": "so"}),
)
_CONSTRAINED: Final = sorted(
    name for name, family in FAMILIES.items() if family.calls.grammar_layouts
)
_AS_TOKENS: Final = ("hermes", "qwen3_coder", "glm47")
# text and calls in one stream
_MARKED: Final = sorted({*_CONSTRAINED} - {"harmony", "kimi_k3", "solar"})
_ALL_HELD = ToolsSettings(constrain="auto")


def _written(dialect: ModelDialect, *calls: Call) -> str:
    """The calls as the family writes them, with ids in its format."""
    assert dialect.calls is not None
    call_id = {"alnum9": "abc123XYZ", "number": "0"}.get(dialect.calls.id_form, "")
    return dialect.calls.write([call._replace(id=call_id) for call in calls])


def _dialect(family: str, *, as_tokens: bool = False) -> ModelDialect:
    calls = FAMILIES[family].calls
    marks = " ".join(calls.markers)
    token_ids = {text: token_id for text, token_id in demo_token_ids().items() if text in marks}
    return ModelDialect(family=family, calls=calls, marker_ids=token_ids if as_tokens else {})


def _grammar(
    dialect: ModelDialect,
    choice: ToolChoice,
    *,
    tools: Any = _TOOLS,
    settings: ToolsSettings = _ALL_HELD,
    **more: Any,
) -> AnswerGrammar:
    prompt = ChatPrompt(messages=(), tools=tools)
    request = GenerationRequest(
        request_id="r", model="m", prompt=prompt, tool_choice=choice, **more
    )
    return answer_grammar(
        request, dialect, prompt=PromptText(), limits=LimitsSettings(), tools=settings
    )


def _check(dialect: ModelDialect, answer: str) -> None:
    """The answer consists of calls that match their schemas and needed no repair."""
    calls = told(dialect, _TOOLS, answer)
    assert calls, answer
    for call in calls:
        assert isinstance(call, tuple), (call, answer)
        name, arguments, repairs = call
        assert repairs == (), (repairs, answer)
        jsonschema.validate(arguments, _SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@cache
def _required(family: str) -> str:
    return _grammar(_dialect(family), ToolChoice(mode="required")).text


# its random thoughts do not end
@pytest.mark.parametrize("family", [name for name in _CONSTRAINED if name != "harmony"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_samples_are_read_as_valid_calls(family: str, seed: int) -> None:
    _check(_dialect(family), random_answer(_required(family), seed=seed))


@pytest.mark.parametrize("family", _AS_TOKENS)
@pytest.mark.parametrize("seed", range(2))
def test_random_samples_with_marker_tokens_are_read_as_calls(family: str, seed: int) -> None:
    dialect = _dialect(family, as_tokens=True)
    _check(dialect, random_answer(_grammar(dialect, ToolChoice(mode="required")).text, seed=seed))


@pytest.mark.parametrize("family", [name for name in _CONSTRAINED if name != "harmony"])
def test_the_calls_that_a_family_writes_match_its_grammar(family: str) -> None:
    dialect, grammar = _dialect(family), _required(family)
    for calls in ([_WEATHER], _CALLS):
        assert accepts(grammar, _written(dialect, *calls)), _written(dialect, *calls)
    assert not accepts(grammar, "Hello!")
    assert not accepts(grammar, _written(dialect, Call("unknown", {})))
    assert not accepts(grammar, _written(dialect, Call("get_weather", {"days": 3})))
    assert not accepts(
        grammar, _written(dialect, Call("get_weather", {"city": "Rome", "days": 15}))
    )


@pytest.mark.parametrize(
    ("gap", "is_read"),
    [(" ", True), ("", True), ("\n", True), ("\n\n", False), ("\n    ", False), ("\n\t", False)],
)
def test_calls_begin_only_with_readable_white_space(gap: str, is_read: bool) -> None:
    dialect, grammar = _dialect("command_r_plus"), _required("command_r_plus")
    answer = f'Action:{gap}```json\n[{{"tool_name": "list_all", "parameters": {{}}}}]\n```'
    assert accepts(grammar, answer) == is_read
    assert (told(dialect, _TOOLS, answer) == [("list_all", {}, ())]) == is_read


@pytest.mark.parametrize("family", ["hermes", "mistral_v13", "kimi_k2", "deepseek_v31", "lfm2"])
def test_a_constrained_call_may_escape_characters_in_strings(family: str) -> None:
    dialect, tool = (
        _dialect(family),
        _tool("find", {"city": {"type": "string", "maxLength": 8}}, "city"),
    )
    grammar = _grammar(dialect, ToolChoice(mode="required"), tools=[tool]).text
    written = _written(dialect, Call("find", {"city": "Zürich 🙂"}))
    escaped = written.replace("ü", "\\u00fc").replace("🙂", "\\ud83d\\ude42")
    assert escaped != written
    assert accepts(grammar, escaped)
    assert told(dialect, [tool], escaped) == [("find", {"city": "Zürich 🙂"}, ())]


def test_only_tools_held_to_their_schemas_are_constrained() -> None:
    dialect = _dialect("hermes")
    grammar = _grammar(
        dialect, ToolChoice(enforced_names=("get_weather",)), settings=ToolsSettings()
    ).text
    assert accepts(grammar, _written(dialect, _WEATHER))
    assert not accepts(grammar, _written(dialect, Call("get_weather", {"days": 3})))
    assert accepts(grammar, _written(dialect, Call("edit", {"path": 5})))
    assert not accepts(grammar, _written(dialect, Call("unknown", {})))
    assert not _grammar(dialect, ToolChoice(), settings=ToolsSettings()).text


@pytest.mark.parametrize("family", _MARKED)
def test_optional_calls_are_held_to_their_schemas(family: str) -> None:
    dialect = _dialect(family)
    grammar = _grammar(dialect, ToolChoice()).text
    written = _written(dialect, _WEATHER)
    assert accepts(grammar, "Hello, <you> [and] {me}.")
    assert accepts(grammar, written)
    assert not accepts(grammar, written + "More.")
    assert not accepts(
        grammar, _written(dialect, Call("get_weather", {"city": "Rome", "days": 15}))
    )


@pytest.mark.parametrize("family", _MARKED)
def test_without_parallel_calls_an_answer_has_one_call(family: str) -> None:
    dialect = _dialect(family)
    grammar = _grammar(dialect, ToolChoice(mode="required", parallel=False)).text
    assert accepts(grammar, _written(dialect, _WEATHER))
    assert not accepts(grammar, _written(dialect, _WEATHER, Call("list_all", {})))


def test_too_many_tools_are_refused_in_one_short_sentence() -> None:
    # Each tool is fine alone; only this many exceed the limit of a grammar.
    listed = [[f"value {number} of {place}" for number in range(60)] for place in range(8)]
    tools = [
        _tool(
            f"tool_{at}",
            {f"a{place}_{at}": {"enum": values} for place, values in enumerate(listed)},
        )
        for at in range(150)
    ]
    with pytest.raises(InvalidRequest) as caught:
        _grammar(_dialect("hermes"), ToolChoice(mode="required"), tools=tools)
    assert "150 tools cannot be enforced together" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# one of each kind of syntax: JSON, tags for arguments, and a channel
_KINDS: Final = ("deepseek_v3_2", "glm47", "harmony", "hermes", "kimi_k2", "qwen3_coder")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name not in _KINDS else [])
        for name in _CONSTRAINED
    ],
)
@pytest.mark.parametrize("mode", ["required", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_tools_of_an_agent_are_not_too_many(
    family: str, mode: Literal["required", "auto"]
) -> None:
    tools = [
        {"type": "function", "function": {"name": name.replace(" ", "_"), "parameters": schema}}
        for name, schema in AGENTS.items()
    ]
    assert _grammar(_dialect(family), ToolChoice(mode=mode), tools=tools).text


def test_a_named_tool_is_the_only_one_called() -> None:
    dialect = _dialect("hermes", as_tokens=True)
    grammar = _grammar(dialect, ToolChoice(mode="required", names=("list_all",))).text
    assert accepts(grammar, '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>')
    assert not accepts(
        grammar, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    assert not accepts(
        grammar, "\n".join(['<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'] * 2)
    )


def test_a_choice_of_tools_leaves_their_arguments_unconstrained() -> None:
    dialect = _dialect("hermes", as_tokens=True)
    grammar = _grammar(dialect, ToolChoice(names=("get_weather",)), settings=ToolsSettings()).text
    assert accepts(grammar, "Hello!")
    assert accepts(
        grammar, '<tool_call>\n{"name": "get_weather", "arguments": {"city": 3}}\n</tool_call>'
    )
    assert not accepts(grammar, '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>')


def test_calls_are_not_constrained_by_default() -> None:
    assert _grammar(_dialect("hermes"), ToolChoice(), settings=ToolsSettings()) == AnswerGrammar()


def test_a_strict_tool_follows_its_schema_others_their_names() -> None:
    strict = {"type": "function", "function": {**_TOOLS[0]["function"], "strict": True}}
    grammar = _grammar(
        _dialect("hermes", as_tokens=True),
        ToolChoice(),
        tools=(strict, _TOOLS[2]),
        settings=ToolsSettings(),
    ).text
    assert accepts(
        grammar, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    assert not accepts(
        grammar, '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    )
    assert accepts(
        grammar, '<tool_call>\n{"name": "edit", "arguments": {"anything": 1}}\n</tool_call>'
    )


_LOOP: Final = {"$ref": "#/$defs/loop"}
_IN_LOOPS: Final = {
    "type": "object",
    "properties": {"x": _LOOP, "y": _LOOP, "z": _LOOP},
}
_LOOPS: Final = {
    "properties": {"a": _LOOP},
    "$defs": {"loop": {"anyOf": [_LOOP, _LOOP, _IN_LOOPS, {**_IN_LOOPS, "required": ["x"]}]}},
}


def test_a_union_that_contains_itself_has_each_alternative_once() -> None:
    tool = CallableTool(name="t", arguments=_LOOPS)
    assert tool.alternatives(_LOOP) == [_IN_LOOPS, {**_IN_LOOPS, "required": ["x"]}]


def test_a_union_of_nothing_but_itself_allows_any_value() -> None:
    tool = CallableTool(name="t", arguments={"$defs": {"loop": {"anyOf": [_LOOP, _LOOP]}}})
    assert tool.alternatives(_LOOP) == [{}]


def test_references_with_different_bounds_are_different_alternatives() -> None:
    text = {"type": "string"}
    tool = CallableTool(name="t", arguments={"$defs": {"loop": text}})
    union = {"anyOf": [{**_LOOP, "maxLength": 1}, {**_LOOP, "minLength": 9}]}
    assert tool.alternatives(union) == [{**text, "maxLength": 1}, {**text, "minLength": 9}]


def test_each_part_of_an_object_counts_once() -> None:
    whole = {"allOf": [_LOOP, _LOOP, {"required": ["x"]}], "minProperties": 1}
    tool = CallableTool(name="t", arguments={"$defs": {"loop": whole}})
    assert tool.members(whole) == Members(
        properties={"x": True},
        required=frozenset({"x"}),
        others=True,
        unenforced=("minProperties",),
    )


@pytest.mark.parametrize("family", _CONSTRAINED)
def test_a_union_that_contains_itself_has_a_small_grammar(family: str) -> None:
    tools = ({"type": "function", "function": {"name": "t", "parameters": _LOOPS}},)
    grammar = _grammar(_dialect(family), ToolChoice(mode="required"), tools=tools)
    assert len(grammar.text) < 20_000


def test_tool_choice_none_makes_calls_impossible() -> None:
    choice = ToolChoice(mode="none")
    banned = _grammar(_dialect("hermes", as_tokens=True), choice)
    assert (banned.text, banned.banned_token_ids) == ("", (demo_token_ids()["<tool_call>"],))
    assert _grammar(_dialect("muse_spark", as_tokens=True), choice) == AnswerGrammar()
    grammar = _grammar(_dialect("minimax_m2"), choice).text
    assert accepts(grammar, "Hello <minimax> you")
    assert not accepts(grammar, "Hello <minimax:tool_call> you")


def test_an_answer_with_a_format_may_be_a_call_instead() -> None:
    form = OutputFormat(
        kind="json_schema", schema={"type": "object", "properties": {"x": {"type": "integer"}}}
    )
    grammar = _grammar(_dialect("hermes", as_tokens=True), ToolChoice(), output_format=form).text
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "Hello!")


def test_messages_in_channels_have_their_headers() -> None:
    dialect = _dialect("harmony")
    called = _grammar(dialect, ToolChoice(mode="required")).text
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
    for answer in (call, thought + call):
        assert accepts(called, answer)
        assert told(dialect, _TOOLS, answer)[-1] == ("get_weather", {"city": "Rome"}, ())
    assert not accepts(called, "<|channel|>final<|message|>Hello!")
    said = _grammar(
        dialect, ToolChoice(mode="none"), output_format=OutputFormat(kind="json_object")
    ).text
    assert accepts(said, thought + '<|channel|>final<|message|>{"a": 1}')
    assert not accepts(said, '{"a": 1}')


def test_a_required_call_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _grammar(ModelDialect(), ToolChoice(mode="required"))
    assert caught.value.field == "tool_choice"


def test_an_unenforceable_keyword_is_reported_or_refused_if_strict() -> None:
    tool = _tool(
        "tags", {"names": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}
    )
    dialect = _dialect("hermes")
    assert _grammar(dialect, ToolChoice(mode="required"), tools=(tool,)).unenforced == (
        "tags/properties/names/uniqueItems",
    )
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    with pytest.raises(InvalidRequest) as caught:
        _grammar(dialect, ToolChoice(), tools=(_TOOLS[0], strict))
    assert caught.value.field == "tools.1.function.parameters"
    assert "uniqueItems" in str(caught.value)


def test_a_grammar_is_the_json_of_llguidance() -> None:
    text = _grammar(_dialect("hermes"), ToolChoice(mode="required")).text
    assert [each["name"] for each in json.loads(text)["grammars"]] == ["answer"]
