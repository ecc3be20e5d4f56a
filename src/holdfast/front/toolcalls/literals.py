"""Readers that parse and repair the values that a model writes: literals in several syntaxes, and
JSON objects that are passed on while they arrive. No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.front.toolcalls.incoming import Incoming, Parser

# Python refuses to parse integers of more than 4300 digits, and a float beyond 1e308 is not valid
# JSON: such numbers are treated as text.
NUMBER: Final = re.compile(
    r"-?(0|[1-9][0-9]{0,999})(\.[0-9]+)?([eE](-[0-9]+|\+?0*([12]?[0-9]{1,2}|30[0-8])))?"
)
_NULL_WORDS: Final = ("null", "none", "nil", "undefined")
_WORDS: Final = {"true": "true", "false": "false", **dict.fromkeys(_NULL_WORDS, "null")}
_NO_VALUES: Final = ("None", "NaN", "Infinity", "-Infinity")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", **dict.fromkeys(_NO_VALUES, "null")}
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_SHORT_ESCAPES: Final = {
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
_QUOTES: Final = ('"""', "'''", '"', "'")
_CLOSERS: Final = {"[": "]", "(": ")", "{": "}"}
_AFTER_STRING: Final = ",]}:"
_MAX_DEPTH: Final = 64  # maximum nesting of brackets; clients cannot parse deeper values
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_END_UNQUOTED: Final = tuple(" \n\t\r,:[]{}\"'")
_NOT_JSON_SPACE: Final = re.compile(r"[^ \t\r\n]")
_FOUR_HEX_DIGITS: Final = re.compile(r"[0-9a-fA-F]{4}")
_CLOSING_BRACKETS: Final = {"{": "}", "[": "]"}  # by opening bracket
_JSON_ESCAPES: Final = '"\\/bfnrt'


def json_text(value: Any) -> str:
    """Return a value as JSON text, formatted as templates do."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """Reads values in a family's own syntax and converts them to JSON text. The default syntax is
    JSON and Python.

    All input is accepted: text that is not a value of the syntax is a string, and a part that
    is still open at the end of the text is closed. Numbers keep their spelling if JSON allows it.

    raw_quotes: markers around strings without escapes. bare_keys: whether keys of objects have no
    quotes. stops: markers that end everything that is open, except quoted strings.
    """

    raw_quotes: tuple[str, ...] = ()
    bare_keys: bool = False
    stops: tuple[str, ...] = ()

    def read_value(
        self, source: Incoming, repairs: list[str], *, ends: str, depth: int = 0
    ) -> Parser[str]:
        """Read a value, and return it as JSON text.

        ends: the characters that end an unquoted value.
        """
        quote = yield from source.skip_space_and_read(*self.raw_quotes, *_QUOTES)
        if quote:
            return json_text((yield from self._read_string_text(source, repairs, quote)))
        bracket = source.text[source.place : source.place + 1]
        if bracket in _CLOSERS and depth < _MAX_DEPTH:
            source.place += 1
            return (
                yield from self._read_members(source, repairs, bracket=bracket, depth=depth + 1)
            )
        return _unquoted_value((yield from _read_until(source, (*ends, *self.stops))), repairs)

    def read_key(self, source: Incoming, repairs: list[str]) -> Parser[str]:
        """Read the key of an object's member and the colon after it."""
        quote = yield from source.read_any(*self.raw_quotes, *_QUOTES)
        if quote:
            key = yield from self._read_string_text(source, repairs, quote)
            if self.bare_keys:
                _add_repair(repairs, "quoted_key")
        else:
            key = yield from _read_until(source, (":", ",", "}", *self.stops))
        yield from source.skip_space_and_read(":")
        return key

    def _read_string_text(self, source: Incoming, repairs: list[str], quote: str) -> Parser[str]:
        """Read a string after its opening quote."""
        start = source.place
        is_raw = quote in self.raw_quotes
        markers = (quote,) if is_raw else (quote, "\\")
        while True:
            at, marker = yield from source.find(markers, source.place)
            source.place = min(len(source.text), at + len(marker))
            if marker == "\\":
                while source.at_end and not source.has_ended:
                    yield
                source.place = min(len(source.text), source.place + 1)
                continue
            may_be_inner = bool(marker) and not is_raw and len(quote) == 1
            if may_be_inner and not (
                yield from _is_closing_quote(source, source.place, self.stops, _AFTER_STRING + ")")
            ):
                _add_repair(repairs, "inner_quote")
                continue
            if not marker:
                _add_repair(repairs, "unclosed_value")
            text = source.plain(source.text[start:at])
            return text if is_raw else unescaped(text)

    def _read_members(
        self, source: Incoming, repairs: list[str], *, bracket: str, depth: int
    ) -> Parser[str]:
        """Read what follows an opening bracket, up to a closing bracket of any kind."""
        items: list[str] = []
        ends = "," + "".join(_CLOSERS.values())
        while True:
            yield from source.skip_space()
            if source.at_end or (self.stops and (yield from source.match_at(self.stops))):
                _add_repair(repairs, "unclosed_value")
                break
            character = source.text[source.place]
            if character in ends:
                source.place += 1
                if character == ",":
                    continue
                break
            key = ""
            if bracket == "{":
                key = json_text((yield from self.read_key(source, repairs))) + ": "
            items.append(
                key + (yield from self.read_value(source, repairs, ends=ends, depth=depth))
            )
        return f"{{{', '.join(items)}}}" if bracket == "{" else f"[{', '.join(items)}]"


