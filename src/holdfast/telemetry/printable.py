"""Text of strangers, made fit for a terminal."""

from __future__ import annotations

LONGEST_CONTENT = 20_000  # of a prompt or an answer in the log


def printable(text: str, *, longest: int = 100) -> str:
    """The text with everything escaped that could move a cursor, colour a terminal or begin a line;
    its end cut if it is long.
    """
    shown = escaped(text[:longest])
    return shown if len(text) <= longest else f"{shown}… ({len(text) - longest} more characters)"


def escaped(text: str) -> str:
    """The text with what is not printable written as Python would write it in quotes: control
    characters, marks of direction.
    """
    return (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else _name(each) for each in text)
    )


def _name(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
