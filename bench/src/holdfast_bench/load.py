"""The load generator: sends requests at given moments, alone or together, and tells how much of the
machine it took itself.
"""

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
    """Where requests go: any server that speaks OpenAI's protocol. `base_url` ends before /v1."""

    base_url: str
    model: str
    api_key: str = ""
    timeout_seconds: float = 600.0
    goes_on: bool = False  # past what ends an answer, on servers that know `ignore_eos`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One chat request, greedy and streamed unless said otherwise."""

    path = "/v1/chat/completions"
    messages: tuple[Message, ...]
    max_tokens: int
    streamed: bool = True
    more_fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, target: Target) -> dict[str, Any]:
        """As JSON fields."""
        return {
            "messages": list(self.messages),
            **_fields(target, self.max_tokens, streamed=self.streamed),
            **self.more_fields,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request to go on with a text as it stands, greedy and streamed."""

    path = "/v1/completions"
    prompt: str
    max_tokens: int

    def body(self, target: Target) -> dict[str, Any]:
        """As JSON fields."""
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
    """A request of one message."""
    messages = ({"role": "user", "content": text},)
    return Ask(messages=messages, max_tokens=max_tokens, streamed=streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Requests that ran at the same time. `seconds`: from the first sending to the last end."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def completion_tokens(self) -> int:
        """Tokens drawn by all, by the server's usage."""
        return sum(answer.completion_tokens for answer in self.answers)


@dataclass(slots=True)
class ClientCost:
    """What the load generator itself used."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(slots=True)
class Client:
    """Talks to one server and remembers what that cost."""

    target: Target
    cost: ClientCost = field(default_factory=ClientCost)

    def call(self, ask: Ask | Completion) -> Call:
        """The request, ready to run; for those who want to abort it or look at its pieces."""
        target = self.target
        return Call(
            url=target.base_url + ask.path,
            body=ask.body(target),
            api_key=target.api_key,
            timeout_seconds=target.timeout_seconds,
        )

    async def ask(self, ask: Ask | Completion) -> Answer:
        """Send one request and wait for its end."""
        call = self.call(ask)
        with self._watched():
            raw = await call.run()
        return read_answer(raw)

    async def ask_all(self, asks: Sequence[Ask | Completion]) -> Together:
        """Send the requests at once; the answers are parsed after the last one has ended."""
        calls = [self.call(ask) for ask in asks]
        with self._watched():
            began = time.perf_counter()
            raws = await asyncio.gather(*(call.run() for call in calls))
        ended = max(raw.ended_at for raw in raws)
        return Together(answers=tuple(read_answer(raw) for raw in raws), seconds=ended - began)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.disable()  # a collection of ours would look like a pause of the server
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.cost.cpu_seconds += time.process_time() - cpu
            self.cost.wall_seconds += time.perf_counter() - wall
            if was_enabled:
                gc.enable()
