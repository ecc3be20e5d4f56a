"""Checks of a family of models: how its right and wrong answers are read, and whether its turns
continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from tests.fakes import mistaken_answers, mistaken_json, recorded_answers
from tests.fakes.agent_turns import turns
from tests.fakes.told_answers import by_tokens, heard, told

_ARGUMENTS = {"city": 'R"om\n<é🙂', "days": 3, "opt": {"a": [1, True], "b": "x y"}}
_PLACE = {"XX": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyAnswer:
    """A text written by a model, and its parts; see `told`."""

    text: str
    tools: Sequence[Mapping[str, Any]]
    says: Sequence[Any]


def right_answers(bundle: TokenizerBundle) -> Iterator[FamilyAnswer]:
    """Recorded answers of the bundle's family, and its own calls."""
    dialect, tools = bundle.dialect, recorded_answers.TOOLS
    assert dialect.calls is not None
    for name, text, says in recorded_answers.RECORDED:
        if name == dialect.family:
            yield FamilyAnswer(text=text, tools=tools, says=says)
    for name, text, repairs in mistaken_json.OTHER_FORMS:
        if name == dialect.family:
            yield FamilyAnswer(
                text=text,
                tools=mistaken_json.TOOLS,
                says=[("get_weather", mistaken_json.ROM, repairs)],
            )
    calls = [
        Call("get_weather", _ARGUMENTS, "functions.get_weather:0"),
        Call("get_time", {}, "functions.get_time:1"),
    ]
    for some in (calls[:1], calls[1:], *([calls] if bundle.dialect_report.parallel else [])):
        yield FamilyAnswer(
            text=dialect.calls.write(some),
            tools=tools,
            says=[(call.name, dict(call.arguments), ()) for call in some],
        )
    if dialect.reasoning is not None:
        thought = f"{dialect.reasoning.start}Hm.{dialect.reasoning.end}"
        says = [("thought", "Hm."), ("get_weather", _ARGUMENTS, ())]
        yield FamilyAnswer(text=thought + dialect.calls.write(calls[:1]), tools=tools, says=says)


def wrong_answers(bundle: TokenizerBundle) -> Iterator[FamilyAnswer]:
    """The mistakes of the bundle's family: recorded ones, and mistaken JSON arguments if it writes
    them as JSON.
    """
    dialect = bundle.dialect
    for name, text, says in mistaken_answers.MISTAKES:
        if name == dialect.family:
            yield FamilyAnswer(text=text, tools=recorded_answers.TOOLS, says=says)
    if dialect.family == "hermes":
        for text, repairs in mistaken_json.MISTAKEN_CALLS:
            yield FamilyAnswer(
                text=text,
                tools=mistaken_json.TOOLS,
                says=[("get_weather", mistaken_json.ROM, repairs)],
            )
    if isinstance(dialect.calls, (JsonCalls, NamedJson)):
        call = dialect.calls.write([Call("write_file", _PLACE, "functions.write_file:0")])
        for written, arguments, repairs in mistaken_json.MISTAKEN_ARGUMENTS:
            text = call.replace('{"XX": 0}', written)
            yield FamilyAnswer(
                text=text, tools=mistaken_json.TOOLS, says=[("write_file", arguments, repairs)]
            )


def is_read_however_cut(dialect: ModelDialect, answer: FamilyAnswer) -> bool:
    """Whether an answer has the expected parts, whole, by characters and in pieces of 3 and 7, with
    markers as tokens or text.
    """
    cuts = ([], *(range(0, len(answer.text), step) for step in (1, 3, 7)))
    models = (dialect, replace(dialect, marker_ids={}))
    return all(
        told(model, answer.tools, answer.text, at=at) == answer.says
        for model in models
        for at in cuts
    )


def streams_as_whole(bundle: TokenizerBundle, answer: FamilyAnswer) -> bool:
    """Whether a client sees the same parts token by token as in the whole answer."""
    whole = told(bundle.dialect, answer.tools, answer.text)
    return heard(by_tokens(bundle.tokenizer, bundle.dialect, answer.tools, answer.text)) == whole


def turns_go_on(bundle: TokenizerBundle) -> bool:
    """Whether the prompt of each next turn begins with all tokens of the turn before, for every way
    to send thoughts back.
    """
    pairs = (
        pair
        for keeps_thoughts in (True, False)
        for pair in turns(bundle, keeps_thoughts=keeps_thoughts)
    )
    return all(after[: len(before)] == before for before, after in pairs)
