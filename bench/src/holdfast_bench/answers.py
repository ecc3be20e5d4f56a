"""Parses raw answers: text with arrival times, usage and finish reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_bench.wire import RawAnswer, split_answer

_THINKING_MARKS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered request. Times are seconds since it was sent."""

    status: int
    text: str
    text_times: tuple[float, ...]  # arrival of each event that brought text
    seconds: float  # until the end of the answer
    prompt_tokens: int  # these three are the server's usage; 0 if it sent none
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    aborted: bool
    error: str

    @property
    def is_good(self) -> bool:
        """Whether the answer is complete and free of errors."""
        return self.status == 200 and not self.error and not self.aborted

    @property
    def first_seconds(self) -> float:
        """Time to the first text, or to the end if the answer comes in one piece."""
        return self.text_times[0] if self.text_times else self.seconds

    def gaps(self, *, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between texts, for gaps that end after `begin` and start before `end`."""
        pairs = zip(self.text_times, self.text_times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


def read_answer(raw: RawAnswer) -> Answer:
    """Parse an answer: streamed or not, chat or plain completion."""
    status, body = split_answer(raw.content())
    if b"data:" in body[:4096] or body.startswith(b":"):
        events = list(_events(raw))
    else:
        events = [(raw.ended_at, parsed)] if isinstance(parsed := _parsed(body), dict) else []
    reader = _Reader()
    for at, event in events:
        reader.take(at - raw.sent_at, event)
    error = raw.error or reader.error
    if status != 200 and not error:
        error = f"status {status}: {body[:300].decode(errors='replace')}"
    if status == 200 and not reader.finish_reason and not error and not raw.aborted:
        error = "the answer ended without a finish_reason"
    return Answer(
        status=status,
        text=_without_marks("".join(reader.texts)),
        text_times=tuple(reader.times),
        seconds=raw.ended_at - raw.sent_at,
        prompt_tokens=_count(reader.usage, "prompt_tokens"),
        completion_tokens=_count(reader.usage, "completion_tokens"),
        cached_tokens=_count(reader.usage.get("prompt_tokens_details") or {}, "cached_tokens"),
        finish_reason=reader.finish_reason,
        aborted=raw.aborted,
        error=error,
    )


class _Reader:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason = ""
        self.error = ""

    def take(self, at: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = str(event["error"])[:300]
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = _text_of(choice)
            if text:
                self.texts.append(text)
                self.times.append(at)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    thought = part.get("reasoning") or part.get("reasoning_content") or ""
    return f"{thought}{part.get('content') or ''}{choice.get('text') or ''}"


def _without_marks(text: str) -> str:
    """Remove the marks around reasoning, which not all servers show."""
    for mark in _THINKING_MARKS:
        text = text.replace(mark, "")
    return text.strip()


def _events(raw: RawAnswer) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events, each with the time of the piece that completed it.

    Lines with the chunk sizes of chunked transfer encoding, which are between events, are
    skipped. An event that is split into several chunks is found by parsing the whole body.
    """
    found = list(_scanned(raw.pieces))
    _, body = split_answer(raw.content())
    whole = [event for line in body.split(b"\n") if (event := _event(line)) is not None]
    if len(whole) == len(found):
        return iter(found)
    last = raw.pieces[-1][0] if raw.pieces else raw.ended_at
    return iter([(last, event) for event in whole])


def _scanned(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = _event(line)
            if event is not None:
                yield at, event
    event = _event(rest)
    if event is not None and pieces:
        yield pieces[-1][0], event


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"data:"):
        return None
    parsed = _parsed(line[5:])
    return parsed if isinstance(parsed, dict) else None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0
