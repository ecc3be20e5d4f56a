"""What an answer says, whatever tokens it is made of, and however a client or a template has
written it down again. Pure.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.front.prompt.conversation import REASONING_FIELDS
from holdfast.front.toolcalls.segments import (
    AnswerPart,
    CallArguments,
    CallBegun,
    Segment,
    SegmentFormat,
    TextJoints,
)
from holdfast.wire.output import OutputDelta, text_of, tool_calls_of

# characters that are read at once: each step of a reader looks through all that has come
_PIECE = 1024
_MOST_EXACT = 2**53  # a larger whole number does not survive a client that computes in doubles


class AnswerMeaning(NamedTuple):
    """An answer without what may change on its way through a client: white space at edges, the
    spelling of arguments.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments as canonical JSON


def meaning(reasoning: str, content: str, calls: Iterable[tuple[str, Any]]) -> AnswerMeaning:
    """The meaning of an answer with these parts; arguments are JSON text or objects."""
    settled = tuple((name, canonical_arguments(arguments)) for name, arguments in calls)
    return AnswerMeaning(reasoning.strip(), content.strip(), settled)


def meaning_of_message(message: Mapping[str, Any]) -> AnswerMeaning | None:
    """What a message of the assistant says; None when it is not of text and calls."""
    content = message.get("content") or ""
    reasoning = next(
        (
            found
            for name in REASONING_FIELDS
            if isinstance(found := message.get(name), str) and found
        ),
        "",
    )
    calls: list[tuple[str, Any]] = []
    sent = message.get("tool_calls") or ()
    for call in sent if isinstance(sent, list | tuple) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        calls.append((function["name"], function.get("arguments")))
    return meaning(reasoning, content, calls) if isinstance(content, str) else None


def meaning_of_deltas(deltas: Sequence[OutputDelta]) -> AnswerMeaning | None:
    """What an answer has said; None when a call was cut, which nobody sends back."""
    calls = tool_calls_of(deltas)
    if not all(call.is_complete for call in calls):
        return None
    return meaning(
        text_of(deltas, "reasoning"),
        text_of(deltas),
        ((call.name, call.arguments) for call in calls),
    )


def meaning_of_text(text: str, form: SegmentFormat, *, cut: bool = False) -> AnswerMeaning:
    """What a text says, as a fresh format reads it.

    cut: the text ends because the answer had become too long, so that what is open in it is not
    closed.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    joints = TextJoints()
    calls: list[tuple[str, list[str]]] = []
    pieces = (text[place : place + _PIECE] for place in range(0, len(text), _PIECE))
    parts: Iterable[AnswerPart] = (
        *(part for piece in pieces for part in form.push(piece)),
        *form.flush(cut=cut),
    )
    for part in parts:
        separator = joints.separator(part)
        if isinstance(part, Segment):
            texts[part.kind].append(separator + part.text)
        elif isinstance(part, CallBegun):
            calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.text)
    return meaning(
        "".join(texts["reasoning"]),
        "".join(texts["text"]),
        ((name, "".join(given)) for name, given in calls),
    )


def canonical_arguments(arguments: Any) -> str:
    """One spelling for arguments that say the same: order of keys, white space, escapes and the
    spelling of numbers are settled.

    Text that is no JSON stays as it is.
    """
    if arguments is None or arguments == "":
        return "{}"
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(text, parse_int=_number, parse_float=_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return arguments.strip() if isinstance(arguments, str) else ""


def _number(spelled: str) -> int | float:
    """1, 1.0 and 1e0 are one number, and so are those that one double stands for."""
    value = float(spelled)
    if value.is_integer() and abs(value) <= _MOST_EXACT:
        return int(value)
    return value


class ReadTexts:
    """What texts say, so that the answers of a long conversation are not parsed with every turn;
    the longest unused go first.

    Any thread may call it.
    """

    def __init__(self, *, most_characters: int = 4_000_000) -> None:
        self._most_characters, self._characters = most_characters, 0
        self._meanings: OrderedDict[bytes, tuple[AnswerMeaning, int]] = OrderedDict()
        self._lock = threading.Lock()

    def meaning(
        self, text: str, form: Callable[[], SegmentFormat], *, context: str
    ) -> AnswerMeaning:
        """What a text says. context: stands for the format and all that it reads by, such as the
        tools.
        """
        key = hashlib.blake2b(
            f"{context}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        with self._lock:
            if (known := self._meanings.get(key)) is not None:
                self._meanings.move_to_end(key)
                return known[0]
        found = meaning_of_text(text, form())
        with self._lock:
            if self._meanings.setdefault(key, (found, len(text)))[0] is found:
                self._characters += len(text)
            while self._characters > self._most_characters:
                self._characters -= self._meanings.popitem(last=False)[1][1]
        return found
