"""What must always be true in the simulated world, by name.

Agents report what they hear; the links and the worker's loop are watched; and everything is counted
when nobody waits for anything any more.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.front.link.worker_link import WorkerLink
from holdfast.store import io_thread
from holdfast.store.block import (
    BlockKey,
    Entry,
    ReadFailed,
    StoredBlock,
    fingerprint_id,
    read_block,
    read_header,
)
from holdfast.store.folder import Records, StoreFolder
from holdfast.store.io_thread import IoThread
from holdfast.store.maintenance import StoreMaintenance
from holdfast.store.write_ahead import Mailbox
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Accepted, Finished, Rejected, Started, TokensGenerated, WaitReason
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.plan import Draft
from holdfast.worker.loop import device_steps
from holdfast.worker.loop.drafts import Drafts
from holdfast.worker.loop.loop import IDLE_SECONDS, WorkerLoop
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.sessions.registry import SessionRegistry
from tests.simulation.actions import BLOCK, Call, Turn
from tests.simulation.agents import Expected, Heard, Request, expected
from tests.simulation.conversations import comparable
from tests.simulation.device import (
    Oracle,
    SecondLayer,
    SimulatedFailure,
    Weights,
    rows_of,
    tokenizer,
)
from tests.simulation.stored_responses import StoredResponse, may_be_lost, may_return
from tests.simulation.world import Killed, Process

if TYPE_CHECKING:
    from holdfast.worker.loop.sequences import LiveSequence
    from tests.simulation.front import SimulatedFront
    from tests.simulation.network import Exchange
    from tests.simulation.simulation import Simulation
    from tests.simulation.worker import SimulatedWorker

KEPT_SLACK_SECONDS = 1.0  # a delivered answer is kept a little less long than its client thinks
EXCUSE_OF_WRITES_SECONDS = 10.0  # until an end is written, at the latest
CUT_OFF_SECONDS = 1000.0
MOST_FILES = 24  # open in one process while nothing happens
DURABLE_SECONDS = 5.0  # after which what a request has computed is stored, even on a slow disk
CHECKED_SHARE = 0.2  # of the loop's rounds
LONGEST_SILENCE = 120.0  # of a worker that serves, until it is killed
LEAST_DEATHS = 5  # of workers: three, and two while it ran alone
LONGEST_TICK = 5.0  # of a sleep, so many seconds may count
# For how many seconds after a trouble requests may fail that begin then; those that run when it comes
# may fail, too. Errors of the disk never make a request fail.
_RECOVERY_SECONDS = {
    "a step raises an error": 0.0,  # then each request is tried alone
    "a step computes NaN": 0.0,
    "the planned step": 0.0,  # of a sweep, like the next three
    "the planned allocation": 0.0,
    "the planned message": 30.0,
    "the planned spawn": 30.0,
    "a step is slow": 30.0,
    "a step hangs": 90.0,  # until its worker is killed, and another one is loaded
    "a step kills its process": 90.0,  # with the waits after several deaths
    "worker dies": 90.0,
    "workers keep dying": 90.0,
    "no process starts": 90.0,
    "worker is suspended": 30.0,
    "a load raises an error": 90.0,
    "a load kills its process": 90.0,
    "a load hangs": 700.0,  # it is ended after ten minutes without progress
    "server dies": 30.0,
    "server restarts": 20.0,
    "power cut": 30.0,
    "weights change": 30.0,
    "machine sleeps": 30.0,
    "model is unloaded": 20.0,
}
# For how many seconds after a trouble the server may kill a worker that serves.
_KILL_SECONDS = {
    "a step is slow": 30.0,
    "a step hangs": LONGEST_SILENCE,
    "worker is suspended": LONGEST_SILENCE,
    "the planned message": LONGEST_SILENCE,
    "server dies": 90.0,
    "server restarts": 90.0,
    "power cut": 90.0,
    "weights change": 90.0,
}

# troubles after which everything that was stored is still there
_HARMLESS_TO_STORE = {
    "worker dies", "worker dies after writes", "workers keep dying", "no process starts",
    "worker is suspended", "worker hangs", "a step hangs", "step kills", "a step kills its process",
    "step is slow", "a step is slow", "load fails", "a load raises an error",
    "a load kills its process", "a load hangs",
    "server dies", "server restarts", "power cut", "power cut after syncs", "machine sleeps",
    "clock jumps", "model is unloaded",
}  # fmt: skip
# troubles after which a stored block may be missing or damaged
_OF_DISK = {"disk error", "disk is full", "file is damaged", "file vanishes", "power cut"}


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str, *, at: float) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what, self.at = invariant, what, at


class _Excuse(NamedTuple):
    """Something has gone wrong. model: whose requests it affects; "": of all."""

    kind: str
    at: float
    model: str


# whom the server takes a client for, and its `cache_salt`
Caller: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class _Shared:
    """A whole answer that a client has. identity: that of its request."""

    answer_id: str
    identity: tuple[object, ...]
    has_key: bool
    began: float
    ended: float


@dataclass
class _Asked:
    """A request, from its first command to its end, over all lives of workers."""

    request: SequenceRequest
    weights: Weights
    prompt: str  # its text, comparable
    answer: list[int] | None = None  # of the oracle, computed when it is needed
    sendings: int = 0

    def right(self) -> list[int]:
        """All tokens of the answer."""
        if self.answer is None:
            request = self.request
            self.answer = Oracle(self.weights).answer(
                request.prompt_token_ids, max_tokens=request.max_tokens
            )
        return self.answer


@dataclass
class _OnLink:
    """A request of one worker's life. sent_at: when the worker got it."""

    asked: _Asked
    tokens: int  # that the worker has been given or has sent
    sent_at: float = 0.0
    is_accepted: bool = False


@dataclass(frozen=True)
class _Read:
    """What a request has left in the cache. tokens: of prompt and answer. The keys and values of the
    last one need not be computed.
    """

    tokens: np.ndarray[Any, Any]
    prompt_tokens: int
    ended_at: float

    def reusable(
        self, prompt: np.ndarray[Any, Any], second: SecondLayer, *, is_quantized: bool
    ) -> int:
        """How many tokens of a later prompt, of which the last one is always computed, must come
        from the cache.
        """
        end = len(self.tokens)
        most = min(end, len(prompt) - 1)
        different = np.flatnonzero(self.tokens[:most] != prompt[:most])
        common = int(different[0]) if len(different) else most
        if second == "none":
            # a block that is quantized by now is of no use to a prompt that differs within it
            return common - common % BLOCK if is_quantized else min(common, end - 1)
        # a checkpoint is at the end of the answer, and one before the last token of the prompt
        if common == end:
            return end - 1
        return self.prompt_tokens - 1 if common >= self.prompt_tokens - 1 else 0


@dataclass
class _Life:
    """What one link has carried."""

    worker: SimulatedWorker | None = None

    def weights(self, request: SequenceRequest) -> Weights:
        """Those of the worker, with the request's adapter."""
        return self.worker.weights.with_adapter(request.adapter) if self.worker else Weights()

    open: dict[str, _OnLink] = field(default_factory=dict)
    # by their ids, those that were cancelled and sent again before their end
    cancelled: dict[str, list[_OnLink]] = field(default_factory=lambda: defaultdict(list))

    def on(self, request_id: str) -> _OnLink | None:
        """The request that the worker's next event with this id is about."""
        earlier = self.cancelled[request_id]
        return earlier[0] if earlier else self.open.get(request_id)

    def end(self, request_id: str) -> None:
        """The worker has ended it."""
        earlier = self.cancelled[request_id]
        if earlier:
            earlier.pop(0)
        else:
            del self.open[request_id]


