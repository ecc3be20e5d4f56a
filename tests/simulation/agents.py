"""The clients of the simulated server: each agent holds a conversation over HTTP, in one of the
protocols, and checks every answer against the oracle.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.actions import BLOCK, Turn
from tests.simulation.device import END_TOKEN, plain_tokens, tokenizer
from tests.simulation.network import Broken, Exchange

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

FILLER = " fast"  # one token, wherever it stands
PATIENCE_SECONDS = 7200.0  # no request takes longer, whatever happens
MOST_ATTEMPTS = 4
_LENGTHS = ("max_tokens", "model_context_window_exceeded")  # how Messages call it


@dataclass
class Heard:
    """What a client has of one answer.

    texts: of each choice. ends: the reason of each choice's end, if it has come.
    """

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    error: str = ""
    message: str = ""
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    request_id: str = ""  # the answer's

    def add(self, choice: int, text: str | None) -> None:
        self.texts[choice] = self.texts.get(choice, "") + (text or "")


class Agent:
    """One agent; a task of the world."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation = simulation
        self.world = simulation.world
        self.name = name
        self.messages: list[dict[str, str]] = []
        self.is_busy = False
        self.asked = 0
        self.asked_at = 0.0
        self.is_asking = False
        self._dice = random.Random(f"{simulation.scenario.order} {name}")
        self._turns: deque[Turn] = deque()
        self._task = self.world.outside.spawn(self._run, f"agent {name}")
        self._is_idle = False

    def give(self, turn: Turn) -> None:
        """A turn for it to take when it is done with the others."""
        self._turns.append(turn)
        self.is_busy = True
        if self._is_idle:
            self.world.wake(self._task)

    def _run(self) -> None:
        while True:
            while not self._turns:
                self.is_busy = False
                self._is_idle = True
                self.world.block()
                self._is_idle = False
            turn = self._turns.popleft()
            self._take(turn)

    # -- one turn

    def _take(self, turn: Turn) -> None:
        self.asked += 1
        if turn.forget:
            kept = max(0, len(self.messages) - turn.forget)
            del self.messages[kept:]
            while self.messages and self.messages[-1]["role"] == "user":
                self.messages.pop()
        self.messages.append({"role": "user", "content": self._text(turn)})
        marker = f"{self.name}-{self.asked}".replace(".", "x").replace("+", "y").replace(" ", "-")
        for attempt in range(MOST_ATTEMPTS):
            heard = self._ask(turn, marker, attempt)
            self.is_asking = False
            if heard is None and turn.reader == "cancels":
                break
            if heard is None:  # the connection broke
                self.world.block(turn.wait_seconds)
                continue
            if heard.status == 200 and not heard.error:
                self._reply(heard)
                return
            if heard.status in (429, 500, 503) or heard.error:
                self.world.block(turn.wait_seconds)
                continue
            break
        self.messages.pop()  # it gives up

    def _reply(self, heard: Heard) -> None:
        self.messages.append({"role": "assistant", "content": heard.texts.get(0, "")})

    def _text(self, turn: Turn) -> str:
        plain = plain_tokens()
        words = [self._dice.choice(plain) for _ in range(min(turn.tokens, 12))]
        text = f"{self.name} {self.asked}: {tokenizer().decode(words)}"
        filler = max(0, turn.tokens - 12)
        if turn.edge is not None:
            used = len(tokenizer().encode(str([*self.messages, text])).ids) + filler
            filler += (-used) % BLOCK + turn.edge
        return text + FILLER * max(0, filler)

    def about_tokens(self) -> int:
        """The length of its conversation, about."""
        return len(tokenizer().encode(str(self.messages)).ids)

    def _body(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        common: dict[str, Any] = {
            "model": f"{turn.model}:{turn.adapter}" if turn.adapter else turn.model,
            "stream": turn.streams,
            "temperature": 0.7 if turn.seed is not None else 0.0,
        }
        if turn.kv_bits:
            common["kv_bits"] = turn.kv_bits
        if turn.tenant:
            common["cache_salt"] = turn.tenant
        if turn.seed is not None and turn.protocol != "messages":
            common["seed"] = turn.seed
        match turn.protocol:
            case "chat":
                more: dict[str, Any] = {"stream_options": {"include_usage": True}}
                return "/v1/chat/completions", {
                    **common,
                    **(more if turn.streams else {}),
                    "messages": self.messages,
                    "max_completion_tokens": turn.max_tokens,
                    "n": turn.choices,
                }
            case "completions":
                more = {"stream_options": {"include_usage": True}}
                text = "\n".join(message["content"] for message in self.messages)
                return "/v1/completions", {
                    **common,
                    **(more if turn.streams else {}),
                    "prompt": text,
                    "max_tokens": turn.max_tokens,
                    "n": turn.choices,
                }
            case "messages":
                return "/v1/messages", {
                    **common,
                    "messages": self.messages,
                    "max_tokens": turn.max_tokens,
                }
            case "responses":
                return "/v1/responses", {
                    **common,
                    "input": self.messages,
                    "max_output_tokens": turn.max_tokens,
                    "store": False,
                }

    def _ask(self, turn: Turn, marker: str, attempt: int) -> Heard | None:
        """Ask and read; returns what came, or None if the connection broke."""
        simulation = self._simulation
        path, body = self._body(turn)
        request_id = f"{marker}.{attempt}"
        headers = {"x-request-id": request_id, **simulation.key_headers}
        if turn.reader == "retries":
            headers["idempotency-key"] = marker
        if turn.session:
            headers["x-session-id"] = turn.session
        if turn.is_batch:
            headers["x-holdfast-priority"] = "batch"
        if turn.timeout_seconds is not None:
            headers["x-holdfast-timeout"] = str(turn.timeout_seconds)
        front = simulation.front
        self.asked_at = began = self.world.now
        self.is_asking = True
        self.world.tell(f"{self.name} asks {body['model']} ({path}, request {request_id})")
        exchange = Exchange(front, "POST", path, body, headers=headers)
        simulation.checks.began(request_id, turn)
        heard = Heard()
        try:
            pieces = self._read(exchange, turn, attempt)
            if turn.streams:
                _hear_stream(turn.protocol, pieces, heard, exchange)
            else:
                content = b"".join(pieces)
                heard.status = exchange.status
                _hear_whole(turn.protocol, json.loads(content) if content else {}, heard)
        except Broken:
            simulation.checks.broke(request_id, turn, heard, exchange)
            return None
        except TimeoutError:
            simulation.violation("bounded time", f"request {request_id} never ends")
        heard.status = heard.status or exchange.status
        self.world.tell(
            f"{self.name} has {heard.status} {heard.error or heard.ends} of request {request_id}"
        )
        simulation.checks.ended(request_id, turn, heard, began=began, front=front)
        if self.name.startswith("last "):
            simulation.checks.recovered(turn.model, 0 if heard.error else heard.status)
        return heard

    def _read(self, exchange: Exchange, turn: Turn, attempt: int) -> Iterator[bytes]:
        pieces = 0
        leaves = turn.reader in ("cancels", "breaks", "retries") and attempt == 0
        while True:
            if leaves and pieces >= turn.read_pieces:
                exchange.close()
                raise Broken
            piece = exchange.read(seconds=PATIENCE_SECONDS)
            if piece is None:
                return
            if turn.reader == "slow":
                self.world.block(turn.wait_seconds / 10)
            pieces += 1
            yield piece


def _hear_stream(protocol: str, pieces: Iterator[bytes], heard: Heard, exchange: Exchange) -> None:
    unread = b""
    for piece in pieces:
        heard.status = exchange.status
        unread += piece
        *events, unread = unread.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    _hear_event(protocol, json.loads(line[6:]), heard)
    heard.status = exchange.status
    if heard.status != 200 and unread:
        _hear_whole(protocol, json.loads(unread), heard)


def _hear_event(protocol: str, event: dict[str, Any], heard: Heard) -> None:
    _hear_id(event, heard)
    if event.get("error"):
        heard.error = str(event["error"].get("code") or event["error"].get("type"))
        heard.message = str(event["error"].get("message"))
        return
    if protocol in ("chat", "completions"):
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") if protocol == "chat" else choice["text"]
            heard.add(choice["index"], text)
            if choice.get("finish_reason"):
                heard.ends[choice["index"]] = choice["finish_reason"]
        _hear_usage(event.get("usage"), heard)
        return
    kind = event["type"]
    if protocol == "messages":
        if kind == "content_block_delta":
            heard.add(0, event["delta"].get("text"))
        elif kind == "message_delta":
            reason = event["delta"]["stop_reason"]
            heard.ends[0] = "length" if reason in _LENGTHS else "stop"
    elif kind == "response.output_text.delta":
        heard.add(0, event["delta"])
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        _hear_response(event["response"], heard, is_whole=False)


def _hear_id(event: dict[str, Any], heard: Heard) -> None:
    """The id of the answer, which all requests to workers have."""
    whole = event.get("message") or event.get("response") or event
    if isinstance(whole, dict) and not heard.request_id:
        heard.request_id = str(whole.get("id") or "")


def _hear_usage(usage: dict[str, Any] | None, heard: Heard) -> None:
    if usage:
        heard.prompt_tokens = usage["prompt_tokens"]
        heard.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        heard.completion_tokens = usage["completion_tokens"]


def _hear_response(response: dict[str, Any], heard: Heard, *, is_whole: bool) -> None:
    if response["status"] == "failed":
        heard.error = str(response["error"]["code"])
        heard.message = str(response["error"]["message"])
        return
    heard.ends[0] = "length" if response["status"] == "incomplete" else "stop"
    usage = response["usage"]
    heard.prompt_tokens = usage["input_tokens"]
    heard.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    heard.completion_tokens = usage["output_tokens"]
    if is_whole:
        for item in response["output"]:
            for part in item.get("content") or ():
                heard.add(0, part.get("text"))


def _hear_whole(protocol: str, answer: dict[str, Any], heard: Heard) -> None:
    _hear_id(answer, heard)
    if heard.status != 200:
        error = answer.get("error", {})
        heard.error = str(error.get("code") or error.get("type"))
        heard.message = str(error.get("message"))
        return
    if protocol in ("chat", "completions"):
        for choice in answer["choices"]:
            text = choice["message"]["content"] if protocol == "chat" else choice["text"]
            heard.add(choice["index"], text)
            heard.ends[choice["index"]] = choice["finish_reason"]
        _hear_usage(answer["usage"], heard)
    elif protocol == "messages":
        for part in answer["content"]:
            heard.add(0, part.get("text"))
        heard.ends[0] = "length" if answer["stop_reason"] in _LENGTHS else "stop"
    else:
        _hear_response(answer, heard, is_whole=True)


def expected(tokens: list[int]) -> tuple[str, str]:
    """The text of the oracle's answer, and why it ends."""
    ends = bool(tokens) and tokens[-1] == END_TOKEN
    text = tokenizer().decode(tokens[:-1] if ends else tokens, skip_special_tokens=False)
    return text, "stop" if ends else "length"
