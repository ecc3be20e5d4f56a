"""The output items of a Response as they are generated, and the input of custom tools."""

from __future__ import annotations

import abc
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from holdfast.front.openai.answers import ContentLogprob
from holdfast.front.responses.shapes import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from holdfast.front.responses.tools import ClientTool

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
# what of a JSON string can be decoded already: up to its end, or to an escape that is not all there
_WHOLE = re.compile(
    rf'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_HIGH}(?:{_LOW}|{_NO_LOW}))*+'
)
Event = tuple[str, Mapping[str, Any]]  # its type without `response.`, and its own fields


class CustomInput:
    """Decodes one call's input.

    All that `more` and `rest` give joins to what the call's JSON has in `input`.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._waiting = ""  # behind what has been given
        self._is_open = False
        self._given = ""

    def more(self, fragment: str) -> str:
        """What a further fragment of the arguments brings of the input."""
        self._arguments.append(fragment)
        self._waiting += fragment
        if not self._is_open:
            opening = _OPENING.match(self._waiting)
            if opening is None:
                return ""
            self._is_open, self._waiting = True, self._waiting[opening.end() :]
        found = _WHOLE.match(self._waiting)
        piece = found[0] if found else ""
        self._waiting = self._waiting[len(piece) :]
        return self._give(_decoded(piece))

    def rest(self) -> str:
        """What of the input is still to be given when the call has ended.

        Arguments of another form are given as they are.
        """
        arguments = "".join(self._arguments)
        try:
            whole = json.loads(arguments, strict=False)
        except ValueError:
            whole = None
        text = whole.get("input") if isinstance(whole, dict) else None
        if not isinstance(text, str):
            return "" if self._is_open else self._give(arguments)
        text = _mended(text)
        return self._give(text[len(self._given) :]) if text.startswith(self._given) else ""

    def _give(self, text: str) -> str:
        self._given += text
        return text


def _decoded(piece: str) -> str:
    return _mended(json.loads(f'"{piece}"', strict=False)) if piece else ""


def _mended(text: str) -> str:
    """Without halves of surrogate pairs, which no JSON answer can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True, kw_only=True)
class WrittenItem(abc.ABC):
    """An item to which more is added. Subclasses are the kinds."""

    id: str
    pieces: list[str] = field(default_factory=list)

    id_prefix: ClassVar[str]
    text_event: ClassVar[str]  # of deltas and of the whole text
    text_key: ClassVar[str] = "text"
    part_event: ClassVar[str] = ""  # of the part that has the text; empty: the item itself has it
    part_index: ClassVar[Mapping[str, int]] = {}

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)

    @abc.abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item so far."""

    def part(self) -> Any:
        """Its part so far, of an item that has one."""
        return None

    def beginning(self) -> list[Event]:
        """What follows the event that says that the item is there."""
        return (
            [(f"{self.part_event}.added", {**self.part_index, "part": self.part()})]
            if self.part_event
            else []
        )

    def more(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """More text."""
        if not text and not logprobs:
            return []
        self.pieces.append(text)
        return [
            (
                f"{self.text_event}.delta",
                {**self.part_index, "delta": text, **self._logprobs(logprobs)},
            )
        ]

    def ending(self) -> list[Event]:
        """What precedes the event that says that the item is done."""
        text = (
            f"{self.text_event}.done",
            {**self.part_index, self.text_key: self.text, **self._logprobs(None)},
        )
        return (
            [text, (f"{self.part_event}.done", {**self.part_index, "part": self.part()})]
            if self.part_event
            else [text]
        )

    def _logprobs(self, new: Sequence[ContentLogprob] | None) -> dict[str, Any]:
        """The field for log-probabilities; None: all of them."""
        return {}


@dataclass(slots=True, kw_only=True)
class WrittenMessage(WrittenItem):
    """Visible text."""

    logprobs: list[Sequence[ContentLogprob]] = field(default_factory=list)

    id_prefix, text_event, part_event, part_index = (
        "msg",
        "output_text",
        "content_part",
        {"content_index": 0},
    )

    def part(self) -> OutputText:
        """The text."""
        return OutputText(text=self.text, logprobs=self._all())

    def item(self, status: ItemStatus) -> MessageItem:
        """The message."""
        return MessageItem(
            id=self.id, status=status, content=() if status == "in_progress" else (self.part(),)
        )

    def _all(self) -> list[ContentLogprob]:
        return list(itertools.chain.from_iterable(self.logprobs))

    def _logprobs(self, new: Sequence[ContentLogprob] | None) -> dict[str, Any]:
        if new:
            self.logprobs.append(new)
        return {"logprobs": self._all() if new is None else new}


@dataclass(slots=True, kw_only=True)
class WrittenThought(WrittenItem):
    """A thought, shown as it is. sealed: it in the form in which clients bring it back, once it is
    whole; empty: not shown.
    """

    sealed: str = ""

    id_prefix, text_event, part_event, part_index = (
        "rs",
        "reasoning_text",
        "content_part",
        {"content_index": 0},
    )

    def part(self) -> ReasoningText | SummaryText:
        """The thought."""
        return ReasoningText(text=self.text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        """The reasoning item."""
        content = () if status == "in_progress" else (ReasoningText(text=self.text),)
        return ReasoningItem(
            id=self.id,
            status=status,
            content=content,
            encrypted_content=self.sealed or msgspec.UNSET,
        )


@dataclass(slots=True, kw_only=True)
class WrittenSummary(WrittenThought):
    """A thought, shown as summary."""

    text_event, part_event, part_index = (
        "reasoning_summary_text",
        "reasoning_summary_part",
        {"summary_index": 0},
    )

    def part(self) -> SummaryText:
        """The thought."""
        return SummaryText(text=self.text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        """The reasoning item."""
        summary = () if status == "in_progress" else (self.part(),)
        return ReasoningItem(
            id=self.id,
            status=status,
            summary=summary,
            encrypted_content=self.sealed or msgspec.UNSET,
        )


@dataclass(slots=True, kw_only=True)
class WrittenCall(WrittenItem):
    """A call of a function."""

    call_id: str
    tool: ClientTool

    id_prefix, text_event, text_key = "fc", "function_call_arguments", "arguments"

    def item(self, status: ItemStatus) -> OutputItem:
        """The call."""
        return FunctionCallItem(arguments=self.text, status=status, **self._head())

    def ending(self) -> list[Event]:
        """The arguments, and whose."""
        return [(f"{self.text_event}.done", {"arguments": self.text, "name": self.tool.name})]

    def _head(self) -> dict[str, Any]:
        namespace = self.tool.namespace or msgspec.UNSET
        return {
            "id": self.id,
            "call_id": self.call_id,
            "name": self.tool.name,
            "namespace": namespace,
        }


@dataclass(slots=True, kw_only=True)
class WrittenCustomCall(WrittenCall):
    """A call of a custom tool, whose text the model writes as JSON."""

    decoder: CustomInput = field(default_factory=CustomInput)

    id_prefix, text_event, text_key = "ctc", "custom_tool_call_input", "input"

    def item(self, status: ItemStatus) -> CustomCallItem:
        """The call."""
        return CustomCallItem(input=self.text, status=status, **self._head())

    def more(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """More of the text, as far as the JSON has come."""
        return WrittenItem.more(self, self.decoder.more(text))

    def ending(self) -> list[Event]:
        """The rest of the text, and all of it."""
        return [*WrittenItem.more(self, self.decoder.rest()), *WrittenItem.ending(self)]
