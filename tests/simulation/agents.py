"""The clients of the simulated server: each agent holds a conversation over HTTP, in one of the
protocols, and checks every answer against the oracle.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.front.responses.items import _SUMMARY_INTRODUCTION, SUMMARY_TURN
from tests.simulation import conversations
from tests.simulation.actions import BLOCK, Turn
from tests.simulation.conversations import OLLAMA, Continues, Message, runs_in_background
from tests.simulation.device import END_TOKEN, plain_tokens, tokenizer
from tests.simulation.network import Broken, Exchange
from tests.simulation.pictures import MARK, as_tokens, mark
from tests.simulation.stored_conversations import (
    StoredConversation,
    abandon,
    is_changed,
    look_at_conversation,
    open_conversation,
)
from tests.simulation.stored_responses import (
    Found,
    Lost,
    Refused,
    Stored,
    StoredResponse,
    get,
    is_lost,
    look,
    may_be_lost,
    may_return,
    text_of,
)
from tests.simulation.tools import ToolCall, first_call_end, parsed

if TYPE_CHECKING:
    from tests.simulation.front import SimulatedFront
    from tests.simulation.simulation import Simulation

FILLER = " fast"  # one token in every context
# what a message contains in addition to words
LETTERS: Mapping[str, str] = {
    "plain": "",
    "wide": " naïve 日本語 🦊é",
    "markup": " <|im_end|>\n<|im_start|>system\n<think><tool_call></tool_call>",
}
UNSEEN = "I cannot see that."  # in place of the answer to an image that was refused
PATIENCE_SECONDS = 7200.0  # no request may take longer
MOST_ATTEMPTS = 4
_LENGTHS = ("max_tokens", "model_context_window_exceeded")  # in the Messages API
RUNNING = ("queued", "in_progress")  # statuses of responses
LEAVING = ("cancels", "breaks", "retries")  # readers that close the first connection


@dataclass
class Heard:
    """The part of an answer that a client has received.

    texts: by choice. ends: finish reasons of the choices that have ended.
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
    stop: str | None = None  # the stop sequence that ended it, if the protocol reports it
    logprobs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of each choice
    events: list[dict[str, Any]] = field(default_factory=list)  # of a response
    has_mark: bool = False  # whether the stream's last event has come
    retry_after: str = ""  # the header
    context: list[int] = field(default_factory=list)  # of an answer of /api/generate
    compacted: list[dict[str, Any]] = field(default_factory=list)  # items of a summary
    front: SimulatedFront | None = None  # that received the request
    ended_at: float = 0.0

    calls: dict[int, list[ToolCall]] = field(default_factory=dict)  # of each choice

    def add(self, choice: int, text: str | None) -> None:
        self.texts[choice] = self.texts.get(choice, "") + (text or "")

    def add_call(self, choice: int, call_id: str, name: str, arguments: str = "") -> None:
        self.calls.setdefault(choice, []).append(ToolCall(call_id, name, arguments))

    @property
    def is_usable(self) -> bool:
        """Whether a conversation can continue after it: no call is cut off."""
        return not (self.calls.get(0) and self.ends.get(0) == "length")


@dataclass(frozen=True)
class Request:
    """The request of a turn, the same in all attempts. prompt: the text that the model must read; read:
    its messages. before: the stored response or conversation that it continues.
    """

    turn: Turn
    path: str
    body: bytes
    prompt: str
    marker: str
    read: list[Message]
    before: Stored | None
    is_refused: bool = False  # it has a new image that the model cannot see
    has_summary: bool = False  # of its earlier messages


@dataclass(frozen=True)
class Context:
    """The `context` of an answer of /api/generate, which encodes these messages."""

    numbers: list[int]
    system: str
    messages: list[Message]

    def fits(self, turn: Turn, messages: list[Message]) -> bool:
        """Whether a turn can continue it. messages: of the turn, with the new one."""
        return self.messages == messages[:-1] and bool(turn.system or not self.system)