LENIENT: Final = Literals()


def complete_value(text: str) -> str | None:
    """Return the value in a text as JSON text, or None if it is incomplete or needs repairs."""
    source, repairs = Incoming(), list[str]()
    source.add(text)
    source.has_ended = True
    try:
        next(LENIENT.read_value(source, repairs, ends=""))
    except StopIteration as done:
        return None if repairs or source.remaining_text.strip() else str(done.value)
    raise AssertionError("a reader waits for more of an ended text")


def unescaped(text: str) -> str:
    """Replace the escapes of JSON and Python in the text of a string. Other escapes are kept."""
    if "\\" not in text:
        return text
    joined = _ESCAPE.sub(_unescaped_character, text)
    # two escapes may encode one character
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped_character(match: re.Match[str]) -> str:
    """The character of an escape; the escape itself if it is not one of JSON or Python."""
    code = match[1]
    if code[0] in "uUx" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    return _SHORT_ESCAPES.get(code, code if code in "\"'\\/" else match[0])


def _is_closing_quote(
    source: Incoming, place: int, stops: Sequence[str], separators: str
) -> Parser[bool]:
    """Whether the text after a quote shows that the quote closes its string."""
    after = yield from source.after_space(place)
    if after == len(source.text) or source.text[after] in separators:
        return True
    return bool(stops and (yield from source.match_at(stops, after)))


def _read_until(source: Incoming, ends: Sequence[str]) -> Parser[str]:
    """Read up to one of these markers, or to the end of the text if none occurs."""
    if not ends:
        text, source.place = source.text_until(len(source.text)), len(source.text)
    else:
        text, _ = yield from source.read_to(ends)
    return text.strip()


def _unquoted_value(text: str, repairs: list[str]) -> str:
    """Convert an unquoted value to JSON text."""
    if NUMBER.fullmatch(text):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (lambda: int(text, 0), lambda: float(text)):
        try:
            return json.dumps(number(), allow_nan=False)
        except (ValueError, OverflowError):
            continue
    _add_repair(repairs, "bare_string")
    return json_text(text)


def _add_repair(repairs: list[str], name: str) -> None:
    if name not in repairs:
        repairs.append(name)


