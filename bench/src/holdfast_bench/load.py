"""The load generator: sends requests alone or together, and measures its own cost."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast_bench.answers import Answer, read_answer
from holdfast_bench.wire import Call

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that speaks OpenAI's protocol. base_url: without /v1."""

    base_url: str
    model: str
    api_key: str = ""
    timeout_seconds: float = 600.0
    goes_on: bool = False  # sends `ignore_eos`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A greedy chat request."""

    path = "/v1/chat/completions"
    messages: tuple[Message, ...]
    max_tokens: int
    streamed: bool = True
    more_fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, target: Target) -> dict[str, Any]:
        """The JSON body."""
        return {
            "messages": list(self.messages),
            **_fields(target, self.max_tokens, streamed=self.streamed),
            **self.more_fields,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A greedy, streamed completion of a raw text."""

    path = "/v1/completions"
    prompt: str
    max_tokens: int

    def body(self, target: Target) -> dict[str, Any]:
        """The JSON body."""
        return {"prompt": self.prompt, **_fields(target, self.max_tokens, streamed=True)}


def _fields(target: Target, max_tokens: int, *, streamed: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": target.model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": streamed,
    }
    if streamed:
        fields["stream_options"] = {"include_usage": True}
    if target.goes_on:
        fields["ignore_eos"] = True
    return fields


def user(text: str, *, max_tokens: int, streamed: bool = True) -> Ask:
    """A chat request with one user message."""
    messages = ({"role": "user", "content": text},)
    return Ask(messages=messages, max_tokens=max_tokens, streamed=streamed)


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
class ClientCost:
    """The cost of the load generator."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def cpu_share(self) -> float:
        """CPU time relative to one core."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(slots=True)
class Client:
    """Sends requests to one server and adds up their cost."""

    target: Target
    cost: ClientCost = field(default_factory=ClientCost)

    def call(self, ask: Ask | Completion) -> Call:
        """A request to run, for callers that abort it or inspect its pieces."""
        target = self.target
        return Call(
            url=target.base_url + ask.path,
            body=ask.body(target),
            api_key=target.api_key,
            timeout_seconds=target.timeout_seconds,
        )

    async def ask(self, ask: Ask | Completion) -> Answer:
        """Send one request and wait for the answer."""
        call = self.call(ask)
        with self._watched():
            raw = await call.run()
        return read_answer(raw)

    async def ask_all(self, asks: Sequence[Ask | Completion]) -> Together:
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
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.cost.cpu_seconds += time.process_time() - cpu
            self.cost.wall_seconds += time.perf_counter() - wall
            if was_enabled:
                gc.enable()
