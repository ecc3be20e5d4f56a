"""The load generator: sends requests alone or together, parses their answers, and measures its own
cost.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast_bench.wire import Call, RawAnswer, split_answer

Message = dict[str, Any]
_THINKING_MARKS = ("<think>", "</think>")  # not all servers show them


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that speaks OpenAI's protocol. base_url: without /v1."""

    base_url: str
    model: str
    timeout_seconds: float = 600.0
    goes_on: bool = False  # sends `ignore_eos`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A greedy request: a chat, or the completion of a raw text."""

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    max_tokens: int
    streamed: bool = True
    more_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The endpoint."""
        return "/v1/completions" if self.prompt else "/v1/chat/completions"

    def body(self, target: Target) -> dict[str, Any]:
        """The JSON body."""
        fields: dict[str, Any] = {
            "model": target.model,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "stream": self.streamed,
        }
        if self.prompt:
            fields["prompt"] = self.prompt
        else:
            fields["messages"] = list(self.messages)
        if self.streamed:
            fields["stream_options"] = {"include_usage": True}
        if target.goes_on:
            fields["ignore_eos"] = True
        return {**fields, **self.more_fields}


def user(text: str, *, max_tokens: int, streamed: bool = True) -> Ask:
    """A chat request with one user message."""
    messages = ({"role": "user", "content": text},)
    return Ask(messages=messages, max_tokens=max_tokens, streamed=streamed)


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


def errors_of(answers: Sequence[Answer]) -> list[str]:
    """The errors of the answers, without repetition."""
    bad = [answer for answer in answers if not answer.is_good]
    return list(dict.fromkeys(answer.error or "the answer did not end" for answer in bad))


def cached_share(answers: Sequence[Answer]) -> list[float]:
    """The share of all prompt tokens that was cached; empty if the server sent no usage."""
    read = sum(answer.prompt_tokens for answer in answers)
    return [sum(answer.cached_tokens for answer in answers) / read] if read else []


def read_answer(raw: RawAnswer) -> Answer:
    """Parse an answer: streamed or not, chat or plain completion."""
    status, body = split_answer(raw.content())
    if b"data:" in body[:4096] or body.startswith(b":"):
        events = _events(raw, body)
    else:
        events = [(raw.ended_at, parsed)] if (parsed := _parsed(body)) is not None else []
    texts, times = list[str](), list[float]()
    usage: dict[str, Any] = {}
    finish_reason, error = "", raw.error
    for at, event in events:
        if event.get("error"):
            error = error or str(event["error"])[:300]
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            if text := _text_of(choice):
                texts.append(text)
                times.append(at - raw.sent_at)
    if status != 200 and not error:
        error = f"status {status}: {body[:300].decode(errors='replace')}"
    if not finish_reason and not error and not raw.aborted:
        error = "the answer ended without a finish_reason"
    whole = "".join(texts)
    for mark in _THINKING_MARKS:
        whole = whole.replace(mark, "")
    return Answer(
        status=status,
        text=whole.strip(),
        text_times=tuple(times),
        seconds=raw.ended_at - raw.sent_at,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        finish_reason=finish_reason,
        aborted=raw.aborted,
        error=error,
    )


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    thought = part.get("reasoning") or part.get("reasoning_content") or ""
    return f"{thought}{part.get('content') or ''}{choice.get('text') or ''}"


def _events(raw: RawAnswer, body: bytes) -> list[tuple[float, dict[str, Any]]]:
    """Server-sent events, each with the time of the piece that completed it.

    Lines with the chunk sizes of chunked transfer encoding, which are between events, are
    skipped. An event that is split into several chunks is found by parsing the whole body.
    """
    found, rest = [], b""
    for at, data in [*raw.pieces, (raw.ended_at, b"\n")]:
        *lines, rest = (rest + data).split(b"\n")
        found += [(at, event) for line in lines if (event := _event(line)) is not None]
    whole = [event for line in body.split(b"\n") if (event := _event(line)) is not None]
    return found if len(whole) == len(found) else [(raw.ended_at, event) for event in whole]


def _event(line: bytes) -> dict[str, Any] | None:
    return _parsed(line[5:]) if line.startswith(b"data:") else None


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Concurrent requests. seconds: from the first request sent to the last answer ended."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all answers, from the servers' usage."""
        return sum(answer.completion_tokens for answer in self.answers)


@dataclass(slots=True)
class Client:
    """Sends requests to one server. cpu_seconds: what that has cost so far."""

    target: Target
    cpu_seconds: float = 0.0

    def call(self, ask: Ask) -> Call:
        """A request to run, for callers that abort it or inspect its pieces."""
        target = self.target
        return Call(
            url=target.base_url + ask.path,
            body=ask.body(target),
            timeout_seconds=target.timeout_seconds,
        )

    async def ask(self, ask: Ask) -> Answer:
        """Send one request and wait for the answer."""
        return (await self.ask_all([ask])).answers[0]

    async def ask_all(self, asks: Sequence[Ask]) -> Together:
        """Send the requests together; the answers are parsed after the last one has ended."""
        calls = [self.call(ask) for ask in asks]
        with self._watched():
            began = time.perf_counter()
            raws = await asyncio.gather(*(call.run() for call in calls))
        ended = max(raw.ended_at for raw in raws)
        return Together(answers=tuple(read_answer(raw) for raw in raws), seconds=ended - began)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.disable()  # a garbage collection here would look like a pause of the server
        began = time.process_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.process_time() - began
            if was_enabled:
                gc.enable()
