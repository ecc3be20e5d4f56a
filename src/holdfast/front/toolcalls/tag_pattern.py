"""Regular expressions of a checkpoint, as far as they are literal tags with words to capture:
matched in linear time. Pure.

Patterns come with a model and run on what it writes: anything that could take its time (nested or
optional groups, look-around, back references) is refused, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["literal", "space", "newline", "capture"]
_LONGEST: Final = 500
_PIECE: Final = re.compile(
    r"\(\?P<(?P<name>\w+)>(?P<inner>(?:\[\^?\]?(?:\\.|[^\]\\])+\]|\\[wSs]|\.)[*+]\??)\)"
    r"|(?P<space>\\s[*+]\??|\[(?:\\[nrst]| )+\][*+]\??|\\n[*+])"
    r"|(?P<newline>(?:\\n| )\?)"
    r"|(?P<escape>\\[^\w]|\\[nt])(?![*+?{])"
    r"|(?P<plain>[^.^$*+?{}\[\]\\|()])(?![*+?{])",
    re.DOTALL,
)
_ESCAPED: Final = {"\\n": "\n", "\\t": "\t"}


class PatternPiece(NamedTuple):
    """A part of a pattern: its text, any white space, one line break or none, or a word to capture
    (`text`: what it may be).
    """

    kind: Kind
    text: str
    name: str = ""


Pieces: TypeAlias = tuple[PatternPiece, ...]


class Found(NamedTuple):
    """Where a pattern matches, and the words that it captured."""

    start: int
    end: int
    words: Mapping[str, str]


def literal(text: str) -> Pieces:
    """The pattern of a text."""
    return (PatternPiece("literal", text),)


def pieces(pattern: str) -> Pieces | None:
    """A pattern's parts, white space at its beginning left out.

    None: it is not of the kind that is read here.
    """
    if len(pattern) > _LONGEST:
        return None
    found: list[PatternPiece] = []
    place = 0
    while place < len(pattern):
        match = _PIECE.match(pattern, place)
        if match is None:
            return None
        place = match.end()
        piece = _piece(match)
        if piece.kind == "literal" and found and found[-1].kind == "literal":
            piece = PatternPiece("literal", found.pop().text + piece.text)
        if piece.kind == "capture" and found and found[-1].kind == "capture":
            return None
        found.append(piece)
    while found and found[0].kind in ("space", "newline"):
        found.pop(0)
    return tuple(found) if found and found[0].kind == "literal" else None


def match_at(parts: Pieces, text: str, place: int) -> Found | None:
    """Match at this place. A word ends where the next literal stands first, or as it can."""
    start, words = place, dict[str, str]()
    for index, part in enumerate(parts):
        if part.kind == "literal":
            if not text.startswith(part.text, place):
                return None
            place += len(part.text)
        elif part.kind == "space":
            place += len(text[place:]) - len(text[place:].lstrip())
        elif part.kind == "newline":
            place += text.startswith(("\n", " "), place)
        else:
            following = next(
                (other.text for other in parts[index + 1 :] if other.kind == "literal"), ""
            )
            last = None if following else re.compile(part.text, re.DOTALL).match(text, place)
            end = text.find(following, place) if following else last.end() if last else -1
            if end < 0:
                return None
            word = text[place:end]
            place = end
            between = parts[index + 1].kind if index + 1 < len(parts) else "capture"
            kept = (
                word.rstrip()
                if between == "space"
                else word.removesuffix("\n")
                if between == "newline"
                else word
            )
            place -= len(word) - len(kept)
            if not re.fullmatch(part.text, kept, re.DOTALL):
                return None
            words[part.name] = kept
    return Found(start, place, words)


def matches(parts: Pieces, text: str, place: int = 0) -> Iterator[Found]:
    """All matches from there on, none of which overlap."""
    while (at := text.find(parts[0].text, place)) >= 0:
        found = match_at(parts, text, at)
        place = found.end if found else at + 1
        if found:
            yield found


def written(parts: Pieces, words: Mapping[str, str]) -> str:
    """A text that the pattern matches, with these words."""
    return "".join(
        part.text
        if part.kind == "literal"
        else "\n"
        if part.kind == "newline"
        else words.get(part.name, "")
        for part in parts
    )


def _piece(match: re.Match[str]) -> PatternPiece:
    if match["name"]:
        return PatternPiece("capture", match["inner"], match["name"])
    if match["space"]:
        return PatternPiece("space", "")
    if match["newline"]:
        return PatternPiece("newline", "")
    if match["escape"]:
        return PatternPiece("literal", _ESCAPED.get(match["escape"], match["escape"][1:]))
    return PatternPiece("literal", match["plain"])
