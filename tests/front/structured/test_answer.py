"""Grammars of answers: the texts they accept, with and without a thought, and refused formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.config import LimitsSettings, ToolsSettings
from holdfast.errors import InvalidRequest
from holdfast.front.request import ChatPrompt, GenerationRequest, OutputFormat, PromptText
from holdfast.front.structured.answer import UNCONSTRAINED, answer_grammar
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect, ReasoningFormat
from tests.fakes.grammar_walker import accepts, demo_token_ids

_TEXT_MARKERS = ModelDialect(reasoning=ReasoningFormat(start="<seed:think>", end="</seed:think>"))
_NO_PROMPT = PromptText()
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def _dialect() -> ModelDialect:
    return ModelDialect(
        reasoning=ReasoningFormat(start="<think>", end="</think>"), marker_ids=demo_token_ids()
    )


def _grammar(
    form: OutputFormat, *, dialect: ModelDialect = PLAIN, prompt: PromptText = _NO_PROMPT
) -> str:
    request = GenerationRequest(
        request_id="r", model="m", prompt=ChatPrompt(messages=()), output_format=form
    )
    return answer_grammar(
        request, dialect, prompt=prompt, limits=LimitsSettings(), tools=ToolsSettings()
    ).text


def _schema(schema: Any) -> OutputFormat:
    return OutputFormat(
        kind="json_schema", schema=schema, field="response_format.json_schema.schema"
    )


def test_an_answer_without_a_format_is_unconstrained() -> None:
    request = GenerationRequest(request_id="r", model="m", prompt=ChatPrompt(messages=()))
    assert (
        answer_grammar(
            request, PLAIN, prompt=_NO_PROMPT, limits=LimitsSettings(), tools=ToolsSettings()
        )
        is UNCONSTRAINED
    )


def test_a_json_object_may_have_any_members() -> None:
    grammar = _grammar(OutputFormat(kind="json_object"))
    assert accepts(grammar, '{"a": [1, {"b": null}], "c": "é"}')
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, "Sure: {}")
    assert not accepts(grammar, '{"a": 1')


def test_a_schema_is_enforced_without_undeclared_members() -> None:
    grammar = _grammar(_schema(_PERSON))
    assert accepts(grammar, '{"name": "Ada", "age": 36}')
    assert accepts(grammar, '{"name":"Ada"}')
    for wrong in ('{"age": 36}', '{"name": 1}', '{"name": "Ada", "more": 1}', '{"name": "Ada"} '):
        assert not accepts(grammar, wrong), wrong


def test_white_space_is_bounded_and_typical_of_models() -> None:
    grammar = _grammar(_schema(_PERSON))
    assert accepts(grammar, '{\n    "name": "Ada",\n    "age": 36\n}')
    assert not accepts(grammar, '{  "name": "Ada"}')
    assert not accepts(grammar, '{\n\n"name": "Ada"}')


def nested(levels: int, *, in_definitions: bool = False) -> tuple[dict[str, Any], Any]:
    """A schema of objects nested this deep, and a matching value.

    in_definitions: whether each object is a separate definition, as in Pydantic's schemas.
    """
    schema: dict[str, Any] = {"type": "integer"}
    value: Any = 7
    definitions: dict[str, Any] = {}
    for level in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        value = {"a": value}
        if in_definitions:
            definitions[f"of{level}"] = schema
            schema = {"$ref": f"#/$defs/of{level}"}
    return ({**schema, "$defs": definitions} if definitions else schema), value


@pytest.mark.parametrize("in_definitions", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_json_is_indented_exactly_as_deep_as_its_nesting(levels: int, in_definitions: bool) -> None:
    """A weak model could write 25 spaces after each token of the smallest object."""
    schema, value = nested(levels, in_definitions=in_definitions)
    grammar = _grammar(_schema(schema))
    for indent in (None, 1, 2, 4, "\t"):
        assert accepts(grammar, json.dumps(value, indent=indent))
    most = 4 * (levels + 1)
    assert accepts(grammar, "{\n" + " " * most + '"a":' + json.dumps(value["a"]) + "}")
    for blanks in (" " * (most + 1), "\t" * (levels + 2), "\t ", " \t"):
        for place in ('{%s"a":', '{"a"%s:', '{"a":%s'):
            assert not accepts(grammar, place % f"\n{blanks}" + json.dumps(value["a"]) + "}")


def test_recursive_and_unconstrained_values_may_be_indented() -> None:
    tree = {"$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}}}
    _, value = nested(4)
    value = json.loads(json.dumps(value).replace("7", "{}"))
    for form in (_schema({**tree, "$ref": "#/$defs/t"}), OutputFormat(kind="json_object")):
        grammar = _grammar(form)
        for indent in (None, 2, 4, "\t"):
            assert accepts(grammar, json.dumps(value, indent=indent))
        assert not accepts(grammar, "{\n" + " " * 25 + "}")


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (
            OutputFormat(kind="choice", choices=("yes", 'no "way"', "é\n/")),
            ("yes", 'no "way"', "é\n/"),
            ("y", "yes yes", ""),
        ),
        (OutputFormat(kind="regex", pattern=r"a/\d+é?\"x"), ('a/12é"x',), ('a/"x', '/12"x')),
        (
            OutputFormat(kind="lark", pattern='start: "x" y\ny: %json {"type": "integer"}'),
            ("x12",),
            ("x", "12"),
        ),
        (
            _schema({"type": "array", "items": {"type": "integer"}}),
            ("[1, 2]", "[]"),
            ('["a"]', "{}"),
        ),
        (_schema(True), ("1", '"a"', "null"), ("nil",)),
    ],
)
def test_a_format_accepts_valid_answers_only(
    form: OutputFormat, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    grammar = _grammar(form)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_a_thought_may_come_first_and_is_unconstrained() -> None:
    grammar = _grammar(_schema(_PERSON), dialect=_dialect())
    assert accepts(grammar, '<think>\nWhat {"name"?\n</think>\n\n{"name": "Ada"}')
    assert accepts(grammar, '{"name": "Ada"}')
    assert not accepts(grammar, "<think>no end")
    assert not accepts(grammar, "<think>a</think>text")
    assert not accepts(grammar, '<think>a <tool_call> b</think>{"name": "Ada"}')


def test_a_thought_opened_by_the_prompt_must_be_ended() -> None:
    grammar = _grammar(
        _schema(_PERSON),
        dialect=_dialect(),
        prompt=PromptText(text="<|im_start|>assistant\n<think>\n", in_reasoning=True),
    )
    assert accepts(grammar, 'hm</think>{"name": "Ada"}')
    assert not accepts(grammar, '{"name": "Ada"}')


def test_a_thought_closed_by_the_prompt_is_not_repeated() -> None:
    grammar = _grammar(
        _schema(_PERSON),
        dialect=_dialect(),
        prompt=PromptText(text="assistant\n<think>\n\n</think>\n\n"),
    )
    assert accepts(grammar, '{"name": "Ada"}')
    assert not accepts(grammar, '<think>hm</think>{"name": "Ada"}')


@pytest.mark.parametrize("is_open", [False, True])
def test_markers_that_are_not_tokens_are_text_in_the_grammar(is_open: bool) -> None:
    grammar = _grammar(
        _schema(_PERSON),
        dialect=_TEXT_MARKERS,
        prompt=PromptText(text="<seed:think>", in_reasoning=is_open),
    )
    opened = "" if is_open else "<seed:think>"
    assert accepts(grammar, opened + 'a </seed b</seed:think>\n{"name": "Ada"}')
    assert accepts(grammar, '{"name": "Ada"}') is not is_open


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (
            OutputFormat(kind="regex", pattern="a(", field="structured_outputs.regex"),
            "unclosed group",
        ),
        (OutputFormat(kind="regex", pattern="(?=a)b", field="guided_regex"), "look-ahead"),
        (
            OutputFormat(kind="regex", pattern="(a{1000}){1000}", field="guided_regex"),
            "repeats too often",
        ),
        (
            OutputFormat(kind="lark", pattern="start: /(a{1000}){1000}/", field="guided_grammar"),
            "repeats too often",
        ),
        (
            OutputFormat(kind="lark", pattern="start: /a/ " * 2000, field="guided_grammar"),
            "characters",
        ),
        (OutputFormat(kind="choice", choices=("x" * 30_000,), field="guided_choice"), "characters"),
        (
            OutputFormat(
                kind="lark",
                pattern='start: %json {"type": "integer", "const": -1e19}',
                field="guided_grammar",
            ),
            "64-bit",
        ),
        (
            OutputFormat(kind="lark", pattern='start: "a" start', field="guided_grammar"),
            "Too many items",
        ),
        (
            OutputFormat(kind="lark", pattern="start: missing", field="guided_grammar"),
            'unknown name: "missing"',
        ),
        (OutputFormat(kind="lark", pattern="first: /a/", field="guided_grammar"), "start"),
        (
            _schema({"type": "object", "properties": {"a": {"uniqueItems": True}}}),
            "'uniqueItems' cannot be enforced, at #/properties/a",
        ),
        (_schema({"$ref": "https://example.com/schema"}), "other documents are not loaded"),
        (_schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    ],
)
def test_an_unenforceable_format_is_refused_with_the_reason(form: OutputFormat, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _grammar(form)
    assert caught.value.field == form.field
    assert said in str(caught.value)
    assert said not in caught.value.loggable or "properties" not in caught.value.loggable
