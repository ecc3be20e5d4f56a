"""Calls as a name between markers and a JSON object behind it: Mistral, Kimi K2, DeepSeek V3 and
others. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.json_stream import JsonStream
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.markers import marks_in

_FIELD: Final = re.compile(r"\{(name|id)\}")
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_HEAD_LENGTH: Final = 512
_JSON: Final = Literals()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """A family that writes `MARKER NAME MARKER {...}`.

    section: around all calls of a turn. head: what stands before the arguments, with {name} and
    {id} in it; other heads that are read are in `heads_too`. close: behind the arguments. A reader
    minds no white space between markup.
    """

    section: tuple[str, str] = ("", "")
    head: str
    heads_too: tuple[str, ...] = ()
    close: str = ""
    between: str = ""  # two calls
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return marks_in(
            *self.section, *(word for head in self._heads for word in head[0::2]), self.close
        )

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with."""
        return tuple(
            dict.fromkeys(mark for mark in (self.section[0].strip(), *self._leads) if mark)
        )

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        written = (
            self._written_head(call, number) + _text(call) + self.close
            for number, call in enumerate(calls)
        )
        return self.section[0] + self.between.join(written) + self.section[1]

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from one of the openers on. False: none stands here, nothing was put out."""
        section = self.section[0].strip()
        in_section = bool(section and (yield from source.taken(section)))
        begun = False
        while True:
            start = source.place
            yield from source.skip_space()
            if begun and source.text.startswith((";", ","), source.place):
                source.place += 1
                yield from source.skip_space()
            if not (yield from self._read_call(source, parts)):
                break
            begun = True
        source.place = start
        if begun and in_section:
            yield from source.skip_space()
            yield from source.taken(self.section[1].strip())
        return begun

    @property
    def _heads(self) -> Sequence[Sequence[str]]:
        """Each head as its literals and, between them, the names of its fields."""
        return [_FIELD.split(head) for head in (self.head, *self.heads_too)]

    @property
    def _leads(self) -> Sequence[str]:
        return tuple(dict.fromkeys(head[0].strip() for head in self._heads))

    def _written_head(self, call: Call, number: int) -> str:
        call_id = call.id
        if self.id_form == "function_number" and not call_id.startswith(f"functions.{call.name}:"):
            call_id = f"functions.{call.name}:{number}"
        return self.head.replace("{name}", call.name).replace("{id}", call_id)

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a call from the first literal of its head on."""
        lead = yield from source.taken(*self._leads)
        if not lead:
            return False
        fields = yield from self._fields(source, lead)
        if fields is None:
            return False
        name, call_id = fields.get("name"), fields.get("id", "")
        if name is None:
            found = _NUMBERED.fullmatch(call_id)
            name = found[1] if found else call_id
        stops = self._ends
        tool = parts.tools.named(name) or _first_word(parts, name)
        if tool is not None and name.isdigit() and not tool.declared:
            return (yield from self._read_unnamed(source, parts, call_id))
        if tool is None or not (
            source.text.startswith("{", source.place) or (yield from source.standing(stops))
        ):
            return False
        parts.begin(tool, call_id=call_id)
        if source.text.startswith("{", source.place):
            stream = JsonStream(source, parts.json, stops=stops, follows=self.openers)
            yield from stream.read()
            parts.repair(*stream.repairs)
        else:
            parts.json("{}")
        yield from self._end(source, parts)
        return True

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may stand behind the arguments."""
        return tuple(
            mark for mark in (self.close.strip(), *marks_in(self.close, self.section[1])) if mark
        )

    def _fields(self, source: Incoming, lead: str) -> Waiting[dict[str, str] | None]:
        """Read a head behind its first literal, up to the arguments. None: it is none."""
        follows = {
            word.strip(): field
            for head in self._heads
            for word, field in zip(head[0::2], (*head[1::2], ""), strict=True)
        }
        field = next(head[1] for head in self._heads if head[0].strip() == lead)
        literals = tuple(word for word in follows if word and word not in self._leads)
        fields: dict[str, str] = {}
        while True:
            at, mark = yield from source.find(
                (*literals, "{", *self._ends, *self.openers), source.place, limit=_HEAD_LENGTH
            )
            if field:
                fields.setdefault(field, source.plain(source.text[source.place : at]).strip())
            source.place = at
            if mark not in literals:
                return fields if mark == "{" or mark in self._ends else None
            source.place += len(mark)
            field = follows[mark]
            yield from source.skip_space()

    def _read_unnamed(self, source: Incoming, parts: CallParts, call_id: str) -> Waiting[bool]:
        """A call with a number for a name: its tool is the only one that its arguments fit."""
        repairs = ["inferred_name"]
        if not source.text.startswith("{", source.place):
            return False
        text = yield from _JSON.value(source, repairs, ends="")
        name = parts.tools.only_fitting(json.loads(text))
        if not name:
            return False
        parts.begin(ToolName(name, declared=True), call_id=call_id)
        parts.json(text)
        parts.repair(*repairs)
        yield from self._end(source, parts)
        return True

    def _end(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """Read what stands behind the arguments, and end the call."""
        close = self.close.strip()
        last = (close, *marks_in(close)[-1:])
        closed = not close
        while not closed:
            yield from source.skip_space()
            if source.text.startswith("}", source.place):
                source.place += 1
                parts.repair("extra_bracket")
            elif mark := (yield from source.taken(close, *marks_in(close))):
                closed = mark in last
            else:
                break
        parts.end("" if closed else "unclosed_call", complete=True)
        source.drop_read()


def _first_word(parts: CallParts, name: str) -> ToolName | None:
    """The declared tool that is named before more words, which some write there."""
    words = name.split()
    tool = parts.tools.named(words[0]) if words else None
    return tool if tool is not None and tool.declared else None


def _text(call: Call) -> str:
    return json.dumps(dict[str, Any](call.arguments), ensure_ascii=False)
