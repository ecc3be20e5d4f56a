"""What an answer says, in short: texts as they are, ("thought", text), and (name, arguments, repairs) for each call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from holdfast.parsing.answer import AnswerReader
from holdfast.parsing.dialect import ModelDialect
from holdfast.parsing.formats.declared import DeclaredTools
from holdfast.parsing.segments import CallArguments, CallBegun, CallEnded, Segment


def told(
    dialect: ModelDialect, tools: Sequence[Mapping[str, Any]], text: str, *, at: Sequence[int] = (), **rules: bool
) -> list[Any]:
    """The answer, when it comes in pieces that are cut at these places (counted around). rules: of the reader."""
    reader = AnswerReader(dialect, tools=DeclaredTools(tools), **rules)
    encoded = dialect.markers.encode(text)
    edges = [0, *sorted(place % (len(encoded) + 1) for place in at), len(encoded)]
    parts = [part for start, end in pairwise(edges) for part in reader.push(encoded[start:end])] + [*reader.flush()]
    said: list[Any] = []
    name, arguments = "", ""
    for part in parts:
        match part:
            case Segment("text", more):
                said[-1:] = [said[-1] + more] if said and isinstance(said[-1], str) else [*said[-1:], more]
            case Segment(_, more):
                thinks = bool(said) and said[-1][0] == "thought" and isinstance(said[-1], tuple) and len(said[-1]) == 2
                said[-1:] = [("thought", said[-1][1] + more)] if thinks else [*said[-1:], ("thought", more)]
            case CallBegun():
                name, arguments = part.name, ""
            case CallArguments(more):
                arguments += more
            case CallEnded(repairs):
                said.append((name, json.loads(arguments), repairs))
    return said
