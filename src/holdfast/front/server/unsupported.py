"""What clients send and this server does not support: known fields, images and other media.

Fields are refused, not ignored. Media are refused in a user's message. In a tool's result they are
replaced by a note: the result comes back with every turn, and an agent's user cannot remove it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.front.server.problem import RequestRefused

_log = logging.getLogger(__name__)
_NOT_YET = "this version does not support it yet"
_MOST_REMEMBERED = 1000
_already_logged: set[str] = set()
_MEDIA_WORDS = ("image", "audio", "video", "file", "document", "container_upload", "search_result")
_MEDIA_TYPE = re.compile(r"^(?:data:)?([a-z]{1,20}/[a-zA-Z0-9.+-]{1,60})(?:[;,]|\Z)")
_LONGEST_SHOWN = 40
_LONGEST_NAMED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFields:
    """The unsupported fields of a dialect.

    neutral: for each field, the values that ask for nothing; null always does.
    reasons: why a field is unsupported, where there is more to say than "not yet".
    """

    neutral: Mapping[str, tuple[Any, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, extras: Mapping[str, Any] | None) -> None:
        """Raise RequestRefused for the first field that asks for something unsupported; log each
        unknown field once.
        """
        for name, value in (extras or {}).items():
            if name not in self.neutral:
                log_once("ignored an unknown request field: %r", name)
            elif value is not None and not any(
                _same(value, neutral) for neutral in self.neutral[name]
            ):
                reason = self.reasons.get(name, _NOT_YET)
                raise RequestRefused(
                    f"`{name}`: {reason}", code="unsupported_parameter", field=name
                )


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def log_once(message: str, name: str) -> None:
    """Log a warning once for each name; `message` is a format string with a place for it."""
    if name not in _already_logged and len(_already_logged) < _MOST_REMEMBERED:
        _already_logged.add(name)
        _log.warning(message, name[:100])


def is_media(kind: str) -> bool:
    """Whether message parts of this type are media."""
    return any(word in kind for word in _MEDIA_WORDS)


def refused_media(kind: str, *, field: str) -> RequestRefused:
    """The error for a media part where only text is allowed."""
    shown = f"; got a part of type {kind[:_LONGEST_SHOWN]!r}"
    return RequestRefused(
        f"`{field}`: only text is supported so far",
        code="unsupported_content",
        field=field,
        shown=shown,
    )


def without_media(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a tool's result, each media part replaced by a note; logs each type once."""
    return [_note(part) if is_media(part["type"]) else dict(part) for part in parts]


def _note(part: Mapping[str, Any]) -> dict[str, str]:
    kind = part["type"]
    log_once("media in the results of tools are left out, as models here take text only: %r", kind)
    what = next(_media_types(part), kind[:_LONGEST_SHOWN])
    return {"type": "text", "text": f"[{what} left out: this model takes text only]"}


def _media_types(part: Mapping[str, Any]) -> Iterator[str]:
    """The media types that a part names, in a data URL or in a `media_type` field."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _media_types(value)
        elif isinstance(value, str) and (name == "media_type" or value.startswith("data:")):
            yield from _MEDIA_TYPE.findall(value[:_LONGEST_NAMED])
