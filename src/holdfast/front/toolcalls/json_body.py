"""Arguments as one JSON object behind a header or marker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.front.toolcalls.call_format import CallParts
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.json_stream import JsonStream
from holdfast.front.toolcalls.typed_values import json_text

_STRING: Final = frozenset({"string"})


def read_arguments(
    source: Incoming, parts: CallParts, tool: ToolName, *, ends: Sequence[str], repair: str = ""
) -> Waiting[None]:
    """Read the body of a call up to one of the ends, which is not read.

    What is no object becomes the tool's only string.
    """
    parts.begin(tool, repair=repair)
    yield from source.skip_space()
    if source.text.startswith("{", source.place):
        stream = JsonStream(source, parts.json, stops=tuple(ends))
        yield from stream.read()
        parts.repair(*stream.repairs)
        rest = yield from _up_to(source, ends)
        parts.end("text_behind_arguments" if rest.strip() else "", complete=True)
    else:
        text = yield from _up_to(source, ends)
        if text.strip():
            strings = [key for key in parts.types.properties if parts.types.of(key) == _STRING]
            parts.key(strings[0] if len(strings) == 1 else "input")
            parts.json(json_text(text))
        parts.end("raw_arguments" if text.strip() else "no_arguments")
    source.drop_read()


def _up_to(source: Incoming, ends: Sequence[str]) -> Waiting[str]:
    at, _ = yield from source.find(ends, source.place)
    text, source.place = source.text[source.place : at], at
    return source.plain(text)
