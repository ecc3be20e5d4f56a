"""Calls as XML whose every tag follows a mark of its own, objects and arrays nested: MiniMax M3.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.parameters import ValueEnd, read_json_body, read_value
from holdfast.front.toolcalls.typed_values import json_text, typed

_TAG: Final = re.compile(r"<(/?)([^\s<>=\"]+)(?:\s*=?\s*(?:name\s*=\s*)?\"?([^\"<>]*)\"?)?\s*>")
_TAG_LENGTH = 300
_MAX_DEPTH = 32
# types of members of which the schema says nothing
_GUESSED: Final = frozenset({"number", "boolean"})


class Tag(NamedTuple):
    """A tag behind its mark."""

    name: str
    closes: bool
    value: str  # of its only attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedTags:
    """A family that writes `<invoke name="NAME"><KEY>VALUE</KEY></invoke>` with `mark` before each
    tag.
    """

    mark: str = "]<]minimax[>["
    section: str = "tool_call"
    call: str = "invoke"
    item: str = "item"
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return (self.mark, *self.openers)

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with."""
        return (f"{self.mark}<{self.section}>", f"{self.mark}<{self.call} ")

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them. What is nothing is left out, as the family does."""
        written = "".join(
            f'{self.mark}<{self.call} name="{call.name}">{"".join(self._members(call.arguments))}{self.mark}</{self.call}>\n'
            for call in calls
        )
        return f"{self.mark}<{self.section}>\n{written}{self.mark}</{self.section}>"

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from an opener on. False: none stands here, nothing was put out."""
        begun = False
        while True:
            start = source.place
            yield from source.skip_space()
            tag = (yield from self._tag(source)) if (yield from source.taken(self.mark)) else None
            tool = (
                parts.tools.named(tag.value)
                if tag and tag.name == self.call and not tag.closes
                else None
            )
            if tool is not None:
                parts.begin(tool)
                begun = True
                yield from self._read_arguments(source, parts)
                source.drop_read()
            elif tag == Tag(self.section, True, ""):
                return begun
            elif tag != Tag(self.section, False, "") or begun:
                source.place = start
                return begun

    def _read_arguments(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        while True:
            yield from source.skip_space()
            if (yield from read_json_body(source, parts, stops=(self.mark,))):
                parts.end(complete=True)
                yield from source.skip_space()
                yield from source.taken(f"{self.mark}</{self.call}>")
                return
            start = source.place
            tag = (yield from self._tag(source)) if (yield from source.taken(self.mark)) else None
            if tag is None or tag.closes or tag.name == self.call:
                closed = tag == Tag(self.call, True, "")
                source.place = source.place if closed else start
                parts.end("" if closed else "unclosed_call")
                return
            parts.key(tag.name)
            if parts.types.of(tag.name) == {"string"}:
                yield from read_value(
                    source, parts, self._string_ends(tag.name), types=parts.types.of(tag.name)
                )
            else:
                schema = parts.types.properties.get(tag.name)
                parts.json((yield from self._value(source, parts, schema, depth=0)))
            source.drop_read()

    def _string_ends(self, name: str) -> tuple[ValueEnd, ...]:
        others = (f"{self.mark}</{self.call}>", f"{self.mark}</{self.section}>")
        return (
            ValueEnd(f"{self.mark}</{name}>", ()),
            *(ValueEnd(mark, (), closes=False, repair="unclosed_value") for mark in others),
        )

    def _value(
        self, source: Incoming, parts: CallParts, schema: Any, *, depth: int
    ) -> Waiting[str]:
        """The JSON text of what stands between a tag and the one that closes it, which is read."""
        at, _ = yield from source.find((self.mark,), source.place)
        text, source.place = source.plain(source.text[source.place : at]), at
        names: list[str] = []
        values: list[str] = []
        while True:
            start = source.place
            yield from source.skip_space()
            tag = (yield from self._tag(source)) if (yield from source.taken(self.mark)) else None
            if tag is None or tag.closes or depth > _MAX_DEPTH:
                if tag is None or tag.name in (self.call, self.section):
                    source.place = start
                    parts.repair("unclosed_value")
                break
            names.append(tag.name)
            values.append(
                (
                    yield from self._value(
                        source, parts, parts.types.inner(schema, tag.name), depth=depth + 1
                    )
                )
            )
        types = parts.types.allowed(schema)
        if self._is_list(names, types, names_item=parts.types.declares(schema, self.item)):
            return f"[{', '.join(values)}]"
        if names:
            return (
                "{"
                + ", ".join(
                    f"{json_text(name)}: {value}" for name, value in zip(names, values, strict=True)
                )
                + "}"
            )
        if not text and types and "string" not in types:
            return "[]" if "array" in types else "{}"
        value = typed(text, types or (_GUESSED if depth else types))
        parts.repair(value.repair)
        return value.json

    def _is_list(self, names: Sequence[str], types: Collection[str], *, names_item: bool) -> bool:
        """Whether nested tags are array items rather than members. names_item: the schema declares
        a member called item.
        """
        if set(names) != {self.item}:
            return False
        return "object" not in types or len(names) > 1 or ("array" in types and not names_item)

    def _tag(self, source: Incoming) -> Waiting[Tag | None]:
        """Read a tag behind its mark. None: there is none."""
        at, mark = yield from source.find((">", "\n", self.mark), source.place, limit=_TAG_LENGTH)
        found = _TAG.fullmatch(source.text[source.place : at + 1]) if mark == ">" else None
        if found is None:
            return None
        source.place = at + 1
        return Tag(found[2], bool(found[1]), found[3] or "")

    def _members(self, value: Mapping[str, Any]) -> Iterator[str]:
        return (self._written(key, inner) for key, inner in value.items() if inner is not None)

    def _written(self, name: str, value: Any) -> str:
        if isinstance(value, Mapping):
            inner = "".join(self._members(value))
        elif isinstance(value, (list, tuple)):
            inner = "".join(self._written(self.item, each) for each in value)
        else:
            inner = value if isinstance(value, str) else json.dumps(value)
        return f"{self.mark}<{name}>{inner}{self.mark}</{name}>"
