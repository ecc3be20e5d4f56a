"""With tools and an output format, a model may write the document or a call in every readable form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from holdfast.front.request import OutputFormat, ToolChoice
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import ModelDialect
from tests.fakes.family_bundles import found_in
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.template_answers import TOOLS, WrittenAnswer, grammar_of, refusal
from tests.fakes.told_answers import by_tokens, heard

_ASKED: Final = WrittenAnswer(prompt="", text="", in_reasoning=False)
_ARGUMENTS: Final = {"query": "Rome", "limit": 3}
_DOCUMENTS: Final[dict[str, tuple[Any, list[str]]]] = {
    "other names": (
        {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
        ['{"title": "Rome"}', '{\n  "title": "find_places"\n}'],
    ),
    "the names of a call": (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        ['{"name": "Ann", "age": 3}', '{"name": "find_places", "age": 3}'],
    ),
    "any": ({"type": "object"}, ['{"name": "Ann"}', "{}", '{"arguments": {"a": 1}}']),
    "a list": ({"type": "array", "items": {"type": "object"}}, ['[{"a": 1}, {"name": "x"}]', "[]"]),
}


def _forms(dialect: ModelDialect) -> Iterator[str]:
    """A call in every form that the reader accepts."""
    call_id = {"alnum9": "abc123XYZ", "number": "0"}
    for form in dialect.readable_formats:
        call = Call("find_places", _ARGUMENTS, call_id.get(form.id_form, ""))
        for layout in (*form.grammar_layouts, *form.incomplete_layouts):
            yield layout.write([call], form.id_form)
        if form.bare_keys is not None:
            yield from _bare(*form.bare_keys)


def _bare(
    names: tuple[str, ...], keys: tuple[str, ...], closings: tuple[str, ...]
) -> Iterator[str]:
    if not names:
        yield json.dumps({"find_places": _ARGUMENTS})
        return
    for name in names:
        for key in keys:
            yield json.dumps({name: "find_places", key: _ARGUMENTS})
    call = {names[0]: "find_places", keys[0]: _ARGUMENTS}
    yield json.dumps({keys[0]: _ARGUMENTS, names[0]: "find_places"})
    yield json.dumps({"type": "function", **call})
    yield json.dumps([call])
    yield json.dumps(call, indent=2)
    if closings:
        yield json.dumps(call) + "\n" + closings[0]


def _grammar(dialect: ModelDialect, schema: Any, **choice: Any) -> str:
    form = OutputFormat(kind="json_schema", schema=schema)
    return grammar_of(dialect, _ASKED, ToolChoice(**choice), output_format=form)


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_every_readable_call_may_replace_a_document(name: str) -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    dialect = found.dialect
    assert dialect.calls is not None
    forms = list(_forms(dialect))
    for text in forms:
        [(called, arguments, _)] = heard(by_tokens(tokenizer, dialect, TOOLS, text))
        assert (called, arguments) == ("find_places", _ARGUMENTS), text
    wrong = '{"name": "no_tool", "arguments": {"query": "Rome"}}'
    kinds = _DOCUMENTS if dialect.calls.bare_keys is not None else ["other names"]
    for kind in kinds:
        grammar = _grammar(dialect, _DOCUMENTS[kind][0])
        for text in forms:
            assert not refusal(tokenizer, dialect, grammar, text), (kind, text)
        assert kind == "any" or refusal(tokenizer, dialect, grammar, wrong)


@pytest.mark.parametrize("kind", sorted(_DOCUMENTS))
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_documents_are_accepted_as_without_tools(name: str, kind: str) -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES[name])
    dialect = found.dialect
    assert dialect.calls is not None
    before, after = ("", "") if dialect.calls.channels is None else dialect.calls.channels.text
    schema, documents = _DOCUMENTS[kind]
    grammar = _grammar(dialect, schema)
    for document in documents:
        assert not refusal(tokenizer, dialect, grammar, before + document + after), document
    assert refusal(tokenizer, dialect, grammar, before + "I think that")


def test_several_bare_calls_need_parallel_calls() -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES["qwen3"])
    call = json.dumps({"name": "find_places", "arguments": _ARGUMENTS})
    schema, _ = _DOCUMENTS["other names"]
    for text in (f"{call}\n{call}", f"{call}; {call}", f"[{call}, {call}]"):
        for parallel in (True, False):
            grammar = _grammar(found.dialect, schema, parallel=parallel)
            assert bool(refusal(tokenizer, found.dialect, grammar, text)) is not parallel, text


def test_the_arguments_of_a_bare_call_must_match_their_schema() -> None:
    found, tokenizer = found_in(FAMILY_TEMPLATES["qwen3"])
    grammar = _grammar(found.dialect, _DOCUMENTS["other names"][0])
    for arguments in ({"limit": 3}, {"query": 5}, {"query": "Rome", "limit": "many"}):
        text = json.dumps({"name": "find_places", "arguments": arguments})
        assert refusal(tokenizer, found.dialect, grammar, text), text
