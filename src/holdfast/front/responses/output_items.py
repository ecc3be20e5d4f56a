"""The output items of a Response: their JSON, and the events by which each of them grows."""

from __future__ import annotations

import abc
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from holdfast.front.openai.answers import ContentLogprob
from holdfast.front.responses.tools import ClientTool

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Event: TypeAlias = tuple[str, Mapping[str, Any]]  # type without `response.`, and fields

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
# the decodable beginning of a JSON string: up to its end or to an incomplete escape
_DECODABLE = re.compile(
    rf'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_HIGH}(?:{_LOW}|{_NO_LOW}))*+'
)


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """A thought."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A thought, whole, for clients that asked for a summary."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Visible text of the answer."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText] = ()


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """A thought. `encrypted_content` repeats it, sealed, for clients that send their history back."""

    id: str
    summary: Sequence[SummaryText] = ()
    content: Sequence[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: ItemStatus


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of a function. `arguments`: JSON text."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: ItemStatus


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a tool that takes a text."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str
    status: ItemStatus


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="compaction"):
    """A sealed summary of the conversation so far, which clients send back in place of it."""

    id: str
    encrypted_content: str


OutputItem: TypeAlias = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CompactionItem
)


@dataclass(slots=True, kw_only=True)
class WrittenItem(abc.ABC):
    """An output item while it is generated."""

    id: str
    pieces: list[str] = field(default_factory=list)

    id_prefix: ClassVar[str]
    text_event: ClassVar[str] = ""  # of deltas and of the whole text
    text_key: ClassVar[str] = "text"
    part_event: ClassVar[str] = ""  # empty: the item itself has the text
    index_key: ClassVar[str] = ""  # of the part

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)

    @abc.abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item so far."""

    def part(self) -> Any:
        """The part that has the text so far."""
        return None

    def beginning(self) -> list[Event]:
        """The events after `output_item.added`."""
        return self._part_events("added")

    def more(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """The events of more text."""
        if not text and not logprobs:
            return []
        self.pieces.append(text)
        delta = {**self._index(), "delta": text, **self._logprobs(logprobs)}
        return [(f"{self.text_event}.delta", delta)]

    def ending(self) -> list[Event]:
        """The events before `output_item.done`."""
        whole = {**self._index(), self.text_key: self.text, **self._logprobs(None)}
        return [(f"{self.text_event}.done", whole), *self._part_events("done")]

    def _index(self) -> dict[str, int]:
        return {self.index_key: 0} if self.index_key else {}

    def _part_events(self, what: str) -> list[Event]:
        if not self.part_event:
            return []
        return [(f"{self.part_event}.{what}", {**self._index(), "part": self.part()})]

    def _logprobs(self, new: Sequence[ContentLogprob] | None) -> dict[str, Any]:
        """The field `logprobs` of an event; None: those of the whole text."""
        return {}


@dataclass(slots=True, kw_only=True)
class WrittenMessage(WrittenItem):
    """Visible text."""

    logprobs: list[Sequence[ContentLogprob]] = field(default_factory=list)

    id_prefix = "msg"
    text_event = "output_text"
    part_event = "content_part"
    index_key = "content_index"

    def part(self) -> OutputText:
        """The text."""
        return OutputText(text=self.text, logprobs=self._all())

    def item(self, status: ItemStatus) -> MessageItem:
        """The message."""
        content = () if status == "in_progress" else (self.part(),)
        return MessageItem(id=self.id, status=status, content=content)

    def _all(self) -> list[ContentLogprob]:
        return list(itertools.chain.from_iterable(self.logprobs))

    def _logprobs(self, new: Sequence[ContentLogprob] | None) -> dict[str, Any]:
        if new:
            self.logprobs.append(new)
        return {"logprobs": self._all() if new is None else new}


@dataclass(slots=True, kw_only=True)
class WrittenThought(WrittenItem):
    """A thought. sealed: its `encrypted_content` once it is complete; empty: not shown."""

    sealed: str = ""

    id_prefix = "rs"
    text_event = "reasoning_text"
    part_event = "content_part"
    index_key = "content_index"
    part_key: ClassVar[str] = "content"

    def part(self) -> ReasoningText | SummaryText:
        """The text."""
        return ReasoningText(text=self.text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        """The reasoning item."""
        parts: dict[str, Any] = {self.part_key: ()}
        if status != "in_progress":
            parts = {self.part_key: (self.part(),)}
        sealed = self.sealed or msgspec.UNSET
        return ReasoningItem(id=self.id, status=status, encrypted_content=sealed, **parts)


@dataclass(slots=True, kw_only=True)
class WrittenSummary(WrittenThought):
    """A thought, shown as a summary."""

    text_event = "reasoning_summary_text"
    part_event = "reasoning_summary_part"
    index_key = "summary_index"
    part_key = "summary"

    def part(self) -> SummaryText:
        """The text."""
        return SummaryText(text=self.text)


@dataclass(slots=True, kw_only=True)
class WrittenCall(WrittenItem):
    """A call of a function."""

    call_id: str
    tool: ClientTool

    id_prefix = "fc"
    text_event = "function_call_arguments"
    text_key = "arguments"

    def item(self, status: ItemStatus) -> OutputItem:
        """The call."""
        return FunctionCallItem(arguments=self.text, status=status, **self._head())

    def ending(self) -> list[Event]:
        """The arguments, with the function's name."""
        return [(f"{self.text_event}.done", {"arguments": self.text, "name": self.tool.name})]

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "call_id": self.call_id,
            "name": self.tool.name,
            "namespace": self.tool.namespace or msgspec.UNSET,
        }


@dataclass(slots=True, kw_only=True)
class WrittenCustomCall(WrittenCall):
    """A call of a custom tool, whose text the model writes as JSON."""

    decoder: CustomInput = field(default_factory=lambda: CustomInput())

    id_prefix = "ctc"
    text_event = "custom_tool_call_input"
    text_key = "input"

    def item(self, status: ItemStatus) -> CustomCallItem:
        """The call."""
        return CustomCallItem(input=self.text, status=status, **self._head())

    def more(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """The events of the text that the JSON has shown so far."""
        return WrittenItem.more(self, self.decoder.more(text))

    def ending(self) -> list[Event]:
        """The rest of the text, then the whole text."""
        return [*WrittenItem.more(self, self.decoder.rest()), *WrittenItem.ending(self)]


class CustomInput:
    """Decodes the JSON of a custom call as it comes: `more` and `rest` together give its `input`."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._given: list[str] = []
        self._waiting = ""  # JSON that is not decoded yet
        self._is_open = False

    def more(self, fragment: str) -> str:
        """The text that a further fragment of JSON adds."""
        self._arguments.append(fragment)
        self._waiting += fragment
        if not self._is_open:
            opening = _OPENING.match(self._waiting)
            if opening is None:
                return ""
            self._is_open = True
            self._waiting = self._waiting[opening.end() :]
        found = _DECODABLE.match(self._waiting)
        piece = found[0] if found else ""
        if not piece:
            return ""
        self._waiting = self._waiting[len(piece) :]
        return self._give(json.loads(f'"{piece}"', strict=False))

    def rest(self) -> str:
        """The remaining text after the end of the call. JSON of another form is given as it is."""
        arguments = "".join(self._arguments)
        try:
            whole = json.loads(arguments, strict=False)
        except ValueError:
            whole = None
        text = whole.get("input") if isinstance(whole, dict) else None
        if not isinstance(text, str):
            return "" if self._is_open else self._give(arguments)
        given = "".join(self._given)
        text = _mended(text)
        return self._give(text[len(given) :]) if text.startswith(given) else ""

    def _give(self, text: str) -> str:
        text = _mended(text)
        self._given.append(text)
        return text


def _mended(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON cannot carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
