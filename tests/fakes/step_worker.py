"""A worker without a device: carries out the scheduler's decisions, and checks everything that a
device would reject.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.config import SchedulerSettings
from holdfast.wire.events import WaitReason
from holdfast.wire.requests import ServiceClass
from holdfast.worker.engine.plan import NO_DRAFT, Draft, Span, StepPlan
from holdfast.worker.scheduler.chunking import PATIENCE_STEPS
from holdfast.worker.scheduler.cost_model import CostModel, StepLoad
from holdfast.worker.scheduler.scheduler import Decision, Scheduler, StepOutcome
from holdfast.worker.scheduler.sequence import DEFAULT_SERVICE, ScheduledSequence, SequenceCosts

SecondsOf = Callable[[StepLoad], float]
StopsAt = Callable[
    [str, int], bool
]  # (request id, tokens generated_tokens) -> a stop token was generated_tokens


@dataclass(eq=False)
class Served:
    """One request as the worker sees it."""

    request_id: str
    order: int
    prompt_tokens: int
    max_tokens: int
    scores_prompt: bool = False
    service: ServiceClass = DEFAULT_SERVICE
    costs: SequenceCosts | None = None  # different from the worker's
    scheduled: ScheduledSequence | None = None
    generated_tokens: int = 0
    cached: int = 0
    runs: bool = False
    known: int = 0
    position: int = 0
    planned_answer_tokens: int = 0
    capacity: int = 0
    touched_by: int = -1  # index of the last plan with a span for it
    idle_steps: int = 0
    is_paused: bool = False
    is_ready: bool = True
    lives: int = 0  # how often it was restarted
    steps_to_first_token: int = 0
    is_verifying: bool = False  # a running step has drafted tokens for it
    repeated: int = 0  # tokens of an earlier span with which the next one must begin
    ends: list[str] = field(default_factory=list)


@dataclass
class UnderWay:
    """A dispatched plan, with the requests of its spans at that time."""

    index: int
    plan: StepPlan
    load: StepLoad
    served: tuple[Served, ...]
    lives: tuple[int, ...]
    verifying: frozenset[str]  # requests with drafted tokens in it


def submit(
    scheduler: Scheduler,
    request_id: str,
    *,
    prompt_tokens: int,
    max_tokens: int,
    costs: SequenceCosts | None = None,
    **more: Any,
) -> ScheduledSequence:
    """Put a request into a scheduler's queue."""
    sequence = ScheduledSequence(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        costs=costs or scheduler.usual_costs,
        **more,
    )
    scheduler.submit(sequence)
    return sequence


def device_seconds(load: StepLoad) -> float:
    """A machine whose true costs are known to the tests."""
    seconds = 0.010 + 0.001 * load.decode_rows if load.decode_rows or load.chunks else 0.0
    return seconds + 0.0005 * load.chunk_tokens + 1e-7 * load.position_sum


