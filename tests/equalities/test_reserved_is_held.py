"""The scheduler's accounts and the engine's arrays: never more is held than reserved, through
growth and preemption.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from holdfast.config import SchedulerSettings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.scheduler.scheduler import Decision, Scheduler, StepOutcome
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import live_bytes
from tests.fakes.step_worker import submit
from tests.fakes.tiny_models import VOCAB_SIZE

RESERVE_STEP_TOKENS = 8
SETTINGS = SchedulerSettings(
    max_running=4, step_tokens=32, min_chunk_tokens=4, expected_output_tokens=4
)


@dataclass
class Server:
    """Scheduler and engine, connected as in the worker, pipelined by one step."""

    engine: Engine
    scheduler: Scheduler
    requests: dict[str, SequenceRequest]
    scheduled: dict[str, ScheduledSequence] = field(default_factory=dict)
    generated: dict[str, list[int]] = field(default_factory=dict)
    most_bytes: int = 0
    growths: int = 0

    def run(self) -> None:
        for name, request in self.requests.items():
            self.scheduled[name] = submit(
                self.scheduler,
                name,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
            )
        under_way: list[tuple[PendingStep, StepPlan]] = []
        while True:
            decision = self.scheduler.next_step()
            self.begin(decision)
            if decision.plan.spans:
                under_way.append((self.engine.dispatch(decision.plan), decision.plan))
            elif not under_way:
                return
            if len(under_way) > 1 or not decision.plan.spans:
                self.end(*under_way.pop(0))
            self.check_capacities()
            held, reserved = live_bytes(self.engine), self.scheduler.statistics().reserved_bytes
            assert held <= reserved
            self.most_bytes = max(self.most_bytes, held)

    def check_capacities(self) -> None:
        """Buffers of keys and values are as long as reserved: multiples of the scheduler's step."""
        for request_id in self.engine._sequences:
            reserved = self.scheduled[request_id].capacity_tokens
            assert reserved % RESERVE_STEP_TOKENS == 0
            for leaf in self.engine._sequences[request_id].live.growing:
                capacities = {array.shape[2] for array in leaf.arrays()}
                assert capacities <= {reserved}

    def begin(self, decision: Decision) -> None:
        for request_id in decision.preempted:
            self.engine.close(request_id)
        for request_id in decision.grown:
            self.engine.reserve_tokens(request_id, self.scheduled[request_id].capacity_tokens)
            self.growths += 1
        for request_id in decision.admitted:
            self.engine.open(
                self.requests[request_id],
                generated=tuple(self.generated.setdefault(request_id, [])),
                capacity_tokens=self.scheduled[request_id].capacity_tokens,
            )

    def end(self, pending: PendingStep, plan: StepPlan) -> None:
        result = self.engine.collect(pending)
        generated = {}
        for span in result:
            self.generated[span.request_id].extend(span.token_ids)
            if span.token_ids:
                generated[span.request_id] = len(span.token_ids)
        outcome = StepOutcome(plan=plan, generated_tokens=generated, ended=(), seconds=0.001)
        for request_id in self.scheduler.record_step(outcome):
            self.engine.close(request_id)


def some_requests(rng: random.Random) -> dict[str, SequenceRequest]:
    return {
        str(index): SequenceRequest(
            request_id=str(index),
            prompt_token_ids=TokenIds.of(
                rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))
            ),
            max_tokens=rng.randint(14, 24),
            sampling=SamplingParams(temperature=1.0, seed=index),
        )
        for index in range(6)
    }


def served(
    engine: Engine, requests: dict[str, SequenceRequest], *, sequences_that_fit: float
) -> Server:
    measured = engine.measure_costs()
    costs = SequenceCosts(
        kv_bytes_per_token=measured.bytes_per_token,
        fixed_bytes_per_sequence=measured.fixed_bytes,
        reserve_step_tokens=RESERVE_STEP_TOKENS,
    )
    budget = int(sequences_that_fit * (40 * measured.bytes_per_token + measured.fixed_bytes))
    scheduler = Scheduler(
        SETTINGS, costs, budget_bytes=budget, context_tokens=4096, mixes_chunks=engine.mixes_chunks
    )
    server = Server(engine, scheduler, requests)
    server.run()
    return server


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_scarce_memory_changes_no_answer_and_is_never_exceeded(name: str) -> None:
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    requests = some_requests(random.Random(name))
    ample = served(engine, requests, sequences_that_fit=9)
    scarce = served(engine, requests, sequences_that_fit=2.2)
    assert {key: len(tokens) for key, tokens in ample.generated.items()} == {
        key: r.max_tokens for key, r in requests.items()
    }
    assert scarce.generated == ample.generated
    assert scarce.growths > 0
    assert 0 < scarce.most_bytes < ample.most_bytes
