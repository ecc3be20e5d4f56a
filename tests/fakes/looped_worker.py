"""A worker's loop over the engine without a device, driven by a script."""

from __future__ import annotations

from holdfast.config import SchedulerSettings
from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.loop.device_steps import DispatchedStep
from holdfast.worker.loop.loop import ModelOptions, WorkerLoop
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.script_inbox import ScriptInbox

SETTINGS = SchedulerSettings(
    max_running=4, max_queued=8, step_tokens=16, min_chunk_tokens=2, expected_output_tokens=4
)


def request(request_id: str, *prompt: int, max_tokens: int = 8, **more: object) -> SequenceRequest:
    return SequenceRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(prompt or (1, 2, 3)),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=1),
        **more,  # type: ignore[arg-type]
    )


def a_scheduler(*, budget_tokens: int = 10_000) -> Scheduler:
    costs = SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0, reserve_step_tokens=4)
    return Scheduler(
        SETTINGS, costs, budget_bytes=budget_tokens, context_tokens=1000, mixes_chunks=True
    )


def a_sequence(asked: SequenceRequest) -> LiveSequence:
    """A request as the loop accepts it."""
    loop = make_loop(FakeEngine(), ScriptInbox([]))
    return loop._new_sequence(asked, loop._scheduler.usual_costs)


def flight_of(plan: StepPlan, sequence: LiveSequence, pending: object) -> DispatchedStep:
    """A step that was dispatched for one sequence."""
    return DispatchedStep(
        scheduled=plan,
        plan=plan,
        sequences=(sequence,),
        attempts=(sequence.attempts,),
        started_at=0.0,
        expected_seconds=None,
        pending=pending,  # type: ignore[arg-type]
    )


def make_loop(
    engine: FakeEngine,
    inbox: ScriptInbox,
    *,
    budget_tokens: int = 10_000,
    cache: PrefixCache | None = None,
) -> WorkerLoop:
    scheduler = a_scheduler(budget_tokens=budget_tokens)
    return WorkerLoop(
        engine=engine,
        scheduler=scheduler,
        inbox=inbox,
        model=ModelOptions(retry_chunk_tokens=8),
        cache=cache,
    )


def serve(
    *script: list[Command], engine: FakeEngine | None = None, budget_tokens: int = 10_000
) -> ScriptInbox:
    engine = engine or FakeEngine()
    inbox = ScriptInbox(script)
    make_loop(engine, inbox, budget_tokens=budget_tokens).run()
    inbox.check_protocol()
    assert not inbox.open_requests()
    return inbox