class StepWorker:
    """Runs a scheduler with a pipelining depth.

    Steps take `seconds_of` them, and sequences stop when `stops_at` says so.
    """

    def __init__(
        self,
        *,
        settings: SchedulerSettings | None = None,
        costs: SequenceCosts | None = None,
        budget_bytes: int = 10**9,
        context_tokens: int = 10**6,
        mixes_chunks: bool = True,
        depth: int = 0,
    ) -> None:
        settings = settings or SchedulerSettings()
        # 0: the worker decides
        self.settings = replace(settings, step_tokens=settings.step_tokens or 2048)
        self.costs = costs or SequenceCosts(
            kv_bytes_per_token=10, fixed_bytes_per_sequence=0, reserve_step_tokens=16
        )
        self.depth = depth
        self.wanted_budget_bytes = budget_bytes
        # above the budget in force only memory held when it shrank
        self.allowed_bytes = budget_bytes
        self.scheduler = Scheduler(
            self.settings,
            self.costs,
            budget_bytes=budget_bytes,
            context_tokens=context_tokens,
            mixes_chunks=mixes_chunks,
        )
        self.model = CostModel(
            mixes_chunks=mixes_chunks, min_chunk_tokens=self.settings.min_chunk_tokens
        )
        self.live: dict[str, Served] = {}
        self.ended: list[Served] = []
        self.under_way: deque[UnderWay] = deque()
        self.leaving: list[tuple[int, int]] = []  # (plan index, bytes)
        self.plans: list[StepPlan] = []
        self.step_seconds: list[float] = []
        self.preempted: list[str] = []
        self.growths = 0
        self.seconds_of: SecondsOf = device_seconds
        self.stops_at: StopsAt = lambda request_id, generated_tokens: False
        # the offer for a request in each step, and how many of n drafted tokens are right
        self.offer: Callable[[str], Draft] = lambda request_id: NO_DRAFT
        self.right: Callable[[str, int], int] = lambda request_id, drafted: 0
        # whether a request's accepted tokens are computed again when others are rejected
        self.repeats: Callable[[str], bool] = lambda request_id: False
        self._orders = 0

    def submit(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        scores_prompt: bool = False,
        service: ServiceClass = DEFAULT_SERVICE,
    ) -> Served:
        scheduled = submit(
            self.scheduler,
            request_id,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            scores_prompt=scores_prompt,
            service=service,
        )
        self._orders += 1
        self.live[request_id] = Served(
            request_id, self._orders, prompt_tokens, max_tokens, scores_prompt, service
        )
        self.live[request_id].scheduled = scheduled
        return self.live[request_id]

    def set_limits(self, *, max_running: int, step_tokens: int) -> None:
        self.scheduler.set_limits(max_running=max_running, step_tokens=step_tokens)
        self.settings = replace(self.settings, max_running=max_running, step_tokens=step_tokens)
        self.scheduler.check_invariants()

    def set_budget(self, nbytes: int) -> None:
        self.wanted_budget_bytes = nbytes
        self.scheduler.set_budget(nbytes)
        self._follow_budget()
        self.scheduler.check_invariants()

    def set_critical(self, is_critical: bool) -> None:
        """The system is critically short of memory: one request at a time."""
        self.scheduler.admits_one_at_a_time = is_critical

    @property
    def budget_bytes(self) -> int:
        """The budget in force: the wanted one, but at least enough for each accepted request alone."""
        needs = [self._final_bytes(served) for served in self.live.values()]
        return max(self.wanted_budget_bytes, *needs, 0)

    @property
    def held_bytes(self) -> int:
        """Of running requests and those that pending steps still touch."""
        running = sum(
            self.bytes_of(served.capacity, served.costs)
            for served in self.live.values()
            if served.runs
        )
        return running + sum(nbytes for _, nbytes in self.leaving)

    def cancel(self, request_id: str) -> None:
        known = request_id in self.live
        assert self.scheduler.cancel(request_id) == known
        if known:
            self._end(self.live[request_id], "cancelled")

    def pause(self, request_id: str) -> None:
        self.scheduler.pause(request_id)
        if request_id in self.live:
            self.live[request_id].is_paused = True
        self.scheduler.check_invariants()

    def resume(self, request_id: str) -> None:
        self.scheduler.resume(request_id)
        served = self.live.get(request_id)
        if served is not None and served.is_paused:
            served.is_paused = False
            if not served.runs:
                self._orders += 1
                served.order = self._orders
            if not served.is_ready:
                self.scheduled(request_id).waits_for = WaitReason.DISK
        self.scheduler.check_invariants()

    def restart(self, request_id: str) -> None:
        """Its state is invalid: pending spans do not count."""
        served = self.live[request_id]
        self.scheduler.restart(request_id)
        self._orders += 1
        served.order, served.lives, served.cached, served.is_ready = (
            self._orders,
            served.lives + 1,
            0,
            True,
        )
        if served.runs:
            self._close(served)

    def hold_back(self, request_id: str) -> None:
        """Its prefix is not available yet."""
        served = self.live.get(request_id)
        if served is not None and not served.runs:
            if not served.is_paused:
                self.scheduled(request_id).waits_for = WaitReason.DISK
            served.is_ready = False

    def make_ready(self, request_id: str, cached_tokens: int) -> None:
        served = self.live.get(request_id)
        if served is not None and not served.runs:
            served.cached = min(cached_tokens, served.prompt_tokens + served.generated_tokens - 1)
            scheduled = self.scheduled(request_id)
            scheduled.start_after(served.cached)
            if not served.is_paused:
                scheduled.waits_for = None
            served.is_ready = True

    def scheduled(self, request_id: str) -> ScheduledSequence:
        scheduled = self.live[request_id].scheduled
        assert scheduled is not None
        return scheduled

    def save(self, costs: SequenceCosts) -> list[str]:
        """Give these costs to waiting requests while they do not all fit."""
        saved: list[str] = []

        def may_quantize(request_id: str) -> bool:
            return self.live[request_id].costs is None

        while request_id := self.scheduler.next_to_quantize(costs, may_quantize=may_quantize):
            served = self.live[request_id]
            assert not served.runs
            assert not served.is_paused
            assert served.is_ready
            before = self._final_bytes(served)
            self.scheduled(request_id).costs = costs
            served.costs = costs
            assert self._final_bytes(served) < before, "nothing is saved"
            saved.append(request_id)
        self._follow_budget()
        self.scheduler.check_invariants()
        return saved

    def step(self) -> Decision:
        """One iteration of the worker's loop."""
        offers = {name: offer for name in self.live if (offer := self.offer(name)).chances}
        decision = self.scheduler.next_step(offers)
        if decision.admitted or decision.grown:
            assert not self.scheduler.excess_bytes, "more is reserved than the budget allows"
        self._carry_out(decision)
        if not decision.plan.spans and not self.under_way:
            stuck = [
                served
                for served in self.live.values()
                if not served.is_paused and (served.runs or served.is_ready)
            ]
            assert not stuck, "the scheduler sits still although there is work"
        while len(self.under_way) > (self.depth if decision.plan.spans else 0):
            self._observe()
        self.scheduler.check_invariants()
        return decision

    def read_all_prompts(self) -> None:
        while self.scheduler.statistics().prefilling or self.scheduler.statistics().queued:
            self.step()

    def read_all_prompts_but(self, request_id: str) -> None:
        """Until only unready requests wait."""
        while self.scheduler.statistics().prefilling or self.scheduler.statistics().queued > 1:
            self.step()
        assert not self.live[request_id].is_ready

    def run_to_end(self, *, most_steps: int = 20_000) -> None:
        for request_id in list(self.live):
            self.resume(request_id)
            if not self.live[request_id].is_ready:
                self.make_ready(request_id, 0)
        for _ in range(most_steps):
            if not self.live and not self.under_way:
                break
            self.step()
        assert not self.live, "requests never end"
        assert self.scheduler.statistics().reserved_bytes == 0
        assert self.step().plan == StepPlan()

    def bytes_of(self, capacity: int, costs: SequenceCosts | None = None) -> int:
        return (costs or self.costs).bytes_for(capacity)

    def _final_bytes(self, served: Served) -> int:
        tokens = served.prompt_tokens + served.max_tokens
        step = self.costs.reserve_step_tokens
        return self.bytes_of(-(-tokens // step) * step, served.costs)

    def _follow_budget(self) -> None:
        """A shrinking budget takes nothing away, but returned memory is not taken again."""
        self.allowed_bytes = max(self.budget_bytes, min(self.allowed_bytes, self.held_bytes))

    def _carry_out(self, decision: Decision) -> None:
        budget_bytes = self.budget_bytes
        for request_id in decision.preempted:
            self.preempted.append(request_id)
            self.live[request_id].cached = 0
            self._close(self.live[request_id])
        for request_id in decision.grown:
            grown = self.live[request_id]
            capacity_tokens = self.scheduled(request_id).capacity_tokens
            assert grown.runs
            assert capacity_tokens > grown.capacity
            grown.capacity = capacity_tokens
            self.growths += 1
        for request_id in decision.admitted:
            served = self.live[request_id]
            assert not served.runs
            assert not served.is_paused, "nobody would read what it says"
            assert served.is_ready, "what it begins from is not at hand"
            alike = [other for other in self.live.values() if other.service == served.service]
            waiting = [
                other
                for other in alike
                if not other.runs and not other.is_paused and other.is_ready
            ]
            assert all(served.order <= other.order for other in waiting), "overtaken in the queue"
            served.runs, served.known = True, served.prompt_tokens + served.generated_tokens
            served.capacity = self.scheduled(request_id).capacity_tokens
            served.position, served.planned_answer_tokens, served.idle_steps = (
                served.cached,
                served.generated_tokens,
                0,
            )
            served.is_verifying = False
            served.repeated = 0
        if decision.admitted:
            assert self.held_bytes <= budget_bytes, "admitted beyond the budget in force"
            unpaused = sum(served.runs and not served.is_paused for served in self.live.values())
            assert unpaused == 1 or not self.scheduler.admits_one_at_a_time, (
                "more than one under critical memory pressure"
            )
        self._check_memory()
        if decision.plan.spans:
            self._dispatch(decision.plan)

    def _dispatch(self, plan: StepPlan) -> None:
        assert len({span.request_id for span in plan.spans}) == len(plan.spans), (
            "a sequence twice in a plan"
        )
        assert sum(span.tokens for span in plan.spans) <= self.settings.step_tokens
        self.plans.append(plan)
        served = tuple(self.live[span.request_id] for span in plan.spans)
        chunks = [
            span for span, each in zip(plan.spans, served, strict=True) if span.start < each.known
        ]
        scoring = {each.request_id for each in served if each.scores_prompt}
        load = StepLoad(
            decode_rows=len(plan.spans) - len(chunks),
            chunks=len(chunks),
            chunk_tokens=sum(span.tokens for span in chunks),
            position_sum=sum(span.tokens * (span.start + span.tokens / 2) for span in chunks),
            scored_tokens=sum(span.tokens for span in chunks if span.request_id in scoring),
            drafted_rows=sum(span.tokens - 1 for span in plan.spans if span not in chunks),
        )
        self._check_stall(load, chunks)
        for span, each in zip(plan.spans, served, strict=True):
            self._check_span(span, each)
        self._check_progress(served)
        lives = tuple(each.lives for each in served)
        verifying = frozenset(each.request_id for each in served if each.is_verifying)
        self.under_way.append(UnderWay(len(self.plans) - 1, plan, load, served, lives, verifying))

    def _check_span(self, span: Span, served: Served) -> None:
        assert served.runs
        assert not served.is_paused, "nobody reads what it says"
        assert span.start == served.position, (
            "positions are to be read one after the other, each once"
        )
        assert span.tokens >= 1
        end = served.position = span.start + span.tokens
        assert end <= served.capacity, "more than there is room for"
        if span.start < served.known:
            assert end <= served.known
            assert span.samples == (end == served.known and served.max_tokens > 0)
            served.planned_answer_tokens += span.samples
        else:
            assert span.samples
            assert not served.is_verifying, "what it begins with is not known"
            drafted = span.tokens - 1 - served.repeated
            offered = self.offer(span.request_id)
            assert 0 <= drafted <= len(offered.token_ids)
            assert span.draft == offered.cut(drafted), "it verifies other tokens than were offered"
            assert not (drafted and served.repeated), "repeats and verifies at once"
            under_way = {span.request_id for each in self.under_way for span in each.plan.spans}
            assert not drafted or span.request_id not in under_way, "verifies too early"
            served.is_verifying = drafted > 0
            served.planned_answer_tokens += 1 + drafted
            served.repeated = 0
        assert served.planned_answer_tokens <= served.max_tokens
        served.touched_by = len(self.plans) - 1

    def _check_progress(self, planned: tuple[Served, ...]) -> None:
        bound = PATIENCE_STEPS + 2 * self.settings.max_running + 4
        for served in self.live.values():
            served.steps_to_first_token += not served.planned_answer_tokens
            if (
                not served.runs
                or served.is_paused
                or served.position >= served.known
                or served in planned
            ):
                served.idle_steps = 0
            else:
                served.idle_steps += 1
                assert served.idle_steps <= bound, "an admitted prompt starves"

    def _check_stall(self, load: StepLoad, chunks: list[Span]) -> None:
        if load.decode_rows and load.chunk_tokens > self.settings.min_chunk_tokens:
            added = sum(
                self.model.seconds_per_chunk()
                + self.model.more_chunk_seconds(span.start, span.tokens)
                for span in chunks
            )
            assert added <= self.settings.stall_seconds * (1 + 1e-9), (
                "decoding streams are held up too long"
            )

    def _check_memory(self) -> None:
        assert self.held_bytes <= self.allowed_bytes, "memory is over-committed"
        assert self.scheduler.statistics().budget_bytes == self.budget_bytes

    def _observe(self) -> None:
        step = self.under_way.popleft()
        generated_tokens: dict[str, int] = {}
        repeated: dict[str, int] = {}
        stopped: list[str] = []
        for span, served, life in zip(step.plan.spans, step.served, step.lives, strict=True):
            tokens = 1
            if span.request_id in step.verifying:
                tokens += min(span.tokens - 1, self.right(span.request_id, span.tokens - 1))
            if span.samples:
                generated_tokens[span.request_id] = tokens  # also for those that have ended since
            if self.live.get(served.request_id) is served and served.lives == life and span.samples:
                served.generated_tokens += tokens
                if served.is_verifying and served.runs:
                    served.is_verifying = False
                    served.position -= span.tokens - tokens
                    served.planned_answer_tokens -= span.tokens - tokens
                    if tokens < span.tokens and self.repeats(span.request_id):
                        repeated[span.request_id] = served.repeated = tokens
                        served.position -= tokens
                if self.stops_at(served.request_id, served.generated_tokens):
                    stopped.append(served.request_id)
        seconds = self.seconds_of(step.load)
        self.step_seconds.append(seconds)
        self.model.learn(step.load, seconds)
        for request_id in stopped:
            self._end(self.live[request_id], "stopped")
        outcome = StepOutcome(
            plan=step.plan,
            generated_tokens=generated_tokens,
            ended=tuple(stopped),
            seconds=seconds,
            repeated=repeated,
        )
        for request_id in self.scheduler.record_step(outcome):
            served = self.live[request_id]
            assert served.generated_tokens == served.max_tokens
            self._end(served, "length")
        self.leaving = [(index, held) for index, held in self.leaving if index > step.index]
        self._follow_budget()

    def _end(self, served: Served, reason: str) -> None:
        served.ends.append(reason)
        assert len(served.ends) == 1, "a request ends once"
        if served.runs:
            self._close(served)
        del self.live[served.request_id]
        self.ended.append(served)
        self._follow_budget()

    def _close(self, served: Served) -> None:
        assert served.runs
        served.runs = False
        if self.under_way and served.touched_by >= self.under_way[0].index:
            self.leaving.append((served.touched_by, self.bytes_of(served.capacity, served.costs)))
