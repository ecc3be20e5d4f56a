"""Images and other media, which no model here reads: refused where a user sends them, named where a
tool has given them.

The result of a tool comes back with every further turn, and whoever runs an agent cannot take it
out of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.unsupported import log_once

_WORDS = ("image", "audio", "video", "file", "document", "container_upload", "search_result")
_MEDIA_TYPE = re.compile(r"^(?:data:)?([a-z]{1,20}/[a-zA-Z0-9.+-]{1,60})(?:[;,]|\Z)")
_LONGEST_SHOWN, _LONGEST_NAMED = 40, 100


def is_media(kind: str) -> bool:
    """Whether parts of that type are media."""
    return any(word in kind for word in _WORDS)


def refused_media(kind: str, *, field: str) -> RequestRefused:
    """What to raise for a part of that type in a place where only text can stand."""
    shown = f"; got a part of type {kind[:_LONGEST_SHOWN]!r}"
    return RequestRefused(
        f"`{field}`: only text is supported so far",
        code="unsupported_content",
        field=field,
        shown=shown,
    )


def without_media(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a tool's result, with a note in the place of each that is media.

    Logged once for each type.
    """
    return [_note(part) if is_media(part["type"]) else dict(part) for part in parts]


def _note(part: Mapping[str, Any]) -> dict[str, str]:
    kind = part["type"]
    log_once("media in the results of tools are left out, as models here take text only: %r", kind)
    what = next(_media_types(part), kind[:_LONGEST_SHOWN])
    return {"type": "text", "text": f"[{what} left out: this model takes text only]"}


def _media_types(part: Mapping[str, Any]) -> Iterator[str]:
    """Those that a part names, as the protocols have them: in a data URL, or in a field of its own."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _media_types(value)
        elif isinstance(value, str) and (name == "media_type" or value.startswith("data:")):
            yield from _MEDIA_TYPE.findall(value[:_LONGEST_NAMED])
