"""Markers that are single tokens of a model, as one character each that no text has: lone
surrogates. Pure.

So a marker can be told from the same letters written with ordinary tokens, and readers work on
plain strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar, cast

_FIRST, _MOST = 0xDC00, 0x400
_TAG = re.compile(r"<(/?[a-z_]+)>")
_SUFFIX = re.compile(r":[\w.-]+")
_SURROGATE = re.compile("[\udc00-\udfff]")

Data = TypeVar("Data")
_MARK: Final = re.compile(r"[\udc00-\udfff]|<[^<>\s]+>|\[/?[A-Z_]+\]")


def is_marker(text: str) -> bool:
    """Whether an encoded text begins with a marker that is a token."""
    return "\udc00" <= text[:1] <= "\udfff"


class Markers:
    """The markers of one model. Immutable."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """token_ids: by the markers' texts. The first 1024, in the order of their texts, count."""
        texts = sorted(token_ids)[:_MOST]
        self._text_of = {chr(_FIRST + place): text for place, text in enumerate(texts)}
        self._character_of = {text: character for character, text in self._text_of.items()}
        # by token id
        self.characters = {
            token_ids[text]: character for text, character in self._character_of.items()
        }
        longest_first = sorted(texts, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if texts else None

    def encode(self, text: str) -> str:
        """The text with a character for each marker, as it comes from the model when the markers
        are tokens.
        """
        return (
            self._any.sub(lambda found: self._character_of[found[0]], text) if self._any else text
        )

    def restore(self, text: str) -> str:
        """The text with its markers written out."""
        return (
            text
            if text.isascii()
            else _SURROGATE.sub(lambda found: self._text_of.get(found[0], ""), text)
        )

    def length(self, text: str) -> int:
        """Characters of the restored text."""
        return len(self.restore(text))

    def encoded(self, data: Data) -> Data:
        """The same data, a string, tuple, mapping or frozen dataclass, with markers as characters
        in all its texts.
        """
        return rewritten(data, self.encode)


def rewritten(data: Data, change: Callable[[str], str]) -> Data:
    """The same data, a string, tuple, mapping or frozen dataclass, with all its texts changed."""
    return cast(Data, _rewritten(data, change))


def in_vocabulary(data: Data, marks: Iterable[str], tokens: Collection[str]) -> Data:
    """The same data with its tags as a tokenizer has them: some have one suffix for all, as in
    `<tool_call:opensource>`.
    """
    tags = [
        mark.strip()
        for mark in marks
        if _TAG.fullmatch(mark.strip()) and mark.strip() not in tokens
    ]
    suffixes = (
        token[len(tag) - 1 : -1]
        for tag in tags
        for token in sorted(tokens)
        if token.startswith(f"{tag[:-1]}:")
    )
    suffix = next((found for found in suffixes if _SUFFIX.fullmatch(found)), "")
    return rewritten(data, lambda text: _TAG.sub(rf"<\1{suffix}>", text)) if suffix else data


def _rewritten(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        return change(data)
    if isinstance(data, tuple):
        items: Iterable[Any] = (_rewritten(item, change) for item in data)
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, Mapping):
        return {_rewritten(key, change): _rewritten(value, change) for key, value in data.items()}
    if is_dataclass(data) and not isinstance(data, type):
        return replace(
            data,
            **{
                each.name: _rewritten(getattr(data, each.name), change)
                for each in fields(data)
                if each.init
            },
        )
    return data


def marks_in(*markup: str) -> Sequence[str]:
    """The markers that stand in these strings, each once: `<...>`, `[WORD]` and encoded ones."""
    return tuple(dict.fromkeys(mark for text in markup for mark in _MARK.findall(text)))
