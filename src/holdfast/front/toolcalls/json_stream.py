"""A JSON object that a model writes, passed on as it comes and mended on the way. Pure.

What has been given can always be completed. Valid JSON passes unchanged.
Each character is looked at once, whatever the length of the object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import NUMBER

_PYTHON_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
    "Infinity": "null",
    "-Infinity": "null",
}
_WORDS = ("true", "false", "null")
_CONTROL = re.compile(r"[\x00-\x1f]")
_BEHIND_BARE = tuple(" \n\t\r,:[]{}\"'")
_NO_SPACE = re.compile(r"[^ \t\r\n]")  # for JSON
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CLOSERS = {"{": "}", "[": "]"}
_MAX_DEPTH = 64  # what is deeper, a client could not read
_BEHIND_STRING = (",", "}", "]", ":")
_ESCAPES = '"\\/bfnrt'


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
            while source.place < len(source.text) and source.text[source.place].isspace():
                source.place += 1
            self._held += _spaces(source.text[start : source.place])
            source.drop_read()
            if source.place < len(source.text):
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
        elif character in _CLOSERS and len(self._open) >= _MAX_DEPTH:
            source.place += 1
            self._too_deep += 1
            self._repair("too_deep")
        elif character in _CLOSERS and "key" in (
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
        if self._expects == "value" and character in _CLOSERS:
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
            if source.place == len(source.text):
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
        behind = yield from source.behind_space(source.place + len(mark))
        if behind == len(source.text):
            return True
        if mark != quote:
            return (
                bool((yield from source.standing(self._follows, behind)))
                if self._follows
                else False
            )
        return source.text[behind] in _BEHIND_STRING or bool(
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
        word = source.plain(source.text[source.place : end])
        source.place = end
        if self._expects == "key":
            self._repair("bare_key")
            self._give(json.dumps(word, ensure_ascii=False))
        elif word in _WORDS or NUMBER.fullmatch(word):
            self._give(word)
        elif word in _PYTHON_WORDS:
            self._repair("python_literal")
            self._give(_PYTHON_WORDS[word])
        else:
            self._repair("bare_string")
            self._give(json.dumps(word, ensure_ascii=False))

    def _escaped(self, text: str) -> str:
        """A string's text, its markers written out, as JSON has it."""
        plain = self._source.plain(text)
        if _CONTROL.search(plain):
            self._repair("raw_control_character")
        elif '"' not in plain:
            return plain
        return json.dumps(plain, ensure_ascii=False)[1:-1]

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
        if character not in (_CLOSERS[bracket] for bracket in self._open):
            self._repair("extra_bracket")
            return
        while _CLOSERS[self._open[-1]] != character:
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
        self._give(_CLOSERS[self._open.pop()])
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