class JsonStream:
    """Reads one JSON object, repairs it, and passes it on as it arrives.

    The text passed on so far can always be completed to a valid object. Valid JSON is not changed.
    Each character is read only once, for any length of the object.
    """

    def __init__(
        self,
        source: Incoming,
        emit: Callable[[str], None],
        *,
        stops: Sequence[str] = (),
        follows: Sequence[str] = (),
    ) -> None:
        """emit: receives the next fragment; the fragments join to one valid JSON object.

        stops: markers that end the object. Inside a string, a marker ends the object only if one of
        `follows` or the end of the text comes next.
        """
        self.repairs: list[str] = []
        self._source = source
        self._emit = emit
        self._stops = tuple(stops)
        self._follows = tuple(follows)
        self._open_brackets: list[str] = []  # the outermost first
        # what may come now; "next" is a comma or a closing bracket
        self._expects: Literal["key", "value", "next"] = "value"
        self._awaits_value = False  # a key and its colon were passed on, but no value yet
        self._omitted_brackets = 0  # number of open brackets that were left out
        self._pending = ""  # a comma and white space that are passed on together with the next text

    def read(self) -> Parser[None]:
        """Read the object whose opening bracket is next. The text that was read is dropped."""
        source = self._source
        self._open_bracket(source.text[source.place])
        source.place += 1
        while self._open_brackets:
            start = source.place
            while not source.at_end and source.text[source.place].isspace():
                source.place += 1
            self._pending += _json_space(source.text[start : source.place])
            source.drop_read()
            if not source.at_end:
                if self._stops and (yield from source.match_at(self._stops)):
                    break
                yield from self._read_step(source.text[source.place])
            elif source.has_ended:
                break
            else:
                yield
        self._close_all()
        source.drop_read()

    def _read_step(self, character: str) -> Parser[None]:
        """Read the bracket, separator, key or value that begins with this character. Repairs what
        JSON does not allow here.
        """
        source = self._source
        expects_key = self._expects == "key" or (
            self._expects == "next" and self._expected_in_bracket == "key"
        )
        if character in "}]":
            source.place += 1
            self._close_bracket(character)
        elif character == "," and self._expects == "next":
            source.place += 1
            self._pending += ","
            self._expects = self._expected_in_bracket
        elif character in ",:":
            source.place += 1
            self._note_repair("extra_comma" if character == "," else "extra_colon")
        elif character in _CLOSING_BRACKETS and len(self._open_brackets) >= _MAX_DEPTH:
            source.place += 1
            self._omitted_brackets += 1
            self._note_repair("too_deep")
        elif character in _CLOSING_BRACKETS and expects_key:
            source.place += 1
            self._note_repair("extra_bracket")
        else:
            if self._expects == "next":
                self._note_repair("missing_comma")
                self._pending += ","
                self._expects = self._expected_in_bracket
            self._emit_pending()
            yield from self._read_value_or_key(character)

    def _read_value_or_key(self, character: str) -> Parser[None]:
        """Read the key or value that begins with this character, as `_expects` says."""
        if self._expects == "value" and character in _CLOSING_BRACKETS:
            self._source.place += 1
            self._open_bracket(character)
            return
        if character in "\"'":
            yield from self._read_string(character)
        else:
            yield from self._read_unquoted()
        if self._expects == "key":
            yield from self._read_colon()
        else:
            self._expects = "next"
            self._awaits_value = False

    def _read_colon(self) -> Parser[None]:
        """Read the colon after a key, or insert the colon if the model left it out."""
        source = self._source
        start = source.place
        yield from source.skip_space()
        space = _json_space(source.text[start : source.place])
        if not (yield from source.read_any(":")):
            self._note_repair("missing_colon")
            space = ""
        self._emit(space + ":")
        self._expects = "value"
        self._awaits_value = True

    def _read_string(self, quote: str) -> Parser[None]:
        """Read a string. A quote that cannot be the closing one is part of the string."""
        source = self._source
        if quote == "'":
            self._note_repair("single_quotes")
        self._emit('"')
        source.place += 1
        markers = (quote, "\\", *self._stops)
        while True:
            certain = source.safe_end(markers)
            if certain > source.place:
                self._emit(self._escaped(source.text[source.place : certain]))
                source.place = certain
                source.drop_read()
            if source.at_end:
                if source.has_ended:
                    break
                yield
                continue
            marker = yield from source.match_at(markers)
            if marker == "\\":
                yield from self._read_escape()
            elif marker and (yield from self._string_ends_at(marker, quote)):
                source.place += len(marker) if marker == quote else 0
                self._emit('"')
                return
            elif marker:
                self._emit(self._escaped(marker))
                source.place += len(marker)
                if marker == quote:
                    self._note_repair("inner_quote")
        self._emit('"')
        self._note_repair("unclosed_value")

    def _string_ends_at(self, marker: str, quote: str) -> Parser[bool]:
        """Whether the string ends at the marker at the current position."""
        place = self._source.place + len(marker)
        if marker == quote:
            return (yield from _is_closing_quote(self._source, place, self._stops, _AFTER_STRING))
        return (yield from _is_closing_quote(self._source, place, self._follows, ""))

    def _read_escape(self) -> Parser[None]:
        """Read a backslash and the characters it escapes."""
        source = self._source
        yield from self._wait_for(2)
        code = source.text[source.place + 1 : source.place + 2]
        if code == "u":
            yield from self._wait_for(6)
        is_unicode_escape = code == "u" and _FOUR_HEX_DIGITS.fullmatch(
            source.text[source.place + 2 : source.place + 6]
        )
        if is_unicode_escape or (code and code in _JSON_ESCAPES):
            length = 6 if is_unicode_escape else 2
            self._emit(source.text[source.place : source.place + length])
        else:
            length = 2 if code == "'" else 1
            self._emit("'" if code == "'" else "\\\\")
            self._note_repair("bad_escape")
        source.place += length

    def _wait_for(self, length: int) -> Parser[None]:
        """Wait until this many characters have arrived."""
        source = self._source
        while len(source.text) - source.place < length and not source.has_ended:
            yield

    def _read_unquoted(self) -> Parser[None]:
        """Read an unquoted word: a number, a literal of JSON or Python, or text."""
        word, _ = yield from self._source.read_to((*self._stops, *_END_UNQUOTED))
        if self._expects == "key":
            self._note_repair("bare_key")
            self._emit(json_text(word))
        elif word in ("true", "false", "null") or NUMBER.fullmatch(word):
            self._emit(word)
        elif word in _PYTHON_WORDS:
            self._note_repair("python_literal")
            self._emit(_PYTHON_WORDS[word])
        else:
            self._note_repair("bare_string")
            self._emit(json_text(word))

    def _escaped(self, text: str) -> str:
        """Return the text of a string escaped for JSON, with markers written out."""
        plain = self._source.plain(text)
        if _CONTROL.search(plain):
            self._note_repair("raw_control_character")
        elif '"' not in plain:
            return plain
        return json_text(plain)[1:-1]

    # brackets

    @property
    def _expected_in_bracket(self) -> Literal["key", "value"]:
        """What comes first, and after a comma, inside the innermost open bracket."""
        return "key" if self._open_brackets[-1] == "{" else "value"

    def _open_bracket(self, bracket: str) -> None:
        """Pass on an opening bracket, inside of which the reader now is."""
        self._emit(bracket)
        self._open_brackets.append(bracket)
        self._expects = self._expected_in_bracket
        self._awaits_value = False

    def _close_bracket(self, character: str) -> None:
        """Close the bracket that matches this one, and all brackets inside it."""
        if self._omitted_brackets:
            self._omitted_brackets -= 1
            return
        if character not in (_CLOSING_BRACKETS[bracket] for bracket in self._open_brackets):
            self._note_repair("extra_bracket")
            return
        while _CLOSING_BRACKETS[self._open_brackets[-1]] != character:
            self._note_repair("missing_bracket")
            self._close_innermost()
        self._close_innermost()

    def _close_all(self) -> None:
        """Close the brackets that are still open when the text or the call ends."""
        if self._open_brackets:
            self._note_repair("unclosed_value")
        while self._open_brackets:
            self._close_innermost()

    def _close_innermost(self) -> None:
        """Close the innermost bracket; a missing value is null, a trailing comma is omitted."""
        if self._awaits_value:
            self._note_repair("missing_value")
            self._pending += "null"
        elif "," in self._pending:
            self._note_repair("trailing_comma")
            self._pending = self._pending.replace(",", "")
        self._emit_pending()
        self._emit(_CLOSING_BRACKETS[self._open_brackets.pop()])
        self._expects = "next"
        self._awaits_value = False

    def _emit_pending(self) -> None:
        """Pass on the comma and the white space that were waiting for what follows them."""
        if self._pending:
            self._emit(self._pending)
            self._pending = ""

    def _note_repair(self, name: str) -> None:
        _add_repair(self.repairs, name)


def _json_space(text: str) -> str:
    """Convert white space of any kind to white space that JSON allows."""
    return _NOT_JSON_SPACE.sub(" ", text)