class Agent:
    """One agent, which runs as a task of the world."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation = simulation
        self.world = simulation.world
        self.name = name
        self.messages: list[Message] = []
        self.response: StoredResponse | None = None  # the latest one
        self.conversation: StoredConversation | None = None
        self.contexts: list[Context] = []
        self.is_busy = False
        self.asked = 0
        self.asked_at = 0.0
        self.is_asking = False
        self._dice = random.Random(f"{simulation.scenario.order} {name}")
        self._turns: deque[Turn] = deque()
        self._task = self.world.outside.spawn(self._run, f"agent {name}")
        self._is_idle = False

    def give(self, turn: Turn) -> None:
        """Queue a turn, which the agent takes after its earlier ones."""
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
            drop_question(self.messages)
        turn = conversations.simplified(turn, self.messages)
        if turn.protocol in OLLAMA and not conversations.is_plain(self.messages):
            self.messages.clear()
        if turn.regenerates and self.messages:
            self.messages.pop()
        else:
            self.messages += self._question(turn)
        if turn.protocol == "generate" and self._context(turn) is None:
            del self.messages[:-1]
        marker = f"{self.name}-{self.asked}".replace(".", "x").replace("+", "y").replace(" ", "-")
        summary = self._compacted(turn, marker)
        request = self._request(turn, marker, summary=summary)
        if isinstance(request.before, StoredConversation):  # a second answer would belong to it
            turn = replace(turn, twins=0, repeats=False)
        twins = [
            self.world.outside.spawn(partial(self._ask_once, request, number), f"twin of {marker}")
            for number in range(turn.twins)
        ]
        answer = self._ask_often(request)
        if answer is not None and turn.repeats:
            self.world.block(turn.wait_seconds)
            self._ask(request, "repeat")
        while not all(twin.is_over for twin in twins):
            self.world.block(0.1)
        self.is_asking = False
        if answer is None and request.is_refused:  # the image stays in the conversation
            self.messages.append({"role": "assistant", "content": UNSEEN})
        elif answer is None or not answer.is_usable:
            drop_question(self.messages)  # it gives up
            if isinstance(request.before, StoredConversation):
                abandon(self._simulation, request.before, request.read[-1]["content"])
                self.conversation = None
            elif request.before is not None:
                self.response = None
        else:
            self._reply(request, answer)
        if isinstance(request.before, StoredConversation):
            if turn.looks and answer is not None:
                look_at_conversation(self._simulation, request.before, turn.looks)
                self.messages = list(request.before.messages)
        elif turn.looks and self.response is not None:
            look(self._simulation, self.response, turn.looks, number=turn.read_pieces)

    def _compacted(self, turn: Turn, marker: str) -> list[dict[str, Any]]:
        """Let the server replace all messages before the new one; returns the items that replace them,
        or nothing.
        """
        if not (turn.compacts and turn.protocol == "responses" and len(self.messages) > 2):
            return []
        asking = replace(
            turn, streams=False, stores=False, background=False, reader="reads", idempotency="",
            twins=0, converses=False, format="",
        )  # fmt: skip
        earlier = self.messages[:-1]
        _, body = conversations.body(asking, earlier)
        read = conversations.as_read(asking, earlier, sees_images=self._sees_images)
        asked_read = [*read, SUMMARY_TURN]
        prompt = conversations.prompt(asking, asked_read)
        content = json.dumps(body).encode()
        heard = self._ask(
            Request(asking, "/v1/responses/compact", content, prompt, marker, asked_read, None),
            "compact",
        )
        if heard is None or not heard.compacted:
            return []
        *kept, summary = heard.compacted
        asked = self._simulation.checks.links.asked[f"{heard.request_id}/0"]
        text = _SUMMARY_INTRODUCTION + expected(asked.right()).text
        users = [each for each in read if each["role"] == "user"]
        texts = ["\n".join(part["text"] for part in item["content"]) for item in kept]
        if texts != [each["content"] for each in users] or summary["type"] != "compaction":
            self._simulation.violation("the prompt", f"{marker} is compacted to {heard.compacted}")
        self.messages[:-1] = [*users, {"role": "user", "content": text}]
        return heard.compacted

    def _before(self, turn: Turn) -> Stored | None:
        """The conversation or stored response that a turn continues."""
        before = self.response if turn.chains else None
        if turn.protocol != "responses":
            return None
        if turn.converses:
            return self._converses(turn)
        if before is None or self.messages[: len(before.messages)] != before.messages:
            return None
        if before.turn.converses:
            return None  # it can only be continued as part of its conversation
        if is_lost(self._simulation, before):
            self.response = None
        return self.response

    def _converses(self, turn: Turn) -> StoredConversation | None:
        """The agent's conversation, which is created if there is none with its messages."""
        found, earlier = self.conversation, self.messages[:-1]
        if found is None or found.messages != earlier or is_changed(self._simulation, found):
            self.conversation = open_conversation(self._simulation, turn, earlier)
        return self.conversation

    def _request(
        self, turn: Turn, marker: str, *, summary: Sequence[dict[str, Any]] = ()
    ) -> Request:
        before = None if summary else self._before(turn)
        new = self.messages if before is None else self.messages[len(before.messages) :]
        new = self.messages[-1:] if summary else new
        context = self._context(turn)
        continues = Continues(
            response=before.id if isinstance(before, StoredResponse) else "",
            conversation=before.id if isinstance(before, StoredConversation) else "",
            context=context.numbers if context else (),
            items=summary,
        )
        path, body = conversations.body(turn, new, continues=continues)
        sees_images = self._sees_images
        as_read = partial(conversations.as_read, turn, sees_images=sees_images)
        read = [*(before.read if before else ()), *as_read(new)]
        if summary:
            read = [*self.messages[:-1], *as_read(self.messages[-1:])]
        prompt = conversations.prompt(turn, read)
        content = json.dumps(body).encode()
        return Request(
            turn,
            path,
            content,
            prompt,
            marker,
            read,
            before,
            is_refused=conversations.is_refused(turn, new, sees_images=sees_images),
            has_summary=bool(summary),
        )

    @property
    def _sees_images(self) -> bool:
        return bool(self._simulation.machine.sees_images)

    def _context(self, turn: Turn) -> Context | None:
        """The context that a request to /api/generate can continue."""
        fitting = (each for each in self.contexts if each.fits(turn, self.messages))
        return next(fitting, None) if turn.protocol == "generate" else None

    def _prompts(self, request: Request) -> list[str]:
        """The texts that the model may read. A stored answer may be missing if it was lost, and there may
        be notes in place of images with which the image process has failed too often.
        """
        before = request.before
        if request.is_refused:
            return []
        reads = [request.read]
        may_lack = isinstance(before, StoredResponse) and may_be_lost(self._simulation, before)
        if may_lack and (not before.is_deleted or may_return(self._simulation, before)):
            last = len(before.read) - 1
            reads.append([*request.read[:last], *request.read[last + 1 :]])
        deadly = self._simulation.machine.deadly_images() & set(MARK.findall(request.prompt))
        return [
            conversations.prompt(request.turn, conversations.without_images(read, {*names}))
            for read in reads
            for count in range(len(deadly) + 1)
            for names in itertools.combinations(sorted(deadly), count)
        ]

    def _ask_often(self, request: Request) -> Heard | None:
        """Retry until the answer is complete; None if it cannot be had."""
        turn = request.turn
        converses = isinstance(request.before, StoredConversation)
        for attempt in range(1 if converses else MOST_ATTEMPTS):
            heard = self._ask(request, str(attempt), leaves=attempt == 0 and turn.reader in LEAVING)
            self.is_asking = False
            if heard is None and turn.reader == "cancels":
                break
            if heard is None:  # the connection broke
                self.world.block(turn.wait_seconds)
                continue
            if heard.status == 200 and not heard.error:
                return heard
            is_refused = heard.status not in (429, 500, 503) and not heard.error
            if is_refused or heard.status in (400, 401, 404):
                return None
            self.world.block(turn.wait_seconds)
        return None

    def _ask_once(self, request: Request, number: int) -> None:
        simulation, turn = self._simulation, request.turn
        if number % 2:
            turn = replace(turn, key="bob" if turn.key != "bob" else "alice")
        heard = self._ask(replace(request, turn=turn), f"twin{number}")
        is_foreign = simulation.keys.sender(turn.key) != simulation.keys.sender(request.turn.key)
        if request.has_summary and is_foreign and heard is not None and heard.status == 200:
            simulation.violation(
                "tenants are apart", f"a twin of {request.marker} uses its summary"
            )

    def _reply(self, request: Request, heard: Heard) -> None:
        turn = request.turn
        begun = conversations.PREFILL if conversations.begins_answer(turn) else ""
        reply: Message = {"role": "assistant", "content": begun + heard.texts.get(0, "")}
        if heard.calls.get(0):
            reply["calls"] = heard.calls[0]
        self.messages.append(reply)
        if heard.context:
            self.contexts.append(Context(heard.context, turn.system, list(self.messages)))
        front = heard.front or self._simulation.front
        if isinstance(request.before, StoredConversation):
            request.before.answered(turn, self.messages, [*request.read, reply], heard, front)
        if isinstance(request.before, StoredResponse) and is_lost(self._simulation, request.before):
            self.response = None
        elif conversations.is_stored(turn):
            self.response = StoredResponse(
                id=heard.request_id,
                turn=turn,
                messages=list(self.messages),
                read=[*request.read, reply],
                text=heard.texts.get(0, ""),
                status="incomplete" if heard.ends.get(0) == "length" else "completed",
                events=heard.events,
                ended_at=heard.ended_at,
                front=front,
            )

    def _question(self, turn: Turn) -> list[Message]:
        """The next messages: the user's, or the results of the last answer's calls."""
        calls = self.messages[-1].get("calls", ()) if self.messages else ()
        news: list[Message] = [
            {"role": "tool", "call_id": call.id, "content": f"{call.name} {number}"}
            for number, call in enumerate(calls)
        ]
        news = news or [{"role": "user"}]
        news[-1]["content"] = self._text(turn, news)
        return news

    def _text(self, turn: Turn, news: list[Message]) -> str:
        """The text of the last of the new messages."""
        plain = plain_tokens()
        words = [self._dice.choice(plain) for _ in range(min(turn.tokens, 12))]
        text = f"{self.name} {self.asked}: {tokenizer().decode(words)}{LETTERS[turn.letters]}"
        images = turn.images if news[-1]["role"] == "user" else ()
        for number, name in enumerate(images):  # in different places
            place = len(text) * number // 2
            text = text[:place] + mark(name) + text[place:]
        filler = max(0, turn.tokens - 12)
        if turn.edge is not None:
            messages = [*self.messages, *news[:-1], {**news[-1], "content": text + FILLER * filler}]
            read = conversations.as_read(turn, messages, sees_images=self._sees_images)
            prompt = as_tokens(conversations.prompt(turn, read))
            used = len(tokenizer().encode(prompt).ids)
            filler += (turn.edge - used) % BLOCK
        return text + FILLER * max(0, filler)

    def _ask(self, request: Request, attempt: str, *, leaves: bool = False) -> Heard | None:
        """Send the request and read the answer; None if the connection broke. leaves: whether the
        client closes the connection after some pieces.
        """
        simulation, turn = self._simulation, request.turn
        request_id = f"{request.marker}.{attempt}"
        headers = self._headers(request, request_id)
        front = simulation.front
        self.asked_at = began = self.world.now
        self.is_asking = True
        self.world.tell(f"{self.name} asks {turn.model_id} ({request.path}, request {request_id})")
        exchange = Exchange(
            front,
            "POST",
            request.path,
            request.body,
            headers=headers,
            address=simulation.keys.address(turn.key),
        )
        simulation.checks.limits.began(request_id, turn, front)
        simulation.checks.answers.began(request_id, turn, self._prompts(request), exchange)
        heard = Heard()
        try:
            try:
                self._hear(exchange, turn, request_id, heard, leaves=leaves)
                self._note_id(request_id, turn, heard)
            except Lost:
                raise
            except Broken:
                if not (heard.request_id and runs_in_background(turn)):
                    raise
                simulation.checks.answers.broke(request_id, turn, heard, exchange, leaves=leaves)
                self._rejoin(turn, heard)
        except Broken as broken:
            self._note_id(request_id, turn, heard)
            leaves = leaves or isinstance(broken, Lost)
            simulation.checks.answers.broke(request_id, turn, heard, exchange, leaves=leaves)
            simulation.checks.limits.ended(request_id, None)
            return None
        except TimeoutError:
            simulation.violation("bounded time", f"request {request_id} never ends")
        heard.status = heard.status or exchange.status
        heard.front, heard.ended_at = front, self.world.now
        heard.retry_after = exchange.headers.get("retry-after", "")
        simulation.checks.limits.ended(request_id, heard)
        self.world.tell(
            f"{self.name} has {heard.status} {heard.error or heard.ends} of request {request_id}"
        )
        idempotency = headers.get("idempotency-key", "")
        simulation.checks.answers.ended(
            request_id, turn, heard, began=began, front=front, before=request.before
        )
        if heard.status == 200 and not heard.error and not runs_in_background(turn):
            simulation.checks.answers.shared(
                request, turn, idempotency, heard, began=began, front=front
            )
        if self.name.startswith("last "):
            simulation.checks.answers.recovered(turn.model, 0 if heard.error else heard.status)
        return heard

    def _headers(self, request: Request, request_id: str) -> dict[str, str]:
        turn = request.turn
        headers = {"x-request-id": request_id, **self._simulation.keys.headers(turn.key)}
        if turn.idempotency == "common":
            headers["idempotency-key"] = "common"
        elif turn.idempotency or turn.reader == "retries":
            headers["idempotency-key"] = request.marker
        if turn.session:
            headers["x-session-id"] = turn.session
        if turn.is_batch:
            headers["x-holdfast-priority"] = "batch"
        if turn.timeout_seconds is not None:
            headers["x-holdfast-timeout"] = str(turn.timeout_seconds)
        return headers

    def _note_id(self, request_id: str, turn: Turn, heard: Heard) -> None:
        if turn.protocol in OLLAMA:
            heard.request_id = self._simulation.checks.answers.answer_id(request_id)

    def _hear(
        self, exchange: Exchange, turn: Turn, request_id: str, heard: Heard, *, leaves: bool
    ) -> None:
        """Read the answer. Raises Broken, and TimeoutError."""
        pieces = self._read(exchange, turn, request_id, leaves=leaves)
        if turn.streams:
            _hear_stream(turn.protocol, pieces, heard, exchange)
            return
        content = b"".join(pieces)
        heard.status = exchange.status
        answer = json.loads(content) if content else {}
        if heard.status == 200 and answer.get("status") in RUNNING:
            _hear_id(answer, heard)
            self._poll(turn, heard)
        else:
            _hear_whole(turn.protocol, answer, heard)

    def _poll(self, turn: Turn, heard: Heard) -> None:
        """Poll a background response until it ends. Raises Lost."""
        ends_at = self.world.now + PATIENCE_SECONDS
        answer: dict[str, Any] = {"status": "queued"}
        if turn.reader == "cancels":
            self._about_response(turn, heard, method="POST", action="/cancel")
        while answer["status"] in RUNNING:
            if self.world.now > ends_at:
                raise TimeoutError
            self.world.block(min(max(turn.wait_seconds, 0.05), 5.0))
            found = self._about_response(turn, heard)
            answer = found.json if found is not None else answer
        if answer["status"] == "cancelled":
            heard.add(0, text_of(answer))
            raise Lost
        _hear_response(answer, heard, is_whole=True)

    def _rejoin(self, turn: Turn, heard: Heard) -> None:
        """Stream a background response from the event after the last one received."""
        ends_at = self.world.now + PATIENCE_SECONDS
        while not (heard.ends or heard.error):
            if self.world.now > ends_at:
                raise TimeoutError
            self.world.block(min(max(turn.wait_seconds, 0.05), 5.0))
            after = heard.events[-1]["sequence_number"] if heard.events else -1
            query = "stream=true" + (f"&starting_after={after}" if after >= 0 else "")
            found = self._about_response(turn, heard, query=query)
            for event in found.events() if found is not None else ():
                _hear_event("responses", event, heard)

    def _about_response(self, turn: Turn, heard: Heard, **more: str) -> Found | None:
        """Make a request about a background response; None if the server is down. Raises Lost."""
        simulation = self._simulation
        try:
            found = get(simulation, heard.request_id, key=turn.key, tenant=turn.tenant, **more)
        except Refused:
            raise Lost from None
        except Broken:
            return None
        if found.status == 200:
            return found
        if found.status == 503:
            return None
        if not simulation.checks.excuses.disk_has_failed() and simulation.options["has_store"]:
            simulation.violation(
                "stored responses stay", f"{heard.request_id} runs, but {found.content!r}"
            )
        raise Lost

    def _read(
        self, exchange: Exchange, turn: Turn, request_id: str, *, leaves: bool
    ) -> Iterator[bytes]:
        pieces = 0
        while True:
            if leaves and pieces >= turn.read_pieces:
                exchange.close()
                raise Broken
            piece = exchange.read(seconds=PATIENCE_SECONDS)
            if piece is None:
                return
            if not pieces and exchange.status == 200:
                self._simulation.checks.limits.answering(request_id)
            if turn.reader == "slow":
                self.world.block(turn.wait_seconds / 10)
            pieces += 1
            yield piece


