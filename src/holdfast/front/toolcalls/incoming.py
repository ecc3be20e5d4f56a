"""The text that a reader parses, which arrives in pieces. No I/O.

A reader is a generator that yields whenever it needs more text, so that the code that parses a
grammar stays simple. A marker that is a single token of a model becomes one character that no text
contains, a lone surrogate. Readers therefore work on plain strings, and still distinguish a marker
from the same letters in ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar, cast

Result = TypeVar("Result")
Parser: TypeAlias = Generator[None, None, Result]
"""A generator that yields whenever it needs more text, and finally returns what it has parsed."""


def resume(steps: Parser[Result]) -> Result | None:
    """Let a reader continue. Returns the reader's result, or None while it waits for more text."""
    try:
        next(steps)
    except StopIteration as done:
        result: Result = done.value
        return result
    return None


class Incoming:
    """Text that has arrived and was not dropped. `place` is the reader's position in `text`."""

    def __init__(self, plain: Callable[[str], str] = str) -> None:
        """plain: function that writes out the markers of a text (`Markers.restore`)."""
        self.plain = plain
        self.text = ""
        self.place = 0
        # how far `text` has been searched, also ahead of `place`: the cost of a failed attempt
        self.searched_to = 0
        self.has_ended = False  # no more text will come
        # number of characters that were read and dropped, with markers written out
        self.dropped_characters = 0

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        self.text += text

    def drop_read(self) -> str:
        """Drop and return the text before `place`."""
        self.searched_to -= self.place
        read, self.text, self.place = self.text[: self.place], self.text[self.place :], 0
        self.dropped_characters += len(self.plain(read))
        return read

    @property
    def position(self) -> int:
        """Number of characters of the whole text before `place`, with markers written out."""
        return self.dropped_characters + len(self.plain(self.text[: self.place]))

    @property
    def remaining_text(self) -> str:
        """The text from `place` to the end."""
        return self.text[self.place :]

    @property
    def at_end(self) -> bool:
        """Whether all text that has arrived has been read."""
        return self.place == len(self.text)

    def starts_with(self, *texts: str) -> bool:
        """Whether one of these texts is at the reader's position. Does not wait for more text."""
        return self.text.startswith(texts, self.place)

    def text_until(self, place: int) -> str:
        """Return the text from the reader's position to this place, with markers written out."""
        return self.plain(self.text[self.place : place])

    def match_at(self, markers: Sequence[str], place: int | None = None) -> Parser[str]:
        """Return the longest of the markers at `place`; empty if there is none.

        place: by default, the reader's position.
        """
        at = self.place if place is None else place
        while True:
            longest_match = max(
                (marker for marker in markers if self.text.startswith(marker, at)),
                key=len,
                default="",
            )
            arrived_characters = len(self.text) - at
            if self.has_ended or not any(
                len(marker) > max(arrived_characters, len(longest_match))
                and marker.startswith(self.text[at:])
                for marker in markers
            ):
                return longest_match
            yield

    def read_any(self, *markers: str) -> Parser[str]:
        """Read the longest of these markers that is at `place`. Returns "" if none is there."""
        found = yield from self.match_at(markers)
        self.place += len(found)
        return found

    def after_space(self, place: int, *, spaces: Sequence[str] = ()) -> Parser[int]:
        """Return the first position from `place` that is not white space, or else the text's end.

        spaces: further strings that count as white space.
        """
        while True:
            while place < len(self.text) and self.text[place].isspace():
                place += 1
            self.searched_to = max(self.searched_to, place)
            if place == len(self.text):
                if self.has_ended:
                    return place
                yield
            elif spaces and (found := (yield from self.match_at(spaces, place))):
                place += len(found)
            else:
                return place

    def skip_space(self, *, spaces: Sequence[str] = ()) -> Parser[None]:
        """Move the reader's position past white space."""
        self.place = yield from self.after_space(self.place, spaces=spaces)

    def skip_space_and_read(self, *markers: str) -> Parser[str]:
        """Move past white space, and then past one of the markers, as `read_any` does."""
        yield from self.skip_space()
        return (yield from self.read_any(*markers))

    def find(
        self, markers: Sequence[str], start: int, *, limit: int | None = None
    ) -> Parser[tuple[int, str]]:
        """Return the position and the text of the first marker from `start` on.

        If several markers begin at this position, returns the longest. If there is none, returns
        the end of the text or `start + limit`, and an empty marker.
        """
        longest, _ = _longest_and_first_characters(tuple(markers))
        search_start = start
        while True:
            found = self._nearest(markers, search_start)
            self.searched_to = max(self.searched_to, found if found >= 0 else len(self.text))
            if found >= 0 and (limit is None or found <= start + limit):
                marker = yield from self.match_at(markers, found)
                return found, marker
            if limit is not None and (found >= 0 or len(self.text) - start > limit + longest):
                return start + limit, ""
            if self.has_ended:
                return len(self.text), ""
            search_start = max(start, len(self.text) - longest + 1)
            yield

    def read_to(
        self, markers: Sequence[str], *, limit: int | None = None
    ) -> Parser[tuple[str, str]]:
        """Read the text before the first of the markers (see `find`), with markers written out.

        Returns the text and the marker. The marker itself is not read.
        """
        at, marker = yield from self.find(markers, self.place, limit=limit)
        text, self.place = self.text_until(at), at
        return text, marker

    def _nearest(self, markers: Sequence[str], start: int) -> int:
        """Return the position of the first marker from `start` on, or -1 if there is none."""
        nearest = -1
        # Single characters come last and are found fastest. Each match narrows the next search.
        for marker in reversed(markers):
            end = len(self.text) if nearest < 0 else nearest - 1 + len(marker)
            at = self.text.find(marker, start, end)
            nearest = at if at >= 0 else nearest
        return nearest

    def safe_end(self, markers: Sequence[str]) -> int:
        """Return the end of the text before the first marker or possible beginning of a marker."""
        text, place = self.text, self.place
        end = len(text)
        nearest = min(
            [at for marker in markers if (at := text.find(marker, place)) >= 0], default=end
        )
        if not self.has_ended:
            longest, first_characters = _longest_and_first_characters(tuple(markers))
            for at in range(max(place, end - longest + 1), nearest):
                if text[at] in first_characters and any(
                    marker.startswith(text[at:]) for marker in markers
                ):
                    return at
        return nearest


