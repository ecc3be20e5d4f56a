"""The parts of an answer in short form: texts unchanged, ("thought", text), and (name, arguments,
repairs) for each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from holdfast.front.answers.answer import AnswerReader
from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.output import (
    OutputEvent,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.toolcalls.call_format import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Segment,
)
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.wire.events import Finished, FinishReason, TokensGenerated
from holdfast.wire.requests import TokenIds


def told(
    dialect: ModelDialect,
    tools: Sequence[Mapping[str, Any]],
    text: str,
    *,
    at: Sequence[int] = (),
    ends_cut: bool = False,
    **rules: bool,
) -> list[Any]:
    """The answer in pieces cut at these positions (modulo the length). rules: of the reader.

    ends_cut: the answer was cut by length.
    """
    reader = AnswerReader(dialect, tools=DeclaredTools(tools), **rules)
    encoded = dialect.markers.encode(text)
    edges = [0, *sorted(place % (len(encoded) + 1) for place in at), len(encoded)]
    parts = [part for start, end in pairwise(edges) for part in reader.push(encoded[start:end])]
    return _folded([*parts, *reader.flush(cut=ends_cut)])


def heard(events: Iterable[OutputEvent]) -> list[Any]:
    """The same from a client's deltas."""
    return _folded(part for event in events for part in _parts(event))


def by_tokens(
    tokenizer: Tokenizer,
    dialect: ModelDialect,
    tools: Sequence[Mapping[str, Any]],
    text: str,
    *,
    reason: FinishReason = FinishReason.STOP,
    **more: Any,
) -> list[OutputEvent]:
    """The deltas for a client of an answer that arrives token by token and ends for this reason.
    more: rules of the choice.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    rules = ChoiceRules(
        prompt_token_ids=TokenIds.of((1,)),
        stop_token_ids=frozenset(),
        max_tokens=len(token_ids) + 1,
        dialect=dialect,
        tools=DeclaredTools(tools),
        reads_calls=True,
        **more,
    )
    choice = ChoiceText(index=0, pieces=tokenizer.pieces, rules=rules)
    ended = Finished(
        request_id="r/0", reason=reason, prompt_tokens=1, completion_tokens=len(token_ids)
    )
    generated = (TokensGenerated(request_id="r/0", token_ids=(token_id,)) for token_id in token_ids)
    return [event for news in (*generated, ended) for event in choice.feed(news)]


def _parts(event: OutputEvent) -> Iterator[AnswerPart]:
    match event:
        case TextDelta(text=text, kind=kind) if text:
            yield Segment(kind, text)
        case ToolCallStarted():
            yield CallBegun(event.name)
        case ToolArgumentsDelta():
            yield CallArguments(event.text)
        case ToolCallFinished():
            yield CallEnded(event.repairs)


def _folded(parts: Iterable[AnswerPart]) -> list[Any]:
    said: list[Any] = []
    name, arguments = "", ""
    for part in parts:
        match part:
            case Segment("text", more):
                said[-1:] = (
                    [said[-1] + more] if said and isinstance(said[-1], str) else [*said[-1:], more]
                )
            case Segment(_, more):
                thinks = (
                    bool(said)
                    and said[-1][0] == "thought"
                    and isinstance(said[-1], tuple)
                    and len(said[-1]) == 2
                )
                said[-1:] = (
                    [("thought", said[-1][1] + more)] if thinks else [*said[-1:], ("thought", more)]
                )
            case CallBegun():
                name, arguments = part.name, ""
            case CallArguments(more):
                arguments += more
            case CallEnded(repairs):
                said.append((name, json.loads(arguments), repairs))
    return said