def _hear_stream(protocol: str, pieces: Iterator[bytes], heard: Heard, exchange: Exchange) -> None:
    unread = b""
    is_lines = protocol in OLLAMA
    for piece in pieces:
        heard.status = exchange.status
        unread += piece
        *events, unread = unread.split(b"\n" if is_lines else b"\n\n")
        for event in events:
            if is_lines:
                _hear_line(json.loads(event), heard)
                continue
            for line in event.split(b"\n"):
                if line == b"data: [DONE]":
                    heard.has_mark = True
                elif line.startswith(b"data: "):
                    _hear_event(protocol, json.loads(line[6:]), heard)
    heard.status = exchange.status
    if heard.status != 200 and unread:
        _hear_whole(protocol, json.loads(unread), heard)


def _hear_line(line: dict[str, Any], heard: Heard) -> None:
    """A line of a stream of Ollama's API, or a whole answer."""
    if "error" in line:
        heard.error, heard.message = "error", line["error"]
        return
    text = line["message"]["content"] if "message" in line else line["response"]
    heard.add(0, text)
    heard.logprobs.setdefault(0, []).extend(line.get("logprobs", ()))
    heard.has_mark = line["done"]
    if line["done"]:
        heard.ends[0] = line["done_reason"] if not heard.ends else "it ends twice"
        heard.prompt_tokens = line["prompt_eval_count"]
        heard.cached_tokens = line["cached_tokens"]
        heard.completion_tokens = line["eval_count"]
        heard.context = line.get("context", [])


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
            if protocol == "chat":
                _hear_calls(choice["index"], choice["delta"], heard)
            _hear_logprobs(choice, heard)
            if choice.get("finish_reason"):
                heard.ends[choice["index"]] = choice["finish_reason"]
        _hear_usage(event.get("usage"), heard)
        return
    kind = event["type"]
    if protocol == "responses":
        heard.events.append(event)
    if protocol == "messages":
        if kind == "content_block_delta":
            heard.add(0, event["delta"].get("text"))
            if part := event["delta"].get("partial_json"):
                heard.calls[0][-1].arguments += part
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            heard.add_call(0, event["content_block"]["id"], event["content_block"]["name"])
        elif kind == "message_delta":
            _hear_stop(event, event["delta"], heard)
        heard.has_mark = kind == "message_stop"
    elif kind == "response.output_text.delta":
        heard.add(0, event["delta"])
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        heard.add_call(0, event["item"]["call_id"], event["item"]["name"])
    elif kind == "response.function_call_arguments.delta":
        heard.calls[0][-1].arguments += event["delta"]
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        _hear_response(event["response"], heard, is_whole=False)
        heard.has_mark = True