class Checks:
    """Watches one run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.states: set[tuple[str, str]] = set()
        self.answers = 0
        self.excuses: list[_Excuse] = []
        self.damaged: set[Path] = set()  # files that the scenario has damaged
        self.asked: dict[str, _Asked] = {}
        self._turns: dict[str, list[Turn]] = defaultdict(list)  # by the text of their prompt
        self._prompts: dict[str, set[str]] = {}  # by the id that the agent gives its request
        # the sessions that each caller has named
        self._session_names: dict[Caller, set[str]] = defaultdict(set)
        self._hearers: dict[str, set[Caller]] = defaultdict(set)  # of each answer
        self._shared: list[_Shared] = []
        self._lives: dict[WorkerLink, _Life] = defaultdict(_Life)
        # for each cache that may be shared: the hashes of all prefixes that were computed in it
        self._computed: dict[tuple[Weights, str], set[int]] = defaultdict(set)
        # blocks that their store calls durable, by the name of their file; not those it gave up
        self._durable: set[str] = set()
        self._given_up: set[str] = set()  # files that the store may delete: evicted, or not wanted
        # what a power cut may leave of each session's record, by its path: the durable content, and
        # what has been written or removed since; None: no file
        self._records: dict[Path, list[bytes | None]] = {}
        # by cache and form of keys and values
        self._reads: dict[tuple[Weights, str, str], list[_Read]] = defaultdict(list)
        self._read_tokens = 0  # of all requests
        # sessions that requests have named, by model, name and tenant: when the first of these ended
        self._sessions: dict[tuple[str, str, str], float] = {}
        self._sleeps: list[tuple[float, float]] = []  # when the machine slept, and for how long
        self.jumped_at = -math.inf  # when the wall clock jumped ahead
        self._unwanted: dict[str, float] = {}  # files that the store was told to delete, and when
        self._closed: dict[tuple[str, str, str], float] = {}  # sessions, and when they were closed
        self._recovered: dict[str, int] = {}  # the status of each model's last request
        self._tenants: dict[str, set[Caller]] = {}  # who may have each tenant of the workers
        _running[:] = [self]

    def _violation(self, invariant: str, what: str) -> None:
        self.simulation.violation(invariant, what)

    # -- what agents report

    def began(self, request_id: str, turn: Turn, prompts: Iterable[str]) -> None:
        """An agent has sent a request. prompts: the texts of which the model has to read one."""
        self._prompts[request_id] = {comparable(each) for each in prompts}
        for each in self._prompts[request_id]:
            self._turns[each].append(turn)
        self._session_names[self._caller(turn)].add(turn.session)

    def ended(
        self,
        request_id: str,
        turn: Turn,
        heard: Heard,
        *,
        began: float,
        front: SimulatedFront,
        before: StoredResponse | None,
    ) -> None:
        """An agent has the whole answer: it must be right, or refused for a true reason. before: the
        stored response that the request continues.
        """
        self.answers += 1
        self._saw(front, f"answer {heard.status} {heard.error}")
        if self.simulation.sender(turn.key) == "wrong":
            if heard.status != 401:
                self._violation(
                    "tenants are apart", f"{request_id} with a wrong key: {heard.status}"
                )
            return
        is_whole = heard.status == 200 and not heard.error
        if before is not None and self._is_refused_rightly(request_id, turn, before, heard):
            return
        if heard.events and is_whole:
            self._check_events(request_id, heard.events)
        if is_whole and not self._has_model(turn):
            self._violation(
                "true refusals", f"{request_id} is answered by a model that is not there"
            )
        self._check_texts(request_id, turn, heard, is_whole=is_whole)
        if not is_whole:
            self._check_refusal(request_id, turn, heard, began=began)
            return
        choices = turn.choices if turn.protocol in ("chat", "completions") else 1
        if len(heard.ends) != choices:
            self._violation(
                "ends exactly once", f"{request_id} has {len(heard.ends)} of {choices} ends"
            )

    def _check_events(self, request_id: str, events: list[dict[str, Any]]) -> None:
        """The events of a response, once each and in order. Its status may be repeated: these events
        are numbered, too, but other clients do not get them.
        """
        numbers = [event["sequence_number"] for event in events]
        kinds = [event["type"].removeprefix("response.") for event in events]
        kinds = [kind for kind, _ in itertools.groupby(kinds) if kind != "output_text.delta"]
        text = ["content_part.added", "output_text.done", "content_part.done"]
        item = ["output_item.added", *text, "output_item.done"]
        kinds = [kind for kind in kinds if kind != "queued"]
        right = ["created", "in_progress", *item, kinds[-1]]
        if numbers != sorted(set(numbers)) or kinds not in (right, [*right[:2], right[-1]]):
            self._violation("ends exactly once", f"{request_id} has the events {numbers} {kinds}")

    def _is_refused_rightly(
        self, request_id: str, turn: Turn, before: StoredResponse, heard: Heard
    ) -> bool:
        """Whether a request is refused because it cannot continue a stored response."""
        is_foreign = self._caller(turn) != self._caller(before.turn)
        if heard.status == 200:
            if is_foreign or (before.is_deleted and not may_return(self.simulation, before)):
                self._violation("tenants are apart", f"{request_id} continues {before.id}")
            return False
        if heard.error == "previous_response_not_found":
            return is_foreign or may_be_lost(self.simulation, before)
        return False

    def shared(
        self,
        request: Request,
        turn: Turn,
        idempotency: str,
        heard: Heard,
        *,
        began: float,
        front: SimulatedFront,
    ) -> None:
        """An agent has a whole answer. With an `Idempotency-Key`, the same requests of one caller
        get the same answer; without one, an answer has one reader.
        """
        identity = (
            front,
            self._caller(turn),
            request.path,
            request.body,
            idempotency,
            turn.session,
        )
        own = _Shared(heard.request_id, identity, bool(idempotency), began, self.world.now)
        kept = self.simulation.options["reconnect_seconds"] - KEPT_SLACK_SECONDS
        for other in self._shared:
            if other.answer_id == own.answer_id and not (own.has_key and other.has_key):
                self._violation(
                    "ends exactly once", f"two clients have the whole answer {own.answer_id}"
                )
            if other.identity != own.identity or not own.has_key or turn.reader == "slow":
                continue
            first, later = sorted((own, other), key=lambda each: each.began)
            if later.began < first.ended + kept and own.answer_id != other.answer_id:
                self._violation(
                    "the same key, the same answer",
                    f"{own.answer_id} and {other.answer_id} answer one request of {request.marker}",
                )
        self._shared.append(own)

    def _caller(self, turn: Turn | Call) -> Caller:
        return self.simulation.sender(turn.key), turn.tenant

    def broke(
        self, request_id: str, turn: Turn, heard: Heard, exchange: Exchange, *, leaves: bool
    ) -> None:
        """An agent has a part of the answer. leaves: it has closed the connection."""
        front = exchange.front
        self._saw(front, "broken connection")
        self._check_texts(request_id, turn, heard, is_whole=False)
        if not leaves and exchange.has_begun and front.is_running:
            self._violation("ends exactly once", f"the server broke the connection of {request_id}")

    def _check_texts(self, request_id: str, turn: Turn, heard: Heard, *, is_whole: bool) -> None:
        stops = () if turn.protocol == "responses" else turn.stop
        right: dict[int, Expected] = {}
        hearers = self._hearers[heard.request_id]
        hearers.add(self._caller(turn))
        if heard.request_id and len(hearers) > 1:
            self._violation("tenants are apart", f"{heard.request_id} is read by {hearers}")
        for choice, text in heard.texts.items():
            asked = self.asked.get(f"{heard.request_id}/{choice}")
            if asked is None:
                if text:
                    self._violation("the oracle's tokens", f"{request_id} gets text from nowhere")
                continue
            if asked.prompt not in self._prompts[request_id]:
                self._violation(
                    "the prompt", f"{request_id} gets the answer to another request: {text!r}"
                )
            answer = right[choice] = expected(asked.right(), stops)
            if is_whole and (text, heard.ends.get(choice)) != (answer.text, answer.end):
                self._violation(
                    "the oracle's tokens",
                    f"choice {choice} of {request_id} is {text!r} ({heard.ends.get(choice)}) "
                    f"instead of {answer.text!r} ({answer.end})",
                )
            if not answer.text.startswith(text):
                self._violation(
                    "the oracle's tokens",
                    f"choice {choice} of {request_id} begins with {text!r} instead of "
                    f"{answer.text!r}",
                )
            if is_whole and heard.stop not in (None, answer.stop):
                self._violation(
                    "the oracle's tokens",
                    f"{request_id} was ended by {heard.stop!r} instead of {answer.stop!r}",
                )
            if is_whole and turn.logprobs and turn.protocol == "chat":
                self._check_logprobs(request_id, heard.logprobs.get(choice, []), answer.text)
        if is_whole:
            self._check_usage(request_id, heard, right)

    def _check_logprobs(self, request_id: str, logprobs: list[dict[str, Any]], text: str) -> None:
        """Only one token is possible each time, and all of them are the text."""
        if any(abs(each["logprob"]) > 0.01 for each in logprobs):
            self._violation("the oracle's tokens", f"{request_id} has wrong log-probabilities")
        found = bytes(byte for each in logprobs for byte in each["bytes"] or ())
        if found.decode(errors="replace") != text:
            self._violation(
                "the oracle's tokens", f"the tokens of {request_id} are {found!r} for {text!r}"
            )

    def _check_usage(self, request_id: str, heard: Heard, right: Mapping[int, Expected]) -> None:
        asked = self.asked.get(f"{heard.request_id}/0")
        if asked is not None and heard.prompt_tokens is not None:
            prompt_tokens = len(asked.request.prompt_token_ids)
            if heard.prompt_tokens != prompt_tokens:
                self._violation(
                    "usage", f"{request_id} counts {heard.prompt_tokens} of {prompt_tokens} tokens"
                )
            if (heard.cached_tokens or 0) >= prompt_tokens:
                self._violation("usage", f"{request_id} counts {heard.cached_tokens} as cached")
        if heard.completion_tokens is not None and heard.ends.keys() == right.keys():
            right_tokens = sum(each.tokens for each in right.values())
            if heard.completion_tokens != right_tokens:
                self._violation(
                    "usage",
                    f"{request_id} counts {heard.completion_tokens} tokens of an answer of "
                    f"{right_tokens}",
                )

    def _check_refusal(self, request_id: str, turn: Turn, heard: Heard, *, began: float) -> None:
        """A request was refused or failed: for a reason that is true."""
        said = f"{request_id} got {heard.status} {heard.error}: {heard.message}"
        if "internal" in heard.error or (heard.status == 500 and "unexpected" in heard.message):
            self._violation("no 500", said)
        if "stored responses cannot be used" in heard.message and self.disk_has_failed():
            return
        if heard.status == 429:
            self._violation("true refusals", f"no limit is set, but {said}")
        if "context" in heard.error or "too long" in heard.message:
            room = min(8192, self.simulation.options["kv_tokens"])
            is_alone = len(self.simulation.options["models"]) == 1  # it has all the memory
            prompt = max(self._prompts[request_id], key=len)
            tokens = len(tokenizer().encode(prompt).ids) + turn.max_tokens
            share = 2 if self.simulation.options["second_layer"] == "none" else 4  # it needs as much
            if is_alone and tokens < room // share:
                self._violation("true refusals", f"the prompt is short, but {said}")
            return
        self._check_limit(heard, said, began=began)
        self._check_deadly(heard, said)
        self._check_loading(turn, heard, said)
        if "longer than its limit" in heard.message:
            if turn.timeout_seconds is None:
                self._violation("true refusals", f"no time limit is set, but {said}")
            return
        if any(word in f"{heard.error} {heard.message}" for word in ("queue", "already waiting")):
            asked = sum(each.choices for turns in self._turns.values() for each in turns)
            if self.simulation.options["max_queued"] >= asked:
                self._violation("true refusals", f"the queue cannot be full, but {said}")
            return
        if heard.status == 404 and not self._has_model(turn):
            return
        if heard.status in (400, 401, 403, 404, 422):
            self._violation("true refusals", said)
        if self.simulation.options["max_loaded"] == 1:
            return  # there may be no place for a model
        if not self._has_excuse(turn.model, began):
            self._violation("true refusals", f"nothing has gone wrong, but {said}")

    def _check_loading(self, turn: Turn, heard: Heard, said: str) -> None:
        """A request fails because a worker is still not there."""
        if "is still loading" in heard.message or "is still restarting" in heard.message:
            for worker in self.simulation.machine.workers.values():
                seconds = self.world.now - worker.ready_at
                if worker.name == turn.model and seconds > LONGEST_SILENCE:
                    self._violation("true refusals", f"it is ready for {seconds:.0f} s, but {said}")

    def _check_deadly(self, heard: Heard, said: str) -> None:
        """A request is refused for the deaths of workers: at least five."""
        choices = [each for name, each in self.asked.items() if heard.request_id in name]
        sendings = max((each.sendings for each in choices), default=0)
        if heard.request_id and "ran alone" in heard.message and sendings < LEAST_DEATHS:
            self._violation("true refusals", f"it was sent {sendings} times, and {said}")

    def _check_limit(self, heard: Heard, said: str, *, began: float) -> None:
        """A time limit counts only the time in which the machine was awake."""
        limit = re.search(r"(?:after|within|its limit of) (\d+) s\b", heard.message)
        slept = sum(seconds - LONGEST_TICK for at, seconds in self._sleeps if at >= began)
        if limit and self.world.now - began - slept < float(limit.group(1)) - 1.0:
            self._violation("true refusals", f"the machine slept {slept:.0f} s, and {said}")

    def _has_model(self, turn: Turn) -> bool:
        """Whether the server has the model and the adapter that a turn names."""
        options = self.simulation.options
        return turn.model in options["models"] and turn.adapter in ("", *options["adapters"])

    def _has_excuse(
        self, model: str, began: float, seconds: Mapping[str, float] = _RECOVERY_SECONDS
    ) -> bool:
        """Whether something has gone wrong that may make a model's requests fail which began then
        and have not ended yet. seconds: for how long after each kind of trouble.
        """
        return any(
            began <= each.at + seconds.get(each.kind, -math.inf) + self._slept_since(each.at)
            and each.model in ("", model)
            for each in self.excuses
        )

    def calls(self, call: Call) -> None:
        """A short request is sent."""
        named = (call.body or {}).get("id")
        if named is not None:
            self._session_names[self._caller(call)].add(named)

    def called(self, call: Call, status: int, answer: Any) -> None:
        """A short request was answered."""
        if status >= 500 and status != 503:
            self._violation("no 500", f"{call.method} {call.path}: {answer}")
        if call.path.endswith("/unload"):
            self.excuse("model is unloaded", model=call.path.split("/")[3])
        if status < 300:
            self._check_allowed(call, answer)

    def _check_allowed(self, call: Call, answer: Any) -> None:
        """A short request succeeded. It may."""
        said = f"{call.method} {call.path} of {self._caller(call)}: {answer}"
        sender, path = self.simulation.sender(call.key), call.path.partition("?")[0]
        if sender == "wrong" and path != "/health":
            self._violation("tenants are apart", f"the key is wrong, but {said}")
        if path.startswith("/admin") and sender not in ("", "server", "ops"):
            self._violation("tenants are apart", f"not an administrator, but {said}")
        if path.startswith("/v1/sessions") and call.body is None:
            found = [each["id"] for each in answer.get("data", [answer])]
        elif path.endswith("/fork") or call.method == "PATCH":
            found = [path.split("/")[3]]
        else:
            return
        foreign = set(found) - self._session_names[self._caller(call)]
        if foreign:
            self._violation("tenants are apart", f"these are no sessions of the caller: {said}")

    def disk_has_failed(self) -> bool:
        """Whether the disk has failed, or has lost what was not durable."""
        return any(kind in _OF_DISK for kind, _, _ in self.excuses)

    def server_died_near(self, at: float) -> bool:
        """Whether the server died at about this time."""
        return any(
            abs(each.at - at) < EXCUSE_OF_WRITES_SECONDS
            and each.kind in ("server dies", "weights change")
            for each in self.excuses
        )

    def excuse(self, kind: str, *, model: str = "") -> None:
        """Something goes wrong, so that requests may fail. model: whose; "": of all."""
        self.excuses.append(_Excuse(kind, self.world.now, model))
        self._saw(self.simulation.front, kind)

    def slept(self, seconds: float) -> None:
        """The machine has slept."""
        self._sleeps.append((self.world.now - seconds, seconds))

    def _slept_since(self, at: float) -> float:
        """For how many seconds, which no time limit of the server counts."""
        return sum(seconds for began, seconds in self._sleeps if began >= at)

    def fault(self, process: Process, what: str) -> None:
        """A step or a load of a worker does not work."""
        worker = self.simulation.machine.workers.get(process.pid)
        self.excuse(what, model=worker.name if worker is not None else "")

    # -- what links carry

    def sent(self, link: WorkerLink, command: SequenceRequest) -> None:
        """The front sends a request to a worker."""
        request_id = command.request_id
        life = self._lives[link]
        if life.worker is None:
            life.worker = self._worker_of(link)
        weights = life.weights(command)
        asked = self.asked.get(request_id)
        if asked is None or asked.request.prompt_token_ids != command.prompt_token_ids:
            text = tokenizer().decode(list(command.prompt_token_ids), skip_special_tokens=False)
            asked = self.asked[request_id] = _Asked(command, weights, comparable(text))
            if not command.is_idle_work:
                self._check_prompt(asked)
        asked.sendings += 1
        given = list(command.generated_token_ids)
        if given != asked.right()[: len(given)] and asked.weights == weights:
            self._violation("the oracle's tokens", f"{request_id} goes on after wrong tokens")
        if request_id in life.open:
            life.cancelled[request_id].append(life.open[request_id])
        life.open[request_id] = _OnLink(asked, len(given), self.world.now)

    def _check_prompt(self, asked: _Asked) -> None:
        """The model reads what an agent has sent, and for the agent's tenant."""
        command, text = asked.request, asked.prompt
        turns = self._turns.get(text)
        if turns is None:
            same, likest = max((_common_length(each, text), each) for each in self._turns)
            self._violation(
                "the prompt",
                f"{command.request_id} goes on with {text[same : same + 60]!r} after {same} "
                f"characters, not with {likest[same : same + 60]!r}",
            )
            return
        tenants = {self._caller(turn) for turn in turns}
        known = self._tenants.setdefault(command.tenant, tenants)
        known &= tenants
        if not known:
            self._violation(
                "tenants are apart", f"{command.request_id} has the tenant of another agent"
            )

    def came(self, link: WorkerLink, events: list[Any]) -> None:
        """A worker's events have come."""
        life = self._lives[link]
        for event in events:
            request_id = getattr(event, "request_id", None)
            if request_id is None or not isinstance(
                event, Accepted | Rejected | Started | TokensGenerated | Finished
            ):
                continue
            on = life.on(request_id)
            if on is None:
                self._violation(
                    "ends exactly once", f"{type(event).__name__} of {request_id} after its end"
                )
                return
            match event:
                case Accepted():
                    if on.is_accepted:
                        self._violation("ends exactly once", f"{request_id} is accepted twice")
                    on.is_accepted = True
                case Rejected():
                    if on.is_accepted:
                        self._violation("ends exactly once", f"{request_id} is refused late")
                    self._check_queue_full(life, event)
                    life.end(request_id)
                case Started():
                    self._check_cached(life, on, event.memory.cached_tokens)
                    self._check_read_once(life, on, event.memory.cached_tokens)
                    self.started(event)
                case TokensGenerated():
                    self._check_tokens(life, on, event)
                case Finished():
                    self._check_end(life, on, event)
                    life.end(request_id)

    def _check_queue_full(self, life: _Life, event: Rejected) -> None:
        """A worker refuses a request because its queue is full: only if it is."""
        options = self.simulation.options
        places = options["max_queued"] + options["max_running"]
        others = len(life.open) + sum(map(len, life.cancelled.values())) - 1
        if event.kind == "queue_full" and others < places:
            self._violation(
                "true refusals",
                f"{event.request_id} finds the queue full, with {others} requests on {places} "
                "places",
            )

    def _check_tokens(self, life: _Life, on: _OnLink, event: TokensGenerated) -> None:
        if life.weights(on.asked.request) != on.asked.weights:
            return
        right = on.asked.right()[on.tokens : on.tokens + len(event.token_ids)]
        if list(event.token_ids) != right:
            self._violation(
                "the oracle's tokens",
                f"{event.request_id} gets {event.token_ids} after {on.tokens} tokens instead of "
                f"{right}",
            )
        on.tokens += len(event.token_ids)

    def _form_of(self, request: SequenceRequest) -> str:
        form: str = request.kv_bits or self.simulation.options["kv_bits"]
        return "native" if form == "auto" else form  # while memory is not short

    def _reads_of(self, life: _Life, request: SequenceRequest) -> list[_Read]:
        return self._reads[life.weights(request), request.tenant, self._form_of(request)]

    def _add_read(self, life: _Life, request: SequenceRequest, answer: Sequence[int]) -> None:
        """A request has ended by itself, so that later ones may start from it."""
        if not request.is_kept or request.is_idle_work:
            return
        if request.session_id and life.worker is not None and life.worker.cache is not None:
            tenant = life.worker.cache.tenant_of(request.tenant, adapter=request.adapter)
            named = (life.worker.name, request.session_id, tenant)
            self._sessions.setdefault(named, self.world.now)
        tokens = np.array([*request.prompt_token_ids, *answer])
        self._reads_of(life, request).append(
            _Read(tokens, len(request.prompt_token_ids), self.world.now)
        )

    def _check_read_once(self, life: _Life, on: _OnLink, cached_tokens: int) -> None:
        """The tokens that an earlier request has in common with this one are not computed again."""
        request = on.asked.request
        if not self._is_kept_since(on.sent_at):
            return
        prompt = np.array([*request.prompt_token_ids])
        second = self.simulation.options["second_layer"]
        right = max(
            (
                each.reusable(prompt, second, is_quantized=self._form_of(request) != "native")
                for each in self._reads_of(life, request)
                if self._is_durable(each, on.sent_at)
            ),
            default=0,
        )
        if cached_tokens < right:
            self._violation(
                "a token is read once",
                f"{request.request_id} has {cached_tokens} cached tokens of {len(prompt)}, but an "
                f"earlier request has {right} of them",
            )

    def _is_kept_since(self, at: float) -> bool:
        """Whether everything that was computed until then must be in the cache."""
        options = self.simulation.options
        is_roomy = (
            self._read_tokens * 4 < options["kv_tokens"]
            and options["ram_tokens"] is None
            and options["store_bytes"] is None
        )
        forgets = any(
            isinstance(each, Call) and "forget" in each.path
            for each in self.simulation.scenario.actions
        )
        is_calm = all(kind in _HARMLESS_TO_STORE for kind, _, _ in self.excuses)
        return is_roomy and not forgets and is_calm and "failing" not in options

    def _is_durable(self, read: _Read, at: float) -> bool:
        """Whether what a request has computed must still be there at this time."""
        has_store = self.simulation.options["has_store"]
        lives = self.simulation.machine.ended_at
        lost_at = next((end for end in lives if end >= read.ended_at), None)
        if lost_at is None or lost_at > at:
            return read.ended_at < at
        return has_store and read.ended_at + DURABLE_SECONDS < lost_at

    def _check_end(self, life: _Life, on: _OnLink, event: Finished) -> None:
        if not on.is_accepted:
            self._violation("ends exactly once", f"{event.request_id} ends before it is accepted")
        reason = event.reason.value
        if reason in ("stop", "length") and on.asked.weights == life.weights(on.asked.request):
            right = on.asked.right()
            self._add_read(life, on.asked.request, right)
            if not on.asked.request.is_idle_work and on.tokens != len(right):
                self._violation(
                    "the oracle's tokens",
                    f"{event.request_id} ends after {on.tokens} of {len(right)} tokens",
                )
        self._remember(life, on)

    def _cache_of(self, life: _Life, asked: _Asked) -> tuple[Weights, str]:
        return life.weights(asked.request), asked.request.tenant

    def _remember(self, life: _Life, on: _OnLink) -> None:
        """The tokens of a request are computed, so that others may start from them."""
        tokens = [*on.asked.request.prompt_token_ids, *on.asked.right()[: on.tokens]]
        self._read_tokens += len(tokens)
        self._computed[self._cache_of(life, on.asked)].update(_prefix_hashes(tokens))

    def _check_cached(self, life: _Life, on: _OnLink, cached_tokens: int) -> None:
        """What comes from the cache was computed before, for the same tenant and weights."""
        prompt = list(on.asked.request.prompt_token_ids)
        if not cached_tokens:
            return
        known = self._computed[self._cache_of(life, on.asked)]
        for other in life.open.values():  # it may still run
            if other is not on and self._cache_of(life, other.asked) == self._cache_of(
                life, on.asked
            ):
                known = known | _prefix_hashes(
                    [*other.asked.request.prompt_token_ids, *other.asked.right()[: other.tokens]]
                )
        everywhere = [each for each in self._lives.values() if each is not life]
        for each in everywhere:
            for other in each.open.values():
                if self._cache_of(each, other.asked) == self._cache_of(life, on.asked):
                    known = known | _prefix_hashes(
                        [
                            *other.asked.request.prompt_token_ids,
                            *other.asked.right()[: other.tokens],
                        ]
                    )
        # its own earlier life counts, too
        given = on.asked.right()[: on.tokens]
        own = [*prompt, *given]
        if cached_tokens > len(own) or _prefix_hash(own[:cached_tokens]) not in known | (
            _prefix_hashes(own) if given else set()
        ):
            self._violation(
                "tenants are apart",
                f"{on.asked.request.request_id} has {cached_tokens} cached tokens that nobody has "
                "computed for its tenant and these weights",
            )

    def _worker_of(self, link: WorkerLink) -> SimulatedWorker | None:
        for worker in self.simulation.machine.workers.values():
            if worker.endpoint == link.endpoint:
                return worker
        return None

    # -- the worker's loop

    def at_round(self, loop: WorkerLoop, *, timeout_seconds: float) -> None:
        """A worker's loop waits for commands."""
        worker = next(
            (each for each in self.simulation.machine.workers.values() if each.loop is loop), None
        )
        if worker is None:
            return
        statistics = loop._scheduler.statistics()
        waits = sorted(reason.value for reason in loop._ledger.waits().values())
        self.states.add(
            (
                f"running {min(statistics.running, 3)} queued {min(statistics.queued, 3)}",
                f"waits {' '.join(dict.fromkeys(waits))}",
            )
        )
        if timeout_seconds >= IDLE_SECONDS:
            self._check_idle(loop)
        if self.world.random.random() < CHECKED_SHARE:
            loop.check_invariants()
            if worker.index is not None:
                worker.index.check_invariants()
            self._check_waits(loop)
            self._check_memory(loop)

    def _check_idle(self, loop: WorkerLoop) -> None:
        """The loop is about to sleep."""
        for request_id, reason in loop._ledger.waits().items():
            if reason is not WaitReason.READER:
                self._violation(
                    "the queue is never idle",
                    f"the loop sleeps, but {request_id} waits for {reason}",
                )

    def _check_waits(self, loop: WorkerLoop) -> None:
        """A waiting request's reason is true."""
        cache = loop._cache
        for sequence in loop._ledger.live():
            scheduled = sequence.scheduled
            reason = scheduled.waits_for
            if reason is WaitReason.DISK and sequence.start.lookup is None:
                self._violation(
                    "true reasons", f"{sequence.id} waits for the disk without a lookup"
                )
            if reason is WaitReason.TWIN and sequence.id not in cache._in_flight._waiting:
                self._violation("true reasons", f"{sequence.id} waits for no other request")
        cache._in_flight.check_invariants()

    def _check_memory(self, loop: WorkerLoop) -> None:
        """No more keys and values than the budget allows."""
        statistics = loop._scheduler.statistics()
        if (
            statistics.reserved_bytes > max(statistics.budget_bytes, 0)
            and not loop._scheduler.excess_bytes
        ):
            self._violation(
                "bytes", f"{statistics.reserved_bytes} of {statistics.budget_bytes} bytes in use"
            )

    # -- counted when nothing happens

    def after_event(self) -> None:
        """Called after each event."""

    def at_rest(self) -> None:
        """No agent waits for anything: nothing may be held any more."""
        front = self.simulation.front
        if front.app is not None:
            active = list(front.app.state.services.answers.active)
            if active:
                self._violation("nothing outlives its owner", f"{len(active)} requests are active")
            self._check_front_at_rest(front)
        for link, life in self._lives.items():
            worker = life.worker
            if worker is not None and not worker.process.is_dead and link.is_open and life.open:
                self._violation("ends exactly once", f"these never end: {', '.join(life.open)}")
        for worker in self.simulation.machine.workers.values():
            self._check_worker_at_rest(worker)
            self._check_sessions(worker)
            self._check_closed(worker)
        self._check_unwanted()
        for process in self.world.processes:
            files = self.simulation.disk.open_files(process)
            if len(files) > (0 if process.is_dead else MOST_FILES):
                self._violation(
                    "nothing outlives its owner", f"{process.name} has these open: {files}"
                )
        if self.simulation.disk.misuses:
            self._violation(
                "nothing outlives its owner", f"closed files: {self.simulation.disk.misuses}"
            )
        self.check_store()
        self.check_durable()

    def _check_unwanted(self) -> None:
        """Files that the store was told to delete are gone, unless its process died before."""
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            there = {path.stem for path in blocks.glob("*/*.block")}
        last_death = max(
            (each.at for each in self.excuses if each.kind in _RECOVERY_SECONDS), default=-math.inf
        )
        for name, at in self._unwanted.items():
            if name in there and at > last_death:
                self._violation("nothing outlives its owner", f"{name} was deleted, but is there")

    def _check_front_at_rest(self, front: SimulatedFront) -> None:
        """No answer waits for a client that may come back, and all memories are in order."""
        assert front.app is not None and front.residency is not None
        services = front.app.state.services
        resumable = services.answers.resumable
        left = {
            "answers": len(resumable) + len(resumable._by_head) + resumable.buffered_bytes,
            "running responses": len(resumable.named.keys() - set(resumable._unwritten)),
            "background tasks": len(resumable.tasks),
            "leases": sum(
                slot.leases.held + slot.leases.waiting for slot in front.residency._slots.values()
            ),
        }
        if any(left.values()):
            self._violation("nothing outlives its owner", f"at rest, the server has {left}")
        resumable.check_invariants()
        services.telemetry.misses.check_invariants()
        for slot in front.residency._slots.values():
            slot.check_invariants()
        for task in front.app.state.bundles._tasks.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                bundle = task.result()
                for memory in (bundle.token_memory, bundle.first_forms, bundle.known_answers):
                    memory.check_invariants()

    def _check_worker_at_rest(self, worker: SimulatedWorker) -> None:
        if worker.loop is None or worker.engine is None:
            return
        statistics = worker.loop._scheduler.statistics()
        open_sequences = len(worker.engine._sequences)
        live = [sequence.id for sequence in worker.loop._ledger.live()]
        if statistics.running or statistics.queued or open_sequences or live:
            self._violation(
                "nothing outlives its owner",
                f"at rest {worker.name} has {statistics.running} running, {statistics.queued} "
                f"queued, {open_sequences} open sequences, and {live}",
            )
        index = worker.index
        if index is not None and not index._pins._held_sizes:
            nbytes = index._ram.resident_bytes
            if nbytes > index.ram_budget_bytes:
                self._violation("bytes", f"{nbytes} of {index.ram_budget_bytes} bytes in RAM")
        if index is not None and index._ram._holds and not index._pins._held_sizes:
            self._violation(
                "nothing outlives its owner", f"{len(index._ram._holds)} blocks are held"
            )

    def _check_closed(self, worker: SimulatedWorker) -> None:
        """Sessions that were closed are gone."""
        if worker.loop is None or worker.loop._sessions is None:
            return
        for (model, tenant, name), at in self._closed.items():
            if model != worker.name or any(each.at >= at - 1.0 for each in self.excuses):
                continue
            if worker.loop._sessions.is_open(name, tenant=tenant):
                self._violation("nothing outlives its owner", f"session {name} was closed")

    def _check_sessions(self, worker: SimulatedWorker) -> None:
        """Sessions are still there."""
        options = self.simulation.options
        calls = [each for each in self.simulation.scenario.actions if isinstance(each, Call)]
        opens = [each for each in calls if each.method == "POST" and "sessions" in each.path]
        requests = [each.request for each in self.asked.values()]
        named = {(each.session_id, each.tenant, each.adapter) for each in requests}
        are_kept = (
            all(kind in _HARMLESS_TO_STORE for kind, _, _ in self.excuses)
            and "failing" not in options
            and not any(each.method == "DELETE" for each in calls)
            and len(named) + len(opens) <= options["max_sessions"]
        )
        if not are_kept or worker.loop is None or worker.loop._sessions is None:
            return
        ends = self.simulation.machine.ended_at
        for (model, name, tenant), at in self._sessions.items():
            lost_at = next((end for end in ends if end >= at), None)
            if model != worker.name or (
                lost_at is not None and (not options["has_store"] or lost_at < at + DURABLE_SECONDS)
            ):
                continue
            if not worker.loop._sessions.is_open(name, tenant=tenant):
                self._violation("sessions stay", f"{name} of {model} is gone")

    def commanded(self, link: WorkerLink, command: Any) -> None:
        """The front sends something about a session to a worker."""
        worker = self._worker_of(link)
        if worker is None or worker.cache is None:
            return
        model = worker.name
        tenant = worker.cache.tenant_of(command.tenant, adapter=command.adapter)
        if isinstance(command, SessionCommand) and command.operation == "close":
            self._closed[model, tenant, command.session_id] = self.world.now
            return
        self._closed.pop((model, tenant, command.session_id), None)
        if isinstance(command, SessionCommand):
            self._closed.pop((model, tenant, command.new_session_id), None)

    def expired(self, sessions: list[Any]) -> None:
        """Sessions are closed by age: none gets that old here. A clock that has jumped is believed
        an hour later.
        """
        if sessions and self.world.now - self.jumped_at < 3500.0:
            self._violation("nothing expires early", f"{len(sessions)} sessions are closed by age")

    def check_store(self) -> None:
        """Every block that can be found in the store is complete and right."""
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            for path in sorted(blocks.glob("*/*.block")):
                if not self._is_right(path) and path.stem not in self._damaged_blocks():
                    self._violation("stored blocks are right", f"{path.name} is damaged")

    def _is_right(self, path: Path) -> bool:
        model = path.parent.name
        try:
            stored = read_block(path, bytes.fromhex(path.stem), model=model)
        except ReadFailed:
            return False
        block = stored.block
        weights = self._weights_by_id().get(model, ())
        tokens = np.frombuffer(block.packed_tokens, "<i4").tolist()
        if not weights or len(stored.parts) != 2 or not tokens:
            return True
        found = np.stack([np.frombuffer(part, np.float32) for part in stored.parts])
        for each in weights:
            right = rows_of(tokens, block.start, each)
            if np.array_equal(found, right.reshape(2, -1)):
                return True
        self._violation("stored blocks are right", f"{path.name} holds other keys or values")
        return True

    def _weights_by_id(self) -> dict[str, Sequence[Weights]]:
        """All weights with which a block may be computed, by the name of its folder."""
        return {
            fingerprint_id(fingerprint): weights
            for model in self.simulation.options["models"]
            for fingerprint, weights in self.simulation.machine.all_weights_of(model).items()
        }

    def at_end(self) -> None:
        """The server has stopped."""
        self.check_store()

    # -- the store's promises

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """The store says that these blocks are durable."""
        names = [key.hex() for key in keys]
        self._durable.update(names)
        disk, store = self.simulation.disk, self.simulation.folder / "store"
        with disk.bypassed():
            files = [
                path
                for name in names
                for path in (
                    *store.glob(f"blocks/*/{name}.block"), *store.glob(f"incoming/*/{name}.part")
                )
            ]  # fmt: skip
            unsynced = [path.name for path in files if not disk.durability.is_synced(path)]
        if unsynced:
            self._violation("durable blocks survive", f"{min(unsynced)} is not synced yet")

    def gave_up(self, keys: Iterable[BlockKey]) -> None:
        """The store evicts these blocks, or was told to remove them."""
        names = [key.hex() for key in keys]
        self._given_up.update(names)
        self._durable.difference_update(names)

    def unwanted(self, keys: Iterable[BlockKey]) -> None:
        """The store was told to delete these blocks."""
        self._unwanted.update((key.hex(), self.world.now) for key in keys)

    def wanted(self, key: BlockKey) -> None:
        """A block is given to the store, perhaps again."""
        self._unwanted.pop(key.hex(), None)

    def evicted(self, entries: list[Entry]) -> None:
        """The store evicts these blocks."""
        if pinned := [entry.block.key.hex() for entry in entries if entry.pinned]:
            self._violation("good blocks stay", f"{pinned[0]} is pinned, but is evicted")

    def deleted(self, path: Path) -> None:
        """A file of a block is about to be deleted or moved away: only if it may be."""
        if path.stem in self._given_up or path.parent.parent.name != "blocks":
            return
        with self.simulation.disk.bypassed():
            is_whole = _is_whole(path)
        if is_whole:
            self._violation("good blocks stay", f"{path.name} is whole, but is deleted")

    def writes_record(self, path: Path, content: bytes | None) -> None:
        """A session's record is about to be replaced, or removed."""
        self._records.setdefault(path, [None]).append(content)

    def wrote_record(self, path: Path) -> None:
        """The store says that the record is durable."""
        self._records[path] = self._records[path][-1:]

    def check_durable(self) -> None:
        """What was durable is there."""
        with self.simulation.disk.bypassed():
            there = {path.stem for path in self._whole_files()}
            records = {path: _content(path) for path in self._records if path not in self.damaged}
        lost = self._durable - there - self._damaged_blocks()
        if lost:
            self._violation("durable blocks survive", f"{len(lost)} blocks are lost: {min(lost)}")
        for path, found in records.items():
            if found not in self._records[path]:
                self._violation("durable records survive", f"{path.name} is {found!r}")

    def after_power_cut(self) -> None:
        """What was durable has survived, and what has its final name is whole. What is there now stays."""
        self.check_durable()
        self.check_store()
        with self.simulation.disk.bypassed():
            self._records = {path: [_content(path)] for path in self._records}

    def _whole_files(self) -> Iterator[Path]:
        """The files of blocks that are whole, also those without their final name, which is given
        to them when the store is opened again.
        """
        store = self.simulation.folder / "store"
        for path in [*store.glob("blocks/*/*.block"), *store.glob("incoming/*/*.part")]:
            if _is_whole(path):
                yield path

    def _damaged_blocks(self) -> set[str]:
        return {path.stem for path in self.damaged}

    def left_by_the_dead(self) -> set[str]:
        """The blocks that dead processes have written, but not named."""
        dead = {str(process.pid) for process in self.world.processes if process.is_dead}
        with self.simulation.disk.bypassed():
            return {
                path.stem
                for path in self._whole_files()
                if path.suffix == ".part" and path.parent.name.partition("-")[0] in dead
            }

    def salvaged(self, blocks: set[str]) -> None:
        """The store says that it has saved what dead processes have left."""
        with self.simulation.disk.bypassed():
            there = {path.stem: path.suffix for path in self._whole_files()}
        lost = blocks - there.keys() - self._given_up - self._damaged_blocks()
        if lost:
            self._violation("a kill loses no written block", f"these are lost: {min(lost)}")
        # those that could not be read wait for the next start
        named = {block for block in blocks if there.get(block) == ".block"}
        self._durable |= named - self._given_up

    def refused(self, keys: Iterable[BlockKey]) -> None:
        """A worker cannot use these stored blocks: only if they are damaged or gone, for which the
        disk must have failed.
        """
        blocks = self.simulation.folder / "store" / "blocks"
        good = {key.hex() for key in keys} - self._damaged_blocks()
        with self.simulation.disk.bypassed():
            whole = [each for each in good if any(map(_is_whole, blocks.glob(f"*/{each}.block")))]
        if whole and not self.simulation.disk.may_lie:
            self._violation("good blocks stay", f"{min(whole)} is whole, but is given up")
        has_failed = self.damaged or self.disk_has_failed()
        # a small store may evict a block between its choice and its use
        has_failed = has_failed or self.simulation.options["store_bytes"] is not None
        if not has_failed and "failing" not in self.simulation.options:
            names = ", ".join(key.hex()[:12] for key in keys)
            self._violation("stored blocks can be used", f"these cannot, on a good disk: {names}")

    # -- failures that nobody would see

    def swallowed(self, error: BaseException) -> None:
        """The code logs an error and goes on: only if something simulated has caused it."""
        if isinstance(error, Violation):
            return
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError | SimulatedFailure | ReadFailed | HoldfastError | Killed):
                return
            cause = cause.__cause__ or cause.__context__
        lines = "".join(traceback.format_exception(error)[-3:])
        self._violation("nothing is swallowed", lines)

    def cut_off(self) -> None:
        """The world had too many events. Requests that are open may not have waited for long."""
        for name, agent in self.simulation.agents.items():
            seconds = self.world.now - agent.asked_at
            if agent.is_asking and seconds > CUT_OFF_SECONDS:
                self._violation("bounded time", f"{name} has waited for {seconds:.0f} s")

    # -- processes

    def killed(self, process: Process) -> None:
        """The server kills a worker: only if something has happened to it, or while it loads, when
        nothing else stops it.
        """
        worker = self.simulation.machine.workers.get(process.pid)
        is_loading = worker is None or worker.loop is None
        model = worker.name if worker is not None else ""
        if not is_loading and not self._has_excuse(model, self.world.now, _KILL_SECONDS):
            self._violation(
                "no needless kill", f"{process.name} is killed, but nothing has gone wrong"
            )

    def suspended(self, process: Process, *, seconds: float) -> None:
        """A worker was suspended for this time: if it serves, it has been replaced."""
        worker = self.simulation.machine.workers.get(process.pid)
        began = self.world.now - seconds
        front = self.simulation.front
        is_served = front.is_running and front.began_at < began
        has_slept = any(at >= began for at, _ in self._sleeps)
        if worker and worker.loop and is_served and not has_slept and seconds > LONGEST_SILENCE:
            self._violation(
                "bounded time", f"{process.name} was suspended for {seconds:.0f} s and still lives"
            )

    def recovered(self, model: str, status: int) -> None:
        """How the last request of all ended, after everything that went wrong."""
        self._recovered[model] = status

    def check_recovery(self) -> None:
        """Everything works again once nothing goes wrong any more."""
        for model in self.simulation.options["models"]:
            if self._recovered.get(model) != 200:
                self._violation(
                    "it recovers", f"{model} does not answer: {self._recovered.get(model)}"
                )

    # -- coverage

    def verified(self, sequence: LiveSequence, draft: Draft, *, accepted: int) -> None:
        """A step has verified a draft."""
        drafted = len(draft.token_ids)
        how_many = "all" if accepted == drafted else "some" if accepted else "none"
        place = sequence.known_tokens % BLOCK
        where = "over an edge" if place + drafted >= BLOCK else "within a block"
        whose = "model" if draft.is_by_model else "text"
        second = self.simulation.options["second_layer"]
        self.states.add((f"draft from the {whose} with {second}", f"{how_many} right {where}"))

    def started(self, event: Started) -> None:
        """A request starts from what is cached."""
        memory = event.memory
        names = ("moved_tokens", "shared_tokens", "ram_tokens", "disk_tokens")
        sources = [name for name in names if getattr(memory, name, 0)]
        second = self.simulation.options["second_layer"]
        self.states.add((f"start with {second}", f"starts from {' '.join(sources)}"))

    def _saw(self, front: SimulatedFront, event: str) -> None:
        residency = front.residency
        phases = "down"
        if residency is not None:
            phases = " ".join(slot.state.value for slot in residency._slots.values())
        self.states.add((phases, event))


