"""Calls as a name in a tag and tagged parameters with raw values: Qwen3-Coder's XML and all that
look like it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.parameters import (
    TagHeader,
    ValueEnd,
    header,
    read_json_body,
    read_json_call,
    read_raw_value,
    read_value,
)
from holdfast.front.toolcalls.typed_values import JSON_TYPES, from_json, typed

_STRING: Final = frozenset({"string"})
_WRAPPERS: Final = frozenset({"arguments", "input", "parameters"})
_CDATA: Final = ("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParameters:
    """A family that writes `<function=NAME><parameter=KEY>VALUE</parameter></function>`, in these
    or other words.

    section: around all calls of a turn; other forms of it are in `sections_too`. wrapper: around
    each call. `write` uses the strings exactly; the reader ignores white space between tags.
    """

    section: tuple[str, str] = ("", "")
    sections_too: tuple[tuple[str, str], ...] = ()
    wrapper: tuple[str, str] = ("", "")
    call: tuple[str, str, str] = ("<function=", ">\n", "</function>")
    parameter: tuple[str, str, str] = ("<parameter=", ">", "</parameter>\n")
    between: str = "\n"  # two calls
    padding: str = ""  # stands once at either side of a value and belongs to the markup
    # how a parameter's tag says that the value is a string, and that it is JSON
    types: tuple[str, str] = ("", "")
    tokens: tuple[str, ...] = ()  # parts of the tags that may be tokens by themselves
    cdata: bool = False  # a value may stand in a CDATA section
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        pairs = (self.section, *self.sections_too, self.wrapper)
        words = [word.strip() for pair in pairs for word in pair] + [
            self._open_call,
            self._close_call,
        ]
        return tuple(
            dict.fromkeys(
                word for word in (*words, self._open_value, self._close_value, *self.tokens) if word
            )
        )

    @property
    def openers(self) -> Sequence[str]:
        """What a call may begin with."""
        pairs = (self.section, *self.sections_too, self.wrapper)
        return tuple(
            dict.fromkeys([word for pair in pairs if (word := pair[0].strip())] + [self._open_call])
        )

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        return self.section[0] + self.between.join(map(self._written, calls)) + self.section[1]

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from one of the openers on. False: none stands here, nothing was put out."""
        opener = yield from source.taken(*self.openers)
        bare = opener == self._open_call
        if bare:
            source.place -= len(opener)
        closers = [
            pair[1].strip()
            for pair in (self.section, *self.sections_too)
            if pair[0] and (bare or pair[0].strip() == opener)
        ]
        begun = False
        while True:
            yield from source.skip_space()
            start = source.place
            wrapped = bool(self.wrapper[0]) and opener == self.wrapper[0].strip() and not begun
            if not wrapped and self.wrapper[0]:
                wrapped = bool((yield from source.taken(self.wrapper[0].strip())))
                yield from source.skip_space()
            read = yield from self._read_call(
                source, parts, bare=bare or (not wrapped and bool(self.wrapper[0])), wrapped=wrapped
            )
            if begun and not read:
                source.place = start  # what follows is text
            begun = begun or read
            if not read or not closers:
                return begun
            yield from source.skip_space()
            if (yield from source.taken(*closers)):
                return True
            if not (yield from source.standing((*self.openers, self._open_call))):
                return True

    # how it is written

    def _written(self, call: Call) -> str:
        values = "".join(self._written_value(key, value) for key, value in call.arguments.items())
        return f"{self.wrapper[0]}{self.call[0]}{call.name}{self.call[1]}{values}{self.call[2]}{self.wrapper[1]}"

    def _written_value(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.cdata and any(character in text for character in "<&\n"):
            text = _CDATA[0] + text + _CDATA[1]
        kind = self.types[0 if isinstance(value, str) else 1]
        return f"{self.parameter[0]}{key}{kind}{self.parameter[1]}{self.padding}{text}{self.padding}{self.parameter[2]}"

    # how it is read

    @property
    def _open_call(self) -> str:
        return self.call[0].lstrip()

    @property
    def _close_call(self) -> str:
        return self.call[2].strip()

    @property
    def _open_value(self) -> str:
        return self.parameter[0].lstrip()

    @property
    def _close_value(self) -> str:
        return self.parameter[2].strip()

    def _read_call(
        self, source: Incoming, parts: CallParts, *, bare: bool, wrapped: bool
    ) -> Waiting[bool]:
        if not (yield from source.taken(*_forms(self._open_call))):
            read = wrapped and (yield from read_json_call(source, parts))
            if read:
                yield from self._close_wrapper(source)
            return read
        tag = yield from header(source)
        tool = parts.tools.named(tag.name) if tag else None
        if tool is None or (bare and not tool.declared):
            return False
        parts.begin(
            tool,
            repair="missing_open" if bare and (self.wrapper[0] or self.section[0]) else "",
        )
        yield from self._read_values(source, parts)
        return True

    def _read_values(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """The parameters of an open call, and its end."""
        while True:
            yield from source.skip_space()
            form = yield from source.taken(*_forms(self._open_value))
            tag = (yield from header(source)) if form else None
            if tag is not None:
                parts.repair("" if form == self._open_value else "parameter_form")
                if self.cdata or not _may_wrap(tag.name, parts):
                    yield from self._read_value(source, parts, tag)
                    continue
                if not (yield from self._read_wrapped(source, parts, tag)):
                    continue
                yield from self._read_end(source, parts, complete=True)
                return
            complete = yield from read_json_body(source, parts, stops=(self._close_call,))
            yield from self._read_end(source, parts, complete=complete)
            return

    def _read_wrapped(self, source: Incoming, parts: CallParts, tag: TagHeader) -> Waiting[bool]:
        """Read a parameter that may hold all arguments as one object.

        False: it does not, and was given as what it is.
        """
        raw = yield from read_raw_value(source, parts, self._value_ends(), padding=self.padding)
        yield from source.skip_space()
        follows = yield from source.standing(_forms(self._open_value))
        found = from_json(raw.strip())
        if (
            isinstance(found, dict)
            and found
            and found.keys() <= parts.types.properties.keys()
            and not follows
        ):
            parts.repair("wrapped_arguments")
            parts.json(raw.strip())
            parts.given.update(found)
            return True
        value = typed(raw, self._types_of(tag, parts))
        parts.repair(value.repair)
        parts.key(tag.name)
        parts.json(value.json)
        return False

    def _types_of(self, tag: TagHeader, parts: CallParts) -> frozenset[str]:
        if self.types[0] and tag.type:
            return JSON_TYPES if tag.type.lower() == "false" else _STRING
        return parts.types.of(tag.name)

    def _read_value(self, source: Incoming, parts: CallParts, tag: TagHeader) -> Waiting[None]:
        types = self._types_of(tag, parts)
        parts.key(tag.name)
        ends = self._value_ends()
        if self.cdata and (yield from source.taken(_CDATA[0])):
            yield from read_value(
                source, parts, (ValueEnd(_CDATA[1], (self._close_value,)),), types=types
            )
            yield from source.taken(self._close_value)
            return
        yield from read_value(source, parts, ends, types=types, padding=self.padding)

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """A closing tag in a value ends it only if the call goes on behind it as calls do."""
        wrapper, section = self.wrapper[1].strip(), self.section[1].strip()
        outer = tuple(
            mark
            for mark in (wrapper, section, *(pair[1].strip() for pair in self.sections_too))
            if mark
        )
        again = tuple(mark for mark in (self.wrapper[0].strip(), self._open_call) if mark)
        ends = [
            ValueEnd(self._close_value, (*_forms(self._open_value), self._close_call)),
            ValueEnd(self._close_value, outer, last=(*outer, *again)),
            ValueEnd(
                self._close_call,
                outer or again,
                last=(*outer, *again),
                closes=False,
                repair="unclosed_value",
            ),
            ValueEnd(
                "\n" + self._open_value,
                (">",),
                closes=False,
                repair="unclosed_value",
                names_parameter=True,
            ),
        ]
        return (
            *ends,
            *(
                ValueEnd(mark, (section or again[0],), closes=False, repair="unclosed_value")
                for mark in outer[:1]
            ),
        )

    def _read_end(
        self, source: Incoming, parts: CallParts, *, complete: bool = False
    ) -> Waiting[None]:
        """The closing tags of a call; they may be missing."""
        yield from source.skip_space()
        closed = yield from source.taken(self._close_call)
        parts.end("" if closed else "unclosed_call", complete=complete)
        source.drop_read()
        yield from self._close_wrapper(source)

    def _close_wrapper(self, source: Incoming) -> Waiting[None]:
        if self.wrapper[1]:
            yield from source.skip_space()
            yield from source.taken(self.wrapper[1].strip())


def _may_wrap(name: str, parts: CallParts) -> bool:
    """Whether the first parameter may hold all arguments: some models write them so, under a name
    that the tool lacks.
    """
    properties = parts.types.properties
    return name in _WRAPPERS and name not in properties and bool(properties) and not parts.given


def _forms(mark: str) -> tuple[str, ...]:
    """A tag's first word with `=NAME` and with ` name=`: models mix them up.

    The family's own stands first.
    """
    stem = mark.rstrip('"').removesuffix("=").removesuffix(" name")
    return tuple(dict.fromkeys((mark, stem + "=", stem + ' name="', stem + " name=")))