@lru_cache(maxsize=256)
def _longest_and_first_characters(markers: tuple[str, ...]) -> tuple[int, str]:
    """Return the length of the longest marker, and the first characters of all markers.

    Only so many characters at the end of a text can be the beginning of a marker.
    """
    return max(map(len, markers)), "".join({marker[0] for marker in markers})


_FIRST_MARKER_CODE: Final = 0xDC00
_MOST_MARKERS: Final = 0x400
_TAG = re.compile(r"<(/?[a-z_]+)>")
_SUFFIX = re.compile(r":[\w.-]+")
_SURROGATE = re.compile("[\udc00-\udfff]")

Data = TypeVar("Data")
_MARKER_IN_TEXT: Final = re.compile(r"[\udc00-\udfff]|<[^<>\s]+>|\[/?[A-Z_]+\]")


def is_marker(text: str) -> bool:
    """Whether an encoded text begins with a marker that is a single token."""
    return "\udc00" <= text[:1] <= "\udfff"


class Markers:
    """The markers of one model that are single tokens, each with the character that replaces it.

    Immutable.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """token_ids: token ids by marker text; only the first 1024 in sorted order are used."""
        texts = sorted(token_ids)[:_MOST_MARKERS]
        self._text_of = {chr(_FIRST_MARKER_CODE + place): text for place, text in enumerate(texts)}
        self._character_of = {text: character for character, text in self._text_of.items()}
        # keys are token ids
        self.characters = {
            token_ids[text]: character for text, character in self._character_of.items()
        }
        longest_first = sorted(texts, key=len, reverse=True)
        self._any_character = re.compile("|".join(map(re.escape, longest_first))) if texts else None

    def encode(self, text: str) -> str:
        """Replace each marker in a text with one character, as in the text that readers parse."""
        if self._any_character is None:
            return text
        return self._any_character.sub(lambda match: self._character_of[match[0]], text)

    def restore(self, text: str) -> str:
        """Return the text with its markers written out."""
        if text.isascii():
            return text
        return _SURROGATE.sub(lambda match: self._text_of.get(match[0], ""), text)

    def encoded(self, data: Data) -> Data:
        """Return the data (a string, tuple or frozen dataclass) with all its texts encoded; other data
        unchanged.
        """
        return cast(Data, _rewritten(data, self.encode))


def spelled_as_in_vocabulary(data: Data, markers: Iterable[str], tokens: Collection[str]) -> Data:
    """Return the data with its tags spelled as in the vocabulary. Some vocabularies add one suffix
    to all tags, as in `<tool_call:opensource>`.
    """
    texts = [marker.strip() for marker in markers]
    tags = [text for text in texts if _TAG.fullmatch(text) and text not in tokens]
    suffixes = (
        token[len(tag) - 1 : -1]
        for tag in tags
        for token in sorted(tokens)
        if token.startswith(f"{tag[:-1]}:")
    )
    suffix = next((candidate for candidate in suffixes if _SUFFIX.fullmatch(candidate)), "")
    if not suffix:
        return data
    return cast(Data, _rewritten(data, lambda text: _TAG.sub(rf"<\1{suffix}>", text)))


def _rewritten(data: Any, change: Callable[[str], str]) -> Any:
    """A copy of strings, tuples and dataclasses in which each string is changed."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, tuple):
        return tuple(_rewritten(item, change) for item in data)
    if is_dataclass(data) and not isinstance(data, type):
        changed = {each.name: _rewritten(getattr(data, each.name), change) for each in fields(data)}
        return replace(data, **changed)
    return data


def markers_in(*markup: str) -> Sequence[str]:
    """Return the distinct markers in these strings: `<...>`, `[WORD]` and encoded ones."""
    return tuple(
        dict.fromkeys(marker for text in markup for marker in _MARKER_IN_TEXT.findall(text))
    )
