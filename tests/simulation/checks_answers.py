"""Invariants of the answers that agents receive."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.simulation.actions import Call, Turn
from tests.simulation.agents import Expected, Heard, Request, expected, expected_calls
from tests.simulation.checks_part import Part
from tests.simulation.conversations import (
    OLLAMA,
    choices_of,
    comparable,
    runs_in_background,
    stops_of,
)
from tests.simulation.formats import is_of_format
from tests.simulation.stored_responses import Stored, may_be_lost, may_return
from tests.simulation.tools import cut_call, has_grammar, has_tools, is_as_chosen, reads_calls

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.front import SimulatedFront
    from tests.simulation.network import Exchange

KEPT_SLACK_SECONDS = 1.0  # the server's clock for a kept answer starts before its client's
CUT_OFF_SECONDS = 1000.0
GRACE_SECONDS = 30.0  # in addition to a time limit: for the network, and a load
CALM_SECONDS = 700.0  # after the last fault
WORK_TIMES = 3.0  # preempted requests are computed again
OF_ANY_KEY = ("/admin/cache", "/admin/requests", "/admin/misses")  # show what belongs to the key


# the client as the server identifies it, and its `cache_salt`
Caller: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class _Shared:
    """A complete answer that a client has received. identity: of its request."""

    answer_id: str
    identity: tuple[object, ...]
    has_key: bool
    began: float
    ended: float


class AnswerChecks(Part):
    """Checks the answers that agents report."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self.count = 0
        self.asked_choices = 0  # of all requests
        self._prompts: dict[str, set[str]] = {}  # by the request's id, which the agent chooses
        self._exchanges: dict[str, Exchange] = {}  # by the request's id
        self.turns: dict[str, list[Turn]] = defaultdict(list)  # by the text of their prompt
        # the sessions that each caller has named
        self._session_names: dict[Caller, set[str]] = defaultdict(set)
        self._hearers: dict[str, set[Caller]] = defaultdict(set)  # of each answer
        self._shared: list[_Shared] = []
        self._recovered: dict[str, int] = {}  # the status of each model's last request

    def began(
        self, request_id: str, turn: Turn, prompts: Iterable[str], exchange: Exchange
    ) -> None:
        """An agent has sent a request. prompts: the model must read one of these texts."""
        self._exchanges[request_id] = exchange
        self._prompts[request_id] = {comparable(each) for each in prompts}
        for each in self._prompts[request_id]:
            self.turns[each].append(turn)
        self.asked_choices += turn.choices
        self._session_names[self.caller(turn)].add(turn.session)

    def answer_id(self, request_id: str) -> str:
        """The id of the answer to a request, which Ollama's answers do not contain, as the server has
        recorded it; "" if the request was refused.
        """
        record = self._exchanges[request_id].record
        if record is not None and record.rejoined:
            record = self._exchanges[record.rejoined].record
        generation = record.generation if record is not None else None
        return generation.request_id if generation is not None else ""

    def ended(
        self,
        request_id: str,
        turn: Turn,
        heard: Heard,
        *,
        began: float,
        front: SimulatedFront,
        before: Stored | None,
    ) -> None:
        """An agent's request has ended: with the right answer, or refused for a true reason. before:
        the stored response or conversation that the request continues.
        """
        self.count += 1
        self.checks.saw(front, f"answer {heard.status} {heard.error}")
        keys = self.simulation.keys
        if heard.status == 401 and keys.may_fail(turn.key, since=began):
            return
        if not keys.may_pass(turn.key, since=began):
            self._violation("tenants are apart", f"{request_id} with a wrong key: {heard.status}")
        self._check_time(request_id, turn, heard, began=began)
        is_whole = heard.status == 200 and not heard.error
        if before is not None and self._is_refused_rightly(request_id, turn, before, heard):
            return
        if heard.events and is_whole:
            self._check_events(request_id, heard)
        if is_whole and not self.has_model(turn):
            self._violation(
                "true refusals", f"{request_id} is answered by a model that is not there"
            )
        if is_whole and not self._prompts[request_id]:
            self._violation(
                "true refusals", f"{request_id} is answered, but an image cannot be used"
            )
        self._check_texts(request_id, turn, heard, is_whole=is_whole)
        if not is_whole:
            self.checks.refusals.refused(
                request_id, turn, heard, prompts=self._prompts[request_id], began=began, front=front
            )
            return
        if turn.streams and not heard.has_mark:
            self._violation("ends exactly once", f"the stream of {request_id} lacks its last event")
        choices = choices_of(turn)
        if len(heard.ends) != choices:
            self._violation(
                "ends exactly once", f"{request_id} has {len(heard.ends)} of {choices} ends"
            )

    def _check_time(self, request_id: str, turn: Turn, heard: Heard, *, began: float) -> None:
        """A request ends soon after its time limit; and while nothing goes wrong, in the time that
        all requests together would need one after the other, and more than once.
        """
        if turn.reader == "slow" or runs_in_background(turn):
            return
        lasted = self.world.now - began - self.checks.excuses.slept_since(began)
        limit = math.inf if turn.timeout_seconds is None else turn.timeout_seconds
        if not self.checks.excuses.any_since(began - CALM_SECONDS):
            limit = min(limit, WORK_TIMES * self.checks.links.work_seconds)
        if self.simulation.options["max_loaded"] is None and lasted > limit + GRACE_SECONDS:
            self._violation("bounded time", f"{request_id} took {lasted:.1f} of {limit:.1f} s")

    def _check_events(self, request_id: str, heard: Heard) -> None:
        """The events of a response come once each and in order. Its status may be repeated: such
        events have numbers, too, but other clients do not receive them.
        """
        events = heard.events
        numbers = [event["sequence_number"] for event in events]
        kinds = [event["type"].removeprefix("response.") for event in events]
        kinds = [kind for kind, _ in itertools.groupby(kinds) if not kind.endswith(".delta")]
        text = ["content_part.added", "output_text.done", "content_part.done"]
        item = ["output_item.added", *text, "output_item.done"]
        kinds = [kind for kind in kinds if kind != "queued"]
        kinds = [
            kind
            for place, kind in enumerate(kinds)
            if kind != "in_progress" or kind not in kinds[:place]
        ]
        calls = heard.calls.get(0, [])
        call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
        items = [*(item if heard.texts.get(0) else ()), *(call * len(calls))]
        right = ["created", "in_progress", *items, kinds[-1]]
        also = right if items else [*right[:2], *item, right[-1]]
        is_ordered = kinds in (right, also) or not heard.is_usable
        if numbers != sorted(set(numbers)) or not is_ordered:
            self._violation("ends exactly once", f"{request_id} has the events {numbers} {kinds}")

    def _is_refused_rightly(
        self, request_id: str, turn: Turn, before: Stored, heard: Heard
    ) -> bool:
        """Whether a request is rightly refused because what it continues is not available."""
        is_foreign = self.caller(turn) != self.caller(before.turn)
        if heard.status == 200:
            if is_foreign or (before.is_deleted and not may_return(self.simulation, before)):
                self._violation("tenants are apart", f"{request_id} continues {before.id}")
            return False
        if heard.error in ("previous_response_not_found", "conversation_not_found"):
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
        """An agent has received a complete answer. With an `Idempotency-Key`, identical requests of one
        caller get the same answer; without one, only one client gets the answer.
        """
        identity = (
            front,
            self.caller(turn),
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

    def caller(self, turn: Turn | Call) -> Caller:
        return self.simulation.keys.sender(turn.key), turn.tenant

    def broke(
        self, request_id: str, turn: Turn, heard: Heard, exchange: Exchange, *, leaves: bool
    ) -> None:
        """An agent has received part of an answer. leaves: it has closed the connection."""
        front = exchange.front
        self.checks.saw(front, "broken connection")
        self._check_texts(request_id, turn, heard, is_whole=False)
        if not leaves and exchange.has_begun and front.is_running:
            self._violation("ends exactly once", f"the server broke the connection of {request_id}")

    def _check_texts(self, request_id: str, turn: Turn, heard: Heard, *, is_whole: bool) -> None:
        right: dict[int, Expected] = {}
        hearers = self._hearers[heard.request_id]
        hearers.add(self.caller(turn))
        if heard.request_id and len(hearers) > 1:
            self._violation("tenants are apart", f"{heard.request_id} is read by {hearers}")
        for choice in sorted({*heard.texts, *heard.calls, *heard.ends}):
            text = heard.texts.get(choice, "")
            asked = self.checks.links.asked.get(f"{heard.request_id}/{choice}")
            if asked is None:
                if text:
                    self._violation("the oracle's tokens", f"{request_id} gets text from nowhere")
                continue
            if asked.prompt not in self._prompts[request_id]:
                self._violation(
                    "the prompt", f"{request_id} gets the answer to another request: {text!r}"
                )
            if reads_calls(turn):
                is_single = turn.tool_choice == "single"
                answer = right[choice] = expected_calls(
                    asked.right(), stops_of(turn), is_single=is_single
                )
                self._check_calls(request_id, turn, choice, heard, answer, is_whole=is_whole)
                continue
            answer = right[choice] = expected(asked.right(), stops_of(turn))
            if heard.compacted:  # it is encrypted; the next prompt shows whether it is right
                continue
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
            if is_whole:
                self._check_stop(request_id, heard, answer)
            if is_whole and turn.logprobs and turn.protocol in ("chat", *OLLAMA):
                logprobs = heard.logprobs.get(choice, [])
                self._check_logprobs(request_id, turn, logprobs, answer.text)
            ends = is_whole and answer.end == "stop" and not answer.stop
            has_format = turn.format and not has_tools(turn)
            if ends and has_format and not is_of_format(text, turn):
                self._violation("the oracle's tokens", f"{request_id} is not {turn.format}: {text}")
        if is_whole:
            self._check_usage(request_id, heard, right)

    def _check_stop(self, request_id: str, heard: Heard, answer: Expected) -> None:
        if heard.stop not in (None, answer.stop):
            self._violation(
                "the oracle's tokens",
                f"{request_id} was ended by {heard.stop!r} instead of {answer.stop!r}",
            )

    def _check_calls(
        self,
        request_id: str,
        turn: Turn,
        choice: int,
        heard: Heard,
        answer: Expected,
        *,
        is_whole: bool,
    ) -> None:
        """The text and the calls are the oracle's, or the part of them that has come."""
        text, calls = heard.texts.get(choice, ""), heard.calls.get(choice, [])
        where = f"choice {choice} of {request_id}"
        right = [*answer.calls]
        begun = cut_call(answer.cut)
        if begun is not None:
            right.append(begun)
        what = f"is {text!r} {calls} ({heard.ends.get(choice)}) instead of {answer}"
        has_all = (text, len(calls), heard.ends.get(choice)) == (
            answer.text, len(right), answer.end
        )  # fmt: skip
        # the markup of a call whose arguments had not begun may be shown
        is_unclear = bool(answer.cut) and begun is None
        if is_whole and not is_unclear and not has_all:
            self._violation("the oracle's tokens", f"{where} {what}")
        if not (answer.text.startswith(text) or (is_unclear and text.startswith(answer.text))):
            self._violation("the oracle's tokens", f"{where} begins otherwise: {what}")
        if len(calls) > len(right) or len({each.id for each in calls}) < len(calls):
            self._violation("the oracle's tokens", f"{where} has other calls: {what}")
        if is_whole and not is_unclear:
            self._check_stop(request_id, heard, answer)
        is_ended = is_whole and answer.end != "length" and not answer.stop
        if not is_as_chosen(turn, calls, is_ended=is_ended):
            self._violation("the oracle's tokens", f"{where} is not {turn.tool_choice}: {calls}")
        is_right = True
        for number, (call, right_call) in enumerate(zip(calls, right, strict=False)):
            is_complete = number < len(answer.calls) and (is_whole or number < len(calls) - 1)
            if is_complete:
                is_right = call.value == right_call.value
            elif turn.streams or turn.protocol != "messages":  # there, `input` is always whole
                is_right = right_call.arguments.startswith(call.arguments)
            if call.name != right_call.name or not is_right:
                self._violation("the oracle's tokens", f"{where} has a wrong call: {what}")

    def _check_logprobs(
        self, request_id: str, turn: Turn, logprobs: list[dict[str, Any]], text: str
    ) -> None:
        """Without a grammar, every token has a probability of one. The tokens add up to the text."""
        if not has_grammar(turn) and any(abs(each["logprob"]) > 0.01 for each in logprobs):
            self._violation("the oracle's tokens", f"{request_id} has wrong log-probabilities")
        found = bytes(byte for each in logprobs for byte in each["bytes"] or ())
        if found.decode(errors="replace") != text:
            self._violation(
                "the oracle's tokens", f"the tokens of {request_id} are {found!r} for {text!r}"
            )

    def _check_usage(self, request_id: str, heard: Heard, right: Mapping[int, Expected]) -> None:
        asked = self.checks.links.asked.get(f"{heard.request_id}/0")
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

    def has_model(self, turn: Turn) -> bool:
        """Whether the model and the adapter of a turn exist."""
        options = self.simulation.options
        return turn.model in options["models"] and turn.adapter in ("", *options["adapters"])

    def calls(self, call: Call) -> None:
        """An API call is sent."""
        named = (call.body or {}).get("id")
        if named is not None:
            self._session_names[self.caller(call)].add(named)

    def called(self, call: Call, status: int, answer: Any, *, began: float) -> None:
        """An API call was answered."""
        if status >= 500 and status != 503:
            self._violation("no 500", f"{call.method} {call.path}: {answer}")
        if call.path.endswith("/unload"):
            self.checks.excuses.add("model is unloaded", model=call.path.split("/")[3])
        if status < 300:
            self._check_allowed(call, answer, began=began)

    def _check_allowed(self, call: Call, answer: Any, *, began: float) -> None:
        """An API call succeeded, so its caller must be allowed to make it."""
        said = f"{call.method} {call.path} of {self.caller(call)}: {answer}"
        sender, path = self.simulation.keys.sender(call.key), call.path.partition("?")[0]
        if path != "/health" and not self.simulation.keys.may_pass(call.key, since=began):
            self._violation("tenants are apart", f"the key is wrong, but {said}")
        is_admin = sender in ("", "server", "ops")
        if path.startswith("/admin") and path not in OF_ANY_KEY and not is_admin:
            self._violation("tenants are apart", f"not an administrator, but {said}")
        if path in OF_ANY_KEY and not is_admin:
            shown = [*answer.get("requests", ()), *answer.get("misses", ())]
            if any(each["key"] != sender for each in shown):
                self._violation("tenants are apart", f"of another key: {said}")
        if path.startswith("/v1/sessions") and call.body is None:
            found = [each["id"] for each in answer.get("data", [answer])]
        elif path.endswith("/fork") or call.method == "PATCH":
            found = [path.split("/")[3]]
        else:
            return
        foreign = set(found) - self._session_names[self.caller(call)]
        if foreign:
            self._violation("tenants are apart", f"these are no sessions of the caller: {said}")

    def recovered(self, model: str, status: int) -> None:
        """A model's final request, sent after all faults have ended, has this status."""
        self._recovered[model] = status

    def check_recovery(self) -> None:
        """Every model answers again after the last fault."""
        for model in self.simulation.options["models"]:
            if self._recovered.get(model) != 200:
                self._violation(
                    "it recovers", f"{model} does not answer: {self._recovered.get(model)}"
                )

    def cut_off(self) -> None:
        """The world reached its limit of events: no open request may have waited for too long."""
        for name, agent in self.simulation.agents.items():
            seconds = self.world.now - agent.asked_at
            if agent.is_asking and seconds > CUT_OFF_SECONDS:
                self._violation("bounded time", f"{name} has waited for {seconds:.0f} s")
