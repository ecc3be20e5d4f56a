"""The parts of an answer in short form: texts unchanged, ("thought", text), and (name, arguments,
repairs) for each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.answers.reader import AnswerReader
from holdfast.front.output import (
    ChoiceFinished,
    OutputEvent,
    PromptProgress,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.prompt.tokenize import Tokenizer
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
    return _folded([*parts, *reader.flush(was_cut_off=ends_cut)])


def heard(events: Iterable[OutputEvent]) -> list[Any]:
    """The same from a client's deltas."""
    return _folded(events)


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
    choice = ChoiceText(pieces=tokenizer.pieces, rules=rules)
    ended = Finished(
        request_id="r/0", reason=reason, prompt_tokens=1, completion_tokens=len(token_ids)
    )
    generated = (TokensGenerated(request_id="r/0", token_ids=(token_id,)) for token_id in token_ids)
    return [event for news in (*generated, ended) for event in choice.feed(news)]


def _folded(events: Iterable[OutputEvent]) -> list[Any]:
    said: list[Any] = []
    name, arguments = "", ""
    for event in events:
        match event:
            case TextDelta(text="") | ChoiceFinished() | PromptProgress():
                pass
            case TextDelta(text=more, kind="text"):
                said[-1:] = (
                    [said[-1] + more] if said and isinstance(said[-1], str) else [*said[-1:], more]
                )
            case TextDelta(text=more):
                thinks = (
                    bool(said)
                    and said[-1][0] == "thought"
                    and isinstance(said[-1], tuple)
                    and len(said[-1]) == 2
                )
                said[-1:] = (
                    [("thought", said[-1][1] + more)] if thinks else [*said[-1:], ("thought", more)]
                )
            case ToolCallStarted():
                name, arguments = event.name, ""
            case ToolArgumentsDelta(text=more):
                arguments += more
            case ToolCallFinished(repairs=repairs):
                said.append((name, json.loads(arguments), repairs))
    return said
