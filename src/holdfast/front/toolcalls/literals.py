"""Values in a model's own syntax (Python, Gemma's braces, JSON with faults), read as they come,
into JSON text. Pure.

Nothing is refused: what is no value of the syntax is taken as a string, and what is open at the
text's end is closed. Numbers keep their spelling where JSON allows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.front.toolcalls.incoming import Incoming, Waiting

# Whole numbers of more than 4300 digits Python refuses to read, and a float beyond 1e308 is no JSON
# again: such are text.
NUMBER = re.compile(
    r"-?(0|[1-9][0-9]{0,999})(\.[0-9]+)?([eE](-[0-9]+|\+?0*([12]?[0-9]{1,2}|30[0-8])))?"
)
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "none": "null",
    "nil": "null",
    "undefined": "null",
}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_SHORT = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    "a": "\a",
    "v": "\v",
    "\n": "",
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_BEHIND_STRING = (",", ")", "]", "}", ":")
_MAX_DEPTH = 64  # deeper brackets are text


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """The syntax of a family's values.

    raw_quotes: marks of strings without escapes. bare_keys: the keys of objects stand without
        quotes, up to a colon.
    stops: marks that end all that is open, quoted strings excepted.
    """

    raw_quotes: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ('"""', "'''", '"', "'")
    bare_keys: bool = False
    stops: tuple[str, ...] = ()

    def value(
        self, source: Incoming, repairs: list[str], *, ends: str, depth: int = 0
    ) -> Waiting[str]:
        """Read one value, as JSON text.

        `ends`: the characters before which a value without quotes ends.
        """
        yield from source.skip_space()
        quote = yield from source.taken(*self.raw_quotes, *self.quotes)
        if quote:
            return _json_text((yield from self._string(source, repairs, quote)))
        opener = source.text[source.place : source.place + 1]
        if opener in _CLOSERS and depth < _MAX_DEPTH:
            source.place += 1
            return (yield from self._members(source, repairs, opener=opener, depth=depth + 1))
        return _word(
            source.plain((yield from _before(source, (*ends, *self.stops)))).strip(), repairs
        )

    def _string(self, source: Incoming, repairs: list[str], quote: str) -> Waiting[str]:
        """What stands before the closing quote.

        One of a single character that no separator follows belongs to the string.
        """
        start = source.place
        raw = quote in self.raw_quotes
        marks = (quote,) if raw else (quote, "\\")
        while True:
            at, mark = yield from source.find(marks, source.place)
            source.place = min(len(source.text), at + len(mark))
            if mark == "\\":
                while source.place == len(source.text) and not source.ended:
                    yield
                source.place = min(len(source.text), source.place + 1)
                continue
            if mark and not raw and len(quote) == 1:
                behind = yield from source.behind_space(source.place)
                stops = bool(self.stops) and bool((yield from source.standing(self.stops, behind)))
                if (
                    behind < len(source.text)
                    and source.text[behind] not in _BEHIND_STRING
                    and not stops
                ):
                    _note(repairs, "inner_quote")
                    continue
            if not mark:
                _note(repairs, "unclosed_value")
            text = source.plain(source.text[start:at])
            return text if raw else unescaped(text)

    def _members(
        self, source: Incoming, repairs: list[str], *, opener: str, depth: int
    ) -> Waiting[str]:
        """What stands in brackets, the opening one read; reads the closing one, whichever it is."""
        items: list[str] = []
        ends = "," + "".join(_CLOSERS.values())
        while True:
            yield from source.skip_space()
            if source.place == len(source.text) or (
                self.stops and (yield from source.standing(self.stops))
            ):
                _note(repairs, "unclosed_value")
                break
            character = source.text[source.place]
            if character in ends:
                source.place += 1
                if character == ",":
                    continue
                break
            key = _json_text((yield from self.key(source, repairs))) + ": " if opener == "{" else ""
            items.append(key + (yield from self.value(source, repairs, ends=ends, depth=depth)))
        return f"{{{', '.join(items)}}}" if opener == "{" else f"[{', '.join(items)}]"

    def key(self, source: Incoming, repairs: list[str]) -> Waiting[str]:
        """Read an object's key and the colon behind it."""
        quote = yield from source.taken(*self.raw_quotes, *self.quotes)
        if quote:
            key = yield from self._string(source, repairs, quote)
            if self.bare_keys:
                _note(repairs, "quoted_key")
        else:
            key = source.plain((yield from _before(source, (":", ",", "}", *self.stops)))).strip()
        yield from source.skip_space()
        yield from source.taken(":")
        return key


def unescaped(text: str) -> str:
    """A string's text from between its quotes, with the escapes of JSON and Python; others stay as
    they are.
    """
    if "\\" not in text:
        return text
    joined = _ESCAPE.sub(_character, text)
    # two escapes may be one character
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def whole(text: str, literals: Literals) -> str | None:
    """The JSON text of a value that is there as a whole and without faults, else None."""
    source, repairs = Incoming(), list[str]()
    source.add(text)
    source.ended = True
    try:
        next(literals.value(source, repairs, ends=""))
    except StopIteration as done:
        return None if repairs or source.rest.strip() else str(done.value)
    raise AssertionError("a reader waits for more of an ended text")


def _character(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "uUx" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    return _SHORT.get(code, code if code in "\"'\\/" else match[0])


def _before(source: Incoming, ends: Sequence[str]) -> Waiting[str]:
    """Read up to one of these characters."""
    start = source.place
    if not ends:
        source.place = len(source.text)
        return source.text[start:]
    source.place, _ = yield from source.find(ends, start)
    return source.text[start : source.place]


def _word(text: str, repairs: list[str]) -> str:
    """A value that stands without quotes."""
    if NUMBER.fullmatch(text):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (lambda: int(text, 0), lambda: float(text)):
        try:
            found = json.dumps(number(), allow_nan=False)
        except (ValueError, OverflowError):
            continue
        return found
    _note(repairs, "bare_string")
    return _json_text(text)


def _note(repairs: list[str], name: str) -> None:
    if name not in repairs:
        repairs.append(name)


def _json_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
