"""Values as models write them, read as they come and repaired: literals of several syntaxes, and JSON
objects that stream. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
_PYTHON_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
    "Infinity": "null",
    "-Infinity": "null",
}
_JSON_WORDS = ("true", "false", "null")
_CONTROL = re.compile(r"[\x00-\x1f]")
_BEHIND_BARE = tuple(" \n\t\r,:[]{}\"'")
_NO_SPACE = re.compile(r"[^ \t\r\n]")  # for JSON
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_JSON_CLOSERS = {"{": "}", "[": "]"}
_BEHIND_JSON_STRING = (",", "}", "]", ":")
_ESCAPES = '"\\/bfnrt'


def json_text(value: Any) -> str:
    """A value as JSON text, as templates print it."""
    return json.dumps(value, ensure_ascii=False)


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
            return json_text((yield from self._string(source, repairs, quote)))
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
                while source.at_end and not source.ended:
                    yield
                source.place = min(len(source.text), source.place + 1)
                continue
            if mark and not raw and len(quote) == 1:
                behind = yield from source.after_space(source.place)
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
            if source.at_end or (self.stops and (yield from source.standing(self.stops))):
                _note(repairs, "unclosed_value")
                break
            character = source.text[source.place]
            if character in ends:
                source.place += 1
                if character == ",":
                    continue
                break
            key = json_text((yield from self.key(source, repairs))) + ": " if opener == "{" else ""
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
    return json_text(text)


def _note(repairs: list[str], name: str) -> None:
    if name not in repairs:
        repairs.append(name)


class JsonStream:
    """Reads one object and gives out its text. One for each object."""

    def __init__(
        self,
        source: Incoming,
        give: Callable[[str], None],
        *,
        stops: Sequence[str] = (),
        follows: Sequence[str] = (),
    ) -> None:
        """give: takes the next fragment; they join to one valid JSON object.

        stops: marks that end the object wherever they stand outside of strings; in a string only if
        nothing follows them but one of `follows` or the text's end.
        """
        self.repairs: list[str] = []
        self._source, self._give = source, give
        self._stops, self._follows = tuple(stops), tuple(follows)
        self._open: list[str] = []  # brackets
        self._expects: Literal["key", "value", "next"] = "value"
        self._dangles = False  # a key and its colon were given, and no value
        self._too_deep = 0  # brackets that were left out and are open
        self._held = ""  # a comma and white space that are given with what follows

    def read(self) -> Waiting[None]:
        """Read the object at whose bracket the source stands, to behind its last one; what was read
        is dropped.
        """
        source = self._source
        self._push(source.text[source.place])
        source.place += 1
        while self._open:
            start = source.place
            while not source.at_end and source.text[source.place].isspace():
                source.place += 1
            self._held += _spaces(source.text[start : source.place])
            source.drop_read()
            if not source.at_end:
                if self._stops and (yield from source.standing(self._stops)):
                    break
                yield from self._step(source.text[source.place])
            elif source.ended:
                break
            else:
                yield
        self._close_all()
        source.drop_read()

    def _step(self, character: str) -> Waiting[None]:
        source = self._source
        if character in "}]":
            source.place += 1
            self._close(character)
        elif character == "," and self._expects == "next":
            source.place += 1
            self._held += ","
            self._expects = self._within
        elif character in ",:":
            source.place += 1
            self._repair("extra_" + ("comma" if character == "," else "colon"))
        elif character in _JSON_CLOSERS and len(self._open) >= _MAX_DEPTH:
            source.place += 1
            self._too_deep += 1
            self._repair("too_deep")
        elif character in _JSON_CLOSERS and "key" in (
            self._expects,
            self._expects == "next" and self._within,
        ):
            source.place += 1  # a bracket where a key should be
            self._repair("extra_bracket")
        else:
            if self._expects == "next":
                self._repair("missing_comma")
                self._held += ","
                self._expects = self._within
            self._give_held()
            yield from self._item(character)

    def _item(self, character: str) -> Waiting[None]:
        source = self._source
        if self._expects == "value" and character in _JSON_CLOSERS:
            source.place += 1
            self._push(character)
            return
        if character in "\"'":
            yield from self._string(character)
        else:
            yield from self._bare()
        if self._expects == "key":
            yield from self._colon()
        else:
            self._expects, self._dangles = "next", False

    def _colon(self) -> Waiting[None]:
        source = self._source
        start = source.place
        yield from source.skip_space()
        space = _spaces(source.text[start : source.place])
        if not (yield from source.taken(":")):
            self._repair("missing_colon")
            space = ""
        self._give(space + ":")
        self._expects, self._dangles = "value", True

    def _string(self, quote: str) -> Waiting[None]:
        """Read a string. A quote that nothing follows which may stand behind a string belongs to
        it.
        """
        source = self._source
        if quote == "'":
            self._repair("single_quotes")
        self._give('"')
        source.place += 1
        marks = (quote, "\\", *self._stops)
        while True:
            certain = source.certain(marks)
            if certain > source.place:
                self._give(self._escaped(source.text[source.place : certain]))
                source.place = certain
                source.drop_read()
            if source.at_end:
                if source.ended:
                    break
                yield
                continue
            mark = yield from source.standing(marks)
            if mark == "\\":
                yield from self._escape()
            elif mark and (yield from self._ends(mark, quote)):
                source.place += len(mark) if mark == quote else 0
                self._give('"')
                return
            elif mark:
                self._give(self._escaped(mark))
                source.place += len(mark)
                if mark == quote:
                    self._repair("inner_quote")
        self._give('"')
        self._repair("unclosed_value")

    def _ends(self, mark: str, quote: str) -> Waiting[bool]:
        """Whether the string ends at this mark, which stands here."""
        source = self._source
        behind = yield from source.after_space(source.place + len(mark))
        if behind == len(source.text):
            return True
        if mark != quote:
            return (
                bool((yield from source.standing(self._follows, behind)))
                if self._follows
                else False
            )
        return source.text[behind] in _BEHIND_JSON_STRING or bool(
            self._stops and (yield from source.standing(self._stops, behind))
        )

    def _escape(self) -> Waiting[None]:
        """Read a backslash and what it escapes."""
        source = self._source
        while len(source.text) - source.place < 2 and not source.ended:
            yield
        code = source.text[source.place + 1 : source.place + 2]
        if code == "u":
            while len(source.text) - source.place < 6 and not source.ended:
                yield
        wide = code == "u" and _HEX.fullmatch(source.text[source.place + 2 : source.place + 6])
        if wide or (code and code in _ESCAPES):
            length = 6 if wide else 2
            self._give(source.text[source.place : source.place + length])
        else:
            length = 2 if code == "'" else 1
            self._give("'" if code == "'" else "\\\\")
            self._repair("bad_escape")
        source.place += length

    def _bare(self) -> Waiting[None]:
        """Read a word without quotes: a number, a literal of JSON or Python, or text."""
        source = self._source
        end, _ = yield from source.find((*self._stops, *_BEHIND_BARE), source.place)
        word = source.up_to(end)
        source.place = end
        if self._expects == "key":
            self._repair("bare_key")
            self._give(json_text(word))
        elif word in _JSON_WORDS or NUMBER.fullmatch(word):
            self._give(word)
        elif word in _PYTHON_WORDS:
            self._repair("python_literal")
            self._give(_PYTHON_WORDS[word])
        else:
            self._repair("bare_string")
            self._give(json_text(word))

    def _escaped(self, text: str) -> str:
        """A string's text, its markers written out, as JSON has it."""
        plain = self._source.plain(text)
        if _CONTROL.search(plain):
            self._repair("raw_control_character")
        elif '"' not in plain:
            return plain
        return json_text(plain)[1:-1]

    # brackets

    @property
    def _within(self) -> Literal["key", "value"]:
        return "key" if self._open[-1] == "{" else "value"

    def _push(self, bracket: str) -> None:
        self._give(bracket)
        self._open.append(bracket)
        self._expects, self._dangles = self._within, False

    def _close(self, character: str) -> None:
        """A closing bracket was read. Brackets within the one that it closes are closed with it."""
        if self._too_deep:
            self._too_deep -= 1
            return
        if character not in (_JSON_CLOSERS[bracket] for bracket in self._open):
            self._repair("extra_bracket")
            return
        while _JSON_CLOSERS[self._open[-1]] != character:
            self._repair("missing_bracket")
            self._pop()
        self._pop()

    def _close_all(self) -> None:
        """The text has ended, or a mark that ends the object stands here."""
        if self._open:
            self._repair("unclosed_value")
        while self._open:
            self._pop()

    def _pop(self) -> None:
        if self._dangles:
            self._repair("missing_value")
            self._held += "null"
        elif "," in self._held:
            self._repair("trailing_comma")
            self._held = self._held.replace(",", "")
        self._give_held()
        self._give(_JSON_CLOSERS[self._open.pop()])
        self._expects, self._dangles = "next", False

    def _give_held(self) -> None:
        if self._held:
            self._give(self._held)
            self._held = ""

    def _repair(self, name: str) -> None:
        if name not in self.repairs:
            self.repairs.append(name)


def _spaces(text: str) -> str:
    """White space of any kind, as JSON knows it."""
    return _NO_SPACE.sub(" ", text)
