"""Invariants of the messages between the server and its workers."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.commands import SequenceControl, SequenceRequest, WorkerControl
from holdfast.wire.events import Accepted, Finished, PrefillFinished, Rejected, TokensGenerated
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.drafting.suffix import MOST_DRAFTED
from tests.simulation.actions import BLOCK, Call
from tests.simulation.checks_answers import Caller
from tests.simulation.checks_part import Part
from tests.simulation.conversations import comparable
from tests.simulation.device import Oracle, SecondLayer, Weights, tokenizer
from tests.simulation.excuses import HARMLESS_TO_STORE
from tests.simulation.pictures import PICTURES, mark, name_of_file, numbers_of

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.worker import SimulatedWorker

PAUSED_SECONDS = 10.0  # after which a step that was under way has ended
DURABLE_SECONDS = 5.0  # after its end, a request's blocks are stored, even on a slow disk


@dataclass
class Asked:
    """A request, from its first command to its end, across restarts of its worker."""

    request: SequenceRequest
    weights: Weights
    prompt: str  # the text, as `comparable` returns it
    seen: list[int]  # the prompt's tokens, with what the model sees in place of those of images
    sent_at: float  # first
    answer: list[int] | None = None  # the oracle's, computed when it is first needed
    sendings: int = 0

    def right(self) -> list[int]:
        """All tokens of the right answer."""
        if self.answer is None:
            request = self.request
            self.answer = Oracle(self.weights).answer(
                self.seen, max_tokens=request.max_tokens, grammar=request.grammar
            )
        return self.answer


@dataclass
class _OnLink:
    """A request that was sent on one link. sent_at: when."""

    asked: Asked
    tokens: int  # of the answer, sent with the request or received from the worker
    sent_at: float = 0.0
    is_accepted: bool = False
    is_cancelled: bool = False
    paused_at: float = math.inf  # when the front has paused it; infinite: it has not


@dataclass(frozen=True)
class _Read:
    """The tokens that a request has left in the cache: of its prompt and its answer. The keys and
    values of the last one may not have been computed.
    """

    tokens: np.ndarray[Any, Any]
    prompt_tokens: int
    ended_at: float

    def reusable(
        self,
        prompt: np.ndarray[Any, Any],
        second: SecondLayer,
        *,
        is_quantized: bool,
        drafts: bool,
    ) -> int:
        """How many tokens of a later prompt must come from the cache. The last one is always
        computed. drafts: whether drafted tokens may be verified.
        """
        end = len(self.tokens)
        most = min(end, len(prompt) - 1)
        different = np.flatnonzero(self.tokens[:most] != prompt[:most])
        common = int(different[0]) if len(different) else most
        if second == "none":
            computed = min(common, end - 1)  # the last token of an answer is not read
            # a quantized block cannot be reused by a prompt that differs within it
            return computed - computed % BLOCK if is_quantized else computed
        # checkpoints: at the end of the answer, and before the last token of the prompt
        if common == end:
            # a recurrent state cannot go back: it lacks the last step if a drafted token was refused
            return end - 1 - (MOST_DRAFTED if second == "recurrent" and drafts else 0)
        return self.prompt_tokens - 1 if common >= self.prompt_tokens - 1 else 0

    def fills_block_at(self, position: int, of: _Read) -> bool:
        """Whether this request has filled the block that contains a position, and of which it shares
        the first token with another request, before that one has ended.
        """
        start = position - position % BLOCK
        return (
            position > start
            and len(self.tokens) > start + BLOCK
            and self.ended_at <= of.ended_at
            and np.array_equal(self.tokens[: start + 1], of.tokens[: start + 1])
        )


@dataclass
class _Life:
    """The requests on one link to a worker."""

    worker: SimulatedWorker | None = None

    def weights(self, request: SequenceRequest) -> Weights:
        """The worker's weights, with the request's adapter."""
        return self.worker.weights.with_adapter(request.adapter) if self.worker else Weights()

    open: dict[str, _OnLink] = field(default_factory=dict)
    # by id: requests that were cancelled and sent again before they had ended
    cancelled: dict[str, list[_OnLink]] = field(default_factory=lambda: defaultdict(list))

    def on(self, request_id: str) -> _OnLink | None:
        """The request to which the worker's next event with this id belongs."""
        earlier = self.cancelled[request_id]
        return earlier[0] if earlier else self.open.get(request_id)

    def end(self, request_id: str) -> None:
        """The worker has ended the request."""
        earlier = self.cancelled[request_id]
        if earlier:
            earlier.pop(0)
        else:
            del self.open[request_id]


