"""The scheduler under random requests, pauses, memory budgets and steps; StepWorker asserts what
must hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.config import SchedulerSettings
from holdfast.errors import PromptTooLong, QueueFull, TooLargeForMemory
from holdfast.wire.requests import ServiceClass
from holdfast.worker.engine.plan import NO_DRAFT, Draft
from holdfast.worker.scheduler.cost_model import StepLoad
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.step_worker import StepWorker, device_seconds

BUDGET_TOKENS = 96
services = st.builds(
    ServiceClass,
    flow=st.sampled_from(["", "", "one", "other"]),
    priority=st.sampled_from(["interactive", "interactive", "batch"]),
)
CONTEXT_TOKENS = 90


@st.composite
def scheduler_settings(draw: st.DrawFn) -> SchedulerSettings:
    step_tokens = draw(st.integers(1, 40))
    return SchedulerSettings(
        max_running=draw(st.sampled_from([1, 3, 6])),
        max_queued=draw(st.integers(0, 6)),
        step_tokens=step_tokens,
        stall_seconds=draw(st.sampled_from([0.0001, 0.004, 0.02, 1.0])),
        min_chunk_tokens=draw(st.integers(1, min(step_tokens, 8))),
        expected_output_tokens=draw(st.sampled_from([1, 2, 4, 16])),
        aging_seconds=draw(st.sampled_from([0.0, 0.1, 60.0])),
    )


class SchedulerStates(RuleBasedStateMachine):
    @initialize(
        settings=scheduler_settings(),
        depth=st.sampled_from([0, 1, 1, 2]),
        fixed_bytes=st.sampled_from([0, 33]),
        reserve_step=st.sampled_from([1, 4, 16]),
        mixes_chunks=st.booleans(),
    )
    def start(
        self,
        settings: SchedulerSettings,
        depth: int,
        fixed_bytes: int,
        reserve_step: int,
        mixes_chunks: bool,
    ) -> None:
        self.worker = StepWorker(
            settings=settings,
            costs=SequenceCosts(
                kv_bytes_per_token=10,
                fixed_bytes_per_sequence=fixed_bytes,
                reserve_step_tokens=reserve_step,
            ),
            budget_bytes=BUDGET_TOKENS * 10,
            context_tokens=CONTEXT_TOKENS,
            mixes_chunks=mixes_chunks,
            depth=depth,
        )

    @rule(
        name=st.sampled_from("abcdefghij"),
        prompt_tokens=st.one_of(st.integers(1, 12), st.integers(1, 100)),
        max_tokens=st.one_of(st.integers(0, 6), st.integers(20, 80)),
        service=services,
    )
    def submit(self, name: str, prompt_tokens: int, max_tokens: int, service: ServiceClass) -> None:
        if name in self.worker.live:
            return
        waiting = sum(1 for served in self.worker.live.values() if not served.runs)
        try:
            served = self.worker.submit(
                name, prompt_tokens=prompt_tokens, max_tokens=max_tokens, service=service
            )
        except TooLargeForMemory as error:
            assert error.needed_bytes > self.worker.budget_bytes
        except PromptTooLong:
            assert prompt_tokens + min(max_tokens, 1) > CONTEXT_TOKENS
        except QueueFull as error:
            assert waiting >= self.worker.settings.max_queued
            assert 1.0 <= error.retry_after_seconds <= 60.0
        else:
            served.max_tokens = min(max_tokens, CONTEXT_TOKENS - prompt_tokens)

    @rule(max_running=st.integers(1, 8), step_tokens=st.integers(8, 40))
    def set_limits(self, max_running: int, step_tokens: int) -> None:
        self.worker.set_limits(max_running=max_running, step_tokens=step_tokens)

    @rule(tokens=st.sampled_from([0, 16, BUDGET_TOKENS // 2, BUDGET_TOKENS, 2 * BUDGET_TOKENS]))
    def set_budget(self, tokens: int) -> None:
        self.worker.set_budget(tokens * 10)

    @rule(is_critical=st.booleans())
    def set_critical(self, is_critical: bool) -> None:
        self.worker.set_critical(is_critical)

    @rule(fixed_bytes=st.sampled_from([0, 50, 300]))
    def save(self, fixed_bytes: int) -> None:
        costs = self.worker.costs
        self.worker.save(
            replace(
                costs,
                kv_bytes_per_token=3,
                fixed_bytes_per_sequence=costs.fixed_bytes_per_sequence + fixed_bytes,
            )
        )

    @rule(name=st.sampled_from("abcdefghij"))
    def cancel(self, name: str) -> None:
        self.worker.cancel(name)

    @rule(name=st.sampled_from("abcdefghij"), is_paused=st.booleans())
    def pause_or_resume(self, name: str, is_paused: bool) -> None:
        if is_paused:
            self.worker.pause(name)
        else:
            self.worker.resume(name)

    @rule(
        name=st.sampled_from("abcdefghij"), cached_tokens=st.one_of(st.none(), st.integers(0, 40))
    )
    def look_up(self, name: str, cached_tokens: int | None) -> None:
        if cached_tokens is None:
            self.worker.hold_back(name)
        else:
            self.worker.make_ready(name, cached_tokens)

    @rule(name=st.sampled_from("abcdefghij"))
    def restart(self, name: str) -> None:
        if name in self.worker.live:
            self.worker.restart(name)

    @rule(
        steps=st.integers(1, 12),
        stops=st.lists(st.booleans(), min_size=1, max_size=7),
        slowness=st.sampled_from([0.3, 1.0, 1.0, 20.0]),
        drafts=st.dictionaries(
            st.sampled_from("abcdefghij"),
            st.tuples(st.integers(1, 8), st.integers(0, 8)),
        ),
    )
    def run_steps(
        self,
        steps: int,
        stops: list[bool],
        slowness: float,
        drafts: dict[str, tuple[int, int]],
    ) -> None:
        """drafts: by sequence, a draft's tokens and the number of right ones."""

        def offer(request_id: str) -> Draft:
            tokens, _ = drafts.get(request_id, (0, 0))
            return Draft(tuple(range(tokens)), (0.9,) * tokens)

        self.worker.offer = offer
        self.worker.repeats = lambda request_id: request_id in "aceg"
        self.worker.right = lambda request_id, drafted: drafts.get(request_id, (0, 0))[1]

        def seconds_of(load: StepLoad) -> float:
            return device_seconds(load) * slowness

        self.worker.seconds_of = seconds_of
        self.worker.stops_at = lambda request_id, generated_tokens: (
            all(stops) or (stops[generated_tokens % len(stops)] and generated_tokens % 3 == 0)
        )
        for _ in range(steps):
            self.worker.step()
        self.worker.offer = lambda request_id: NO_DRAFT

    @precondition(lambda self: self.worker.live)
    @rule()
    def run_to_end(self) -> None:
        self.worker.stops_at = lambda request_id, generated_tokens: False
        self.worker.run_to_end()

    def teardown(self) -> None:
        if hasattr(self, "worker"):
            self.worker.stops_at = lambda request_id, generated_tokens: False
            self.worker.run_to_end()
            assert all(len(served.ends) == 1 for served in self.worker.ended)


SchedulerStates.TestCase.settings = hypothesis_settings(
    max_examples=50, stateful_step_count=30, deadline=None
)
TestSchedulerStates = SchedulerStates.TestCase
