"""Text of clients, escaped for terminals and log files."""

from __future__ import annotations

LONGEST_CONTENT = 20_000  # characters of a prompt or an answer in the log


def printable(text: str, *, longest: int = 100) -> str:
    """A client's text, escaped for a terminal and cut if it is long."""
    shown = escaped(text[:longest])
    return shown if len(text) <= longest else f"{shown}… ({len(text) - longest} more characters)"


def escaped(text: str) -> str:
    """The text with its unprintable characters (such as control characters) as Python escapes."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