class LinkChecks(Part):
    """Checks the commands and events on all links."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self.asked: dict[str, Asked] = {}
        self.lives: dict[WorkerLink, _Life] = defaultdict(_Life)
        # by cache (weights and tenant): the hashes of all prefixes that were computed for it
        self._computed: dict[tuple[Weights, str], set[int]] = defaultdict(set)
        # by weights, tenant, and form of keys and values
        self._reads: dict[tuple[Weights, str, str], list[_Read]] = defaultdict(list)
        self.pictures: dict[
            int, tuple[int, str]
        ] = {}  # by image key: the token, and of which picture
        self._owners: dict[str, str] = {}  # the tenant of each image
        self._read_tokens = 0  # of all requests
        self.work_seconds = 0.0  # that the device needs for all requests, one after the other
        # by the tenant's name in workers: the callers whose tenant it may be
        self._tenants: dict[str, set[Caller]] = {}
        # by model, name and tenant of a session: when the first request that named it ended
        self.sessions: dict[tuple[str, str, str], float] = {}
        self.closed: dict[tuple[str, str, str], float] = {}  # when each session was closed

    def sent(self, link: WorkerLink, command: SequenceRequest) -> None:
        """The front sends a request to a worker."""
        request_id = command.request_id
        life = self.lives[link]
        if life.worker is None:
            life.worker = self._worker_of(link)
        weights = life.weights(command)
        asked = self.asked.get(request_id)
        if asked is None or asked.request.prompt_token_ids != command.prompt_token_ids:
            text, seen = self._read(command, weights)
            asked = self.asked[request_id] = Asked(
                command, weights, comparable(text), seen, sent_at=self.world.now
            )
            if not command.is_idle_work:
                self._check_prompt(asked)
        asked.sendings += 1
        self.work_seconds += self._work_seconds(command)
        given = list(command.generated_token_ids)
        if given != asked.right()[: len(given)] and asked.weights == weights:
            self._violation("the oracle's tokens", f"{request_id} goes on after wrong tokens")
        if request_id in life.open:
            life.cancelled[request_id].append(life.open[request_id])
        life.open[request_id] = _OnLink(asked, len(given), self.world.now)

    def _read(self, command: SequenceRequest, weights: Weights) -> tuple[str, list[int]]:
        """The text of a prompt, with marks in place of images; and its tokens, with what the model must
        see in place of those of images.
        """
        tokens = list(command.prompt_token_ids)
        text, seen, done = "", list(tokens), 0
        for span in command.images:
            self._check_image(command, span.layout.image)
            name = name_of_file(span.layout.image)
            picture = PICTURES[name]
            numbers = numbers_of(picture.pixels, span.end - span.start, weights.name)
            if span.end - span.start != picture.tokens:
                self._violation("the prompt", f"{name} has {span.end - span.start} tokens")
            text += _decoded(tokens[done : span.start]) + mark(name)
            seen[span.start : span.end] = numbers
            done = span.end
            keys = tokens[span.start : span.end]
            self.pictures.update(zip(keys, enumerate(itertools.repeat(name)), strict=False))
        return text + _decoded(tokens[done:]), seen

    def seen(self, tokens: list[int], weights: Weights) -> list[int]:
        """Tokens with what a model sees in place of image keys."""
        found = list(tokens)
        for at, token in enumerate(tokens):
            if token in self.pictures:
                place, name = self.pictures[token]
                picture = PICTURES[name]
                found[at] = numbers_of(picture.pixels, picture.tokens, weights.name)[place]
        return found

    def _check_image(self, command: SequenceRequest, image: str) -> None:
        """No two tenants share an image."""
        owner = self._owners.setdefault(image, command.tenant)
        if owner != command.tenant:
            self._violation("tenants are apart", f"{command.request_id} has an image of {owner!r}")

    def controlled(self, link: WorkerLink, command: SequenceControl | WorkerControl) -> None:
        """The front pauses, resumes or cancels a request, or shuts a worker down, which no request may
        use then.
        """
        life = self.lives[link]
        if isinstance(command, SequenceControl):
            if (on := life.open.get(command.request_id)) is not None:
                on.is_cancelled |= command.action == "cancel"
                on.paused_at = self.world.now if command.action == "pause" else math.inf
        elif command.action == "shut_down" and self.simulation.front.is_running:
            in_use = [
                name
                for name, on in life.open.items()
                if not on.is_cancelled and not on.asked.request.is_idle_work
            ]
            if in_use:
                self._violation(
                    "no needless kill", f"a worker is shut down during {', '.join(in_use)}"
                )

    def _check_paused(self, on: _OnLink, event: TokensGenerated) -> None:
        """A request whose client does not read gets no tokens, so that they do not pile up."""
        seconds = self.world.now - on.paused_at
        if seconds > PAUSED_SECONDS and not self.checks.excuses.any_since(on.paused_at - 60.0):
            self._violation(
                "bytes", f"{event.request_id} gets tokens {seconds:.0f} s after it was paused"
            )

    def _work_seconds(self, request: SequenceRequest) -> float:
        """The longest time that the device needs for a request that runs alone."""
        costs = self.simulation.machine.costs
        prompt_tokens = len(request.prompt_token_ids)
        chunks = 1 + prompt_tokens // min(64, self.simulation.options["step_tokens"])
        steps = chunks + request.max_tokens
        of_steps = steps * (costs.step_seconds + costs.row_seconds)
        return 1.25 * (of_steps + (prompt_tokens + request.max_tokens) * costs.token_seconds)

    def _check_prompt(self, asked: Asked) -> None:
        """The prompt is one that an agent has sent, and the tenant is the agent's."""
        command, text = asked.request, asked.prompt
        turns = self.checks.answers.turns.get(text)
        if turns is None:
            same, likest = max(
                (_common_length(each, text), each) for each in self.checks.answers.turns
            )
            self._violation(
                "the prompt",
                f"{command.request_id} goes on with {text[same : same + 60]!r} after {same} "
                f"characters, not with {likest[same : same + 60]!r}",
            )
            return
        tenants = {self.checks.answers.caller(turn) for turn in turns}
        known = self._tenants.setdefault(command.tenant, tenants)
        known &= tenants
        if not known:
            self._violation(
                "tenants are apart", f"{command.request_id} has the tenant of another agent"
            )

    def came(self, link: WorkerLink, events: list[Any]) -> None:
        """Events of a worker have arrived."""
        life = self.lives[link]
        for event in events:
            request_id = getattr(event, "request_id", None)
            if request_id is None or not isinstance(
                event, Accepted | Rejected | PrefillFinished | TokensGenerated | Finished
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
                case PrefillFinished():
                    self._check_cached(life, on, event.cache_report.cached_tokens)
                    self._check_read_once(life, on, event.cache_report.cached_tokens)
                    self.started(event)
                case TokensGenerated():
                    self._check_paused(on, event)
                    self._check_tokens(life, on, event)
                case Finished():
                    self._check_end(life, on, event)
                    life.end(request_id)

    def _check_queue_full(self, life: _Life, event: Rejected) -> None:
        """A worker may refuse a request for its full queue only if the queue is full."""
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
        """A request has ended by itself: later ones must be able to reuse its tokens."""
        if not request.is_kept or request.is_idle_work:
            return
        if request.session_id and life.worker is not None and life.worker.cache is not None:
            tenant = life.worker.cache.fingerprints.cache_tenant(request)
            named = (life.worker.name, request.session_id, tenant)
            self.sessions.setdefault(named, self.world.now)
        tokens = np.array([*request.prompt_token_ids, *answer])
        self._reads_of(life, request).append(
            _Read(tokens, len(request.prompt_token_ids), self.world.now)
        )

    def _check_read_once(self, life: _Life, on: _OnLink, cached_tokens: int) -> None:
        """No token of a prefix that an earlier request has computed is computed again."""
        request = on.asked.request
        if not self._is_calm():
            return
        prompt = np.array([*request.prompt_token_ids])
        options = self.simulation.options
        reads = self._reads_of(life, request)
        is_quantized = self._form_of(request) != "native"
        right = 0
        for each in reads:
            if not self._is_kept(each, request, on.sent_at):
                continue
            tokens = each.reusable(
                prompt,
                options["second_layer"],
                is_quantized=is_quantized,
                drafts=options["repeats"] or options["has_draft_model"],
            )
            # no sequence can continue within a block that another one has stored quantized
            if is_quantized and any(other.fills_block_at(tokens, each) for other in reads):
                continue
            right = max(right, tokens)
        if cached_tokens < right:
            self._violation(
                "a token is read once",
                f"{request.request_id} has {cached_tokens} cached tokens of {len(prompt)}, but an "
                f"earlier request has {right} of them",
            )

    def _is_calm(self) -> bool:
        """Whether nothing has gone wrong after which something that was computed may be lost."""
        options = self.simulation.options
        forgets = any(
            isinstance(each, Call) and "forget" in each.path
            for each in self.simulation.scenario.actions
        )
        is_calm = all(kind in HARMLESS_TO_STORE for kind, _, _ in self.checks.excuses.all)
        return not forgets and is_calm and "failing" not in options

    def _is_kept(self, read: _Read, request: SequenceRequest, at: float) -> bool:
        """Whether what a request has computed must still be there for another one at this time: in
        memory, if there is enough, or in the store.
        """
        options = self.simulation.options
        if options["store_bytes"] is not None:
            return False
        lives = self.simulation.machine.ended_at
        lost_at = next((end for end in lives if end >= read.ended_at), math.inf)
        is_roomy = self._read_tokens * 4 < options["kv_tokens"] and options["ram_tokens"] is None
        is_in_memory = is_roomy and read.ended_at < at < lost_at
        # with little memory, the form of what was stored depends on how much there was
        has_form = is_roomy or (request.kv_bits or options["kv_bits"]) != "auto"
        is_stored = options["has_store"] and read.ended_at + DURABLE_SECONDS < min(at, lost_at)
        return is_in_memory or (is_stored and has_form)

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

    def _cache_of(self, life: _Life, asked: Asked) -> tuple[Weights, str]:
        return life.weights(asked.request), asked.request.tenant

    def _remember(self, life: _Life, on: _OnLink) -> None:
        """Note that the tokens of a request have been computed: others may reuse them."""
        tokens = [*on.asked.request.prompt_token_ids, *on.asked.right()[: on.tokens]]
        self._read_tokens += len(tokens)
        self._computed[self._cache_of(life, on.asked)].update(_prefix_hashes(tokens))

    def _check_cached(self, life: _Life, on: _OnLink, cached_tokens: int) -> None:
        """Cached tokens were computed before, for the same tenant and weights."""
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
        everywhere = [each for each in self.lives.values() if each is not life]
        for each in everywhere:
            for other in each.open.values():
                if self._cache_of(each, other.asked) == self._cache_of(life, on.asked):
                    known = known | _prefix_hashes(
                        [
                            *other.asked.request.prompt_token_ids,
                            *other.asked.right()[: other.tokens],
                        ]
                    )
        # a request that was sent again may also reuse its earlier tokens
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

    def commanded(self, link: WorkerLink, command: Any) -> None:
        """The front sends a worker a command that names a session."""
        worker = self._worker_of(link)
        if worker is None or worker.cache is None:
            return
        model = worker.name
        tenant = worker.cache.fingerprints.cache_tenant(command)
        if isinstance(command, SessionCommand) and command.operation == "close":
            self.closed[model, tenant, command.session_id] = self.world.now
            return
        self.closed.pop((model, tenant, command.session_id), None)
        if isinstance(command, SessionCommand):
            self.closed.pop((model, tenant, command.new_session_id), None)

    def started(self, event: PrefillFinished) -> None:
        """Count from which tiers of the cache a request starts."""
        memory = event.cache_report
        names = ("moved_tokens", "shared_tokens", "ram_tokens", "disk_tokens")
        sources = [name for name in names if getattr(memory, name, 0)]
        second = self.simulation.options["second_layer"]
        self.checks.states.add((f"start with {second}", f"starts from {' '.join(sources)}"))

    def check_rest(self) -> None:
        """No agent waits any more, so no request may be open."""
        for link, life in self.lives.items():
            worker = life.worker
            if worker is not None and not worker.process.is_dead and link.is_open and life.open:
                self._violation("ends exactly once", f"these never end: {', '.join(life.open)}")


def _decoded(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=False)


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