def _is_whole(path: Path) -> bool:
    """Whether a file holds a whole block."""
    key = bytes.fromhex(path.stem)
    try:
        _, fingerprint = read_header(path, key)
        read_block(path, key, model=fingerprint_id(fingerprint))
    except (ReadFailed, OSError):
        return False
    return True


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _common_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _prefix_hash(tokens: list[int]) -> int:
    found = 0
    for token in tokens:
        found = hash((found, token))
    return found


def _prefix_hashes(tokens: list[int]) -> set[int]:
    hashes = set()
    found = 0
    for token in tokens:
        found = hash((found, token))
        hashes.add(found)
    return hashes


_running: list[Checks] = []
_ = TOKEN_BYTES


def install() -> None:
    """Look at what passes between front and workers, and at the rounds of workers' loops."""
    send, deliver, receive = WorkerLink.send, WorkerLink._deliver, WorkerLoop._receive

    def watched_send(link: WorkerLink, command: Any) -> bool:
        if isinstance(command, SequenceRequest) and link.is_open:
            _running[-1].sent(link, command)
        if isinstance(command, SequenceRequest | SessionCommand) and command.session_id:
            _running[-1].commanded(link, command)
        return send(link, command)

    def watched_deliver(link: WorkerLink, events: list[Any]) -> None:
        _running[-1].came(link, events)
        deliver(link, events)

    def watched_receive(loop: WorkerLoop, *, is_busy: bool) -> Any:
        inbox = loop._inbox
        poll = inbox.receive

        def watched(*, timeout_seconds: float) -> Any:
            _running[-1].at_round(loop, timeout_seconds=timeout_seconds)
            return poll(timeout_seconds=timeout_seconds)

        loop._inbox = _Watched(inbox, watched)  # type: ignore[assignment]
        try:
            return receive(loop, is_busy=is_busy)
        finally:
            loop._inbox = inbox

    salvage = io_thread.salvage

    def watched_salvage(folder: StoreFolder) -> int:
        left = _running[-1].left_by_the_dead()
        saved = salvage(folder)
        _running[-1].salvaged(left)
        return saved

    io_thread.salvage = watched_salvage
    finish, removed = Mailbox.finish, IoThread.remove
    offer = Mailbox.offer_block

    def watched_offer(mailbox: Mailbox, block: StoredBlock) -> Any:
        _running[-1].wanted(block.key)
        return offer(mailbox, block)

    Mailbox.offer_block = watched_offer  # type: ignore[method-assign]
    expired = SessionRegistry.expired

    def watched_expired(registry: SessionRegistry, now: float) -> Any:
        found = expired(registry, now)
        _running[-1].expired(found)
        return found

    SessionRegistry.expired = watched_expired  # type: ignore[method-assign]

    def watched_finish(mailbox: Mailbox, keys: Iterable[BlockKey], *, stored: bool) -> None:
        keys = list(keys)
        if stored:
            _running[-1].stored(keys)
        finish(mailbox, keys, stored=stored)

    def watched_unlink(maintenance: StoreMaintenance, entries: Iterable[Entry]) -> list[Entry]:
        entries = list(entries)
        _running[-1].evicted(entries)
        _running[-1].gave_up(entry.block.key for entry in entries)
        return unlink(maintenance, entries)

    def watched_remove(io: IoThread, keys: tuple[BlockKey, ...]) -> None:
        _running[-1].gave_up(keys)
        _running[-1].unwanted(keys)
        removed(io, keys)

    def watched_unreadable(index: PrefixIndex, keys: Iterable[BlockKey]) -> Any:
        keys = tuple(keys)
        _running[-1].refused(keys)
        return unreadable(index, keys)

    put, removed_record = Records.put, Records.remove

    def watched_put(records: Records, name: str, data: bytes) -> None:
        path = records._path(name)
        _running[-1].writes_record(path, data + records._sum(name, data))
        put(records, name, data)
        _running[-1].wrote_record(path)

    def watched_remove_record(records: Records, name: str) -> None:
        _running[-1].writes_record(records._path(name), None)
        removed_record(records, name)

    Records.put, Records.remove = watched_put, watched_remove_record  # type: ignore[method-assign]

    def watched_count(drafts: Drafts, sequence: Any, draft: Draft, *, accepted: int) -> None:
        _running[-1].verified(sequence, draft, accepted=accepted)
        count(drafts, sequence, draft, accepted=accepted)

    count = Drafts.count
    Drafts.count = watched_count  # type: ignore[method-assign]
    unreadable = PrefixIndex.unreadable
    PrefixIndex.unreadable = watched_unreadable
    unlink = StoreMaintenance._unlink
    Mailbox.finish = watched_finish
    StoreMaintenance._unlink = watched_unlink
    IoThread.remove = watched_remove
    log_failure = device_steps.log_failure

    @contextlib.contextmanager
    def watched_log_failure(message: str, *names: object, **more: Any) -> Iterator[None]:
        with log_failure(message, *names, **more):
            try:
                yield
            except Exception as error:
                _running[-1].swallowed(error)
                raise

    for module in list(sys.modules.values()):
        if getattr(module, "log_failure", None) is log_failure:
            module.log_failure = watched_log_failure
    WorkerLink.send = watched_send  # type: ignore[method-assign]
    WorkerLink._deliver = watched_deliver  # type: ignore[method-assign]
    WorkerLoop._receive = watched_receive  # type: ignore[method-assign]


@dataclass
class _Watched:
    inbox: Any
    receive: Any