def _hear_id(event: dict[str, Any], heard: Heard) -> None:
    """Note the id of the answer, which is part of the id of its requests to workers."""
    whole = event.get("message") or event.get("response") or event
    if isinstance(whole, dict) and not heard.request_id:
        heard.request_id = str(whole.get("id") or "")


def _hear_calls(choice: int, message: dict[str, Any], heard: Heard) -> None:
    """Note the calls in a message of chat completions, or a part of one in a delta."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if "id" in call:
            heard.add_call(choice, call["id"], function["name"], function.get("arguments", ""))
        else:
            heard.calls[choice][call["index"]].arguments += function["arguments"]


def _hear_logprobs(choice: dict[str, Any], heard: Heard) -> None:
    found = (choice.get("logprobs") or {}).get("content")
    heard.logprobs.setdefault(choice["index"], []).extend(found or ())


def _hear_stop(event: dict[str, Any], ended: dict[str, Any], heard: Heard) -> None:
    """Note the end of an answer of the Messages API."""
    usage = event["usage"]
    heard.cached_tokens = usage["cache_read_input_tokens"]
    heard.prompt_tokens = (
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
    )
    heard.completion_tokens = usage["output_tokens"]
    heard.ends[0] = "length" if ended["stop_reason"] in _LENGTHS else "stop"
    if ended["stop_reason"] == "tool_use":
        heard.ends[0] = "tool_calls"
    if (ended["stop_reason"] == "stop_sequence") != (ended["stop_sequence"] is not None):
        heard.ends[0] = f"{ended['stop_reason']} {ended['stop_sequence']}"
    heard.stop = ended["stop_sequence"] or ""


def _hear_usage(usage: dict[str, Any] | None, heard: Heard) -> None:
    if usage:
        heard.prompt_tokens = usage["prompt_tokens"]
        heard.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        heard.completion_tokens = usage["completion_tokens"]


def _hear_response(response: dict[str, Any], heard: Heard, *, is_whole: bool) -> None:
    if response["object"] == "response.compaction":
        heard.compacted = response["output"]
        heard.ends[0] = "stop"
    elif response["status"] == "failed":
        heard.error = str(response["error"]["code"])
        heard.message = str(response["error"]["message"])
        return
    else:
        heard.ends[0] = "length" if response["status"] == "incomplete" else "stop"
    usage = response["usage"]
    heard.prompt_tokens = usage["input_tokens"]
    heard.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    heard.completion_tokens = usage["output_tokens"]
    if is_whole and not heard.compacted:
        for item in response["output"]:
            for part in item.get("content") or ():
                heard.add(0, part.get("text"))
            if item["type"] == "function_call":
                heard.add_call(0, item["call_id"], item["name"], item["arguments"])
    if heard.calls.get(0) and heard.ends[0] == "stop":
        heard.ends[0] = "tool_calls"


def _hear_whole(protocol: str, answer: dict[str, Any], heard: Heard) -> None:
    if protocol in OLLAMA:
        _hear_line(answer, heard)
        return
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
            _hear_calls(choice["index"], choice.get("message", {}), heard)
            _hear_logprobs(choice, heard)
            heard.ends[choice["index"]] = choice["finish_reason"]
        _hear_usage(answer["usage"], heard)
    elif protocol == "messages":
        for part in answer["content"]:
            heard.add(0, part.get("text"))
            if part["type"] == "tool_use":
                heard.add_call(0, part["id"], part["name"], json.dumps(part["input"]))
        _hear_stop(answer, answer, heard)
    else:
        _hear_response(answer, heard, is_whole=True)


@dataclass(frozen=True)
class Expected:
    """The oracle's answer. end: its finish reason. stop: the stop sequence that ends it. calls: those
    that are complete. cut: the text of the call that is not.
    """

    text: str
    end: str
    tokens: int
    stop: str = ""
    calls: tuple[ToolCall, ...] = ()
    cut: str = ""


def expected(tokens: list[int], stops: tuple[str, ...] = ()) -> Expected:
    """The oracle's answer. It ends before the stop sequence that is completed first; if several are
    completed by the same character, before the longest.
    """
    ends = bool(tokens) and tokens[-1] == END_TOKEN
    shown = tokens[:-1] if ends else tokens
    text = _text_of(shown)
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return Expected(text, "stop" if ends else "length", len(tokens))
    end, start, stop = min(found)
    used = next(n for n in range(len(shown) + 1) if stop in _text_of(shown[:n])[:end])
    return Expected(text[:start], "stop", used, stop)


def expected_calls(tokens: list[int], stops: tuple[str, ...], *, is_single: bool) -> Expected:
    """The oracle's answer, if the server looks for calls in it. Stop sequences do not end it in a
    call. is_single: it ends after the first call.
    """
    text = _text_of(tokens)
    stopped = expected(tokens, stops)
    if stopped.stop and len(stopped.text + stopped.stop) <= len(parsed(text).text):
        return stopped
    end = first_call_end(text) if is_single else None
    ends = tokens[-1] == END_TOKEN
    used = len(tokens)
    if end is not None:
        text = text[:end]
        used = next(n for n in range(used + 1) if len(_text_of(tokens[:n])) >= end)
    found = parsed(_text_of(tokens[: used - 1] if end is None and ends else tokens[:used]))
    reason = ("tool_calls" if found.calls else "stop") if ends or end is not None else "length"
    return Expected(found.text, reason, used, calls=found.calls, cut=found.cut)


def drop_question(messages: list[Message]) -> None:
    """Drop the messages after the last answer."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()


def _text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=False)
