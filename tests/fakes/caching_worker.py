"""A worker's loop with a real engine, cache and store on a tiny model, driven by a script."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.config import KVBitsChoice, SchedulerSettings
from holdfast.machine.device_memory import MemoryPlan
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.engine.constraints import Constraints
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.codec import PayloadFormat
from holdfast.worker.loop.loop import ModelOptions, WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.scheduler.queue import SequenceCosts
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.sessions.service import SessionService
from tests.fakes.architectures import probed
from tests.fakes.live_state import open_sequences
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.tiny_models import VOCAB_SIZE

SETTINGS = SchedulerSettings(
    max_running=4, max_queued=64, step_tokens=64, min_chunk_tokens=4, expected_output_tokens=8
)
CONTEXT_TOKENS = 4096


def greedy(
    request_id: str, prompt: Sequence[int], *, max_tokens: int = 6, **more: Any
) -> SequenceRequest:
    """A greedy request whose answer depends only on the model."""
    return SequenceRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, seed=0),
        **more,
    )


class CachingWorker:
    """One life of a worker.

    `folder`: of its store, if any; a second worker with the same folder is a restart.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        folder: Path | None = None,
        ram_bytes: int = 1 << 28,
        fingerprint: str = "a model",
        kv_bits: KVBitsChoice = "native",
        budget_tokens: int | None = None,
        most_parked_bytes: int | None = None,
        most_sessions: int = 4,
        pinned_percent: int = 50,
        engine: type[Engine] = Engine,
        constraints: Constraints | None = None,
        clock: Callable[[], float] = time.time,
        limits: StoreLimits | None = None,
        has_measured_costs: bool = False,
        adapters: Mapping[str, str] | None = None,
        speculates: bool = False,
        draft_model: DraftModel | None = None,
        **settings: Any,
    ) -> None:
        """has_measured_costs: count bytes as measured on the model, also for a budget in tokens;
        otherwise a token is a byte. adapters: the fingerprints of the model's adapters, by name.
        kv_bits: of requests that do not choose; if "native", no request can choose.
        """
        self.engine = engine(runner, vocab_size=vocab_size, constraints=constraints)
        costs = self.engine.measure_costs()
        assert costs.form is not None
        by_bits: dict[KVBits, KVCosts] = {"native": costs}
        if kv_bits != "native":
            runner.set_form(costs.form)
            assert not runner.refusal()
            by_bits |= {each: self.engine.measure_costs(each) for each in BITS}
        self.forms = KVForms(default=kv_bits, costs=by_bits, refused={})
        costs = by_bits[self.forms.default_now]
        assert costs.form is not None
        self.store = (
            None if folder is None else BlockStore(folder, fingerprint=fingerprint, limits=limits)
        )
        self.index = PrefixIndex(
            fingerprint=fingerprint, ram_budget_bytes=ram_bytes, disk=self.store
        )
        self._adapters = adapters or {}
        self._speculates = speculates
        self.draft_model = draft_model
        self.cache = PrefixCache(
            self.index,
            store=self.store,
            payloads=PayloadFormat(model=costs.form),
            most_parked_bytes=most_parked_bytes,
            adapters=self._adapters,
        )
        self.sessions = SessionService(
            self.cache,
            most=most_sessions,
            ttl_seconds=100.0,
            pinned_percent=pinned_percent,
            clock=clock,
            context_tokens=CONTEXT_TOKENS,
        )
        weights = SequenceCosts(
            kv_bytes_per_token=1, fixed_bytes_per_sequence=0, reserve_step_tokens=8
        )
        self.weights = {
            each: replace(
                weights,
                kv_bytes_per_token=held.bytes_per_token if has_measured_costs else 1,
                fixed_bytes_per_sequence=held.fixed_bytes if has_measured_costs else 0,
                block_tokens=BLOCK_TOKENS
                if each != "native" and self.engine.ends_spans_at_blocks
                else None,
            )
            for each, held in by_bits.items()
        }
        weights = self.weights[self.forms.default_now]
        self.scheduler = Scheduler(
            replace(SETTINGS, **settings),
            weights,
            budget_bytes=(budget_tokens or 1 << 20) * weights.kv_bytes_per_token
            + 4 * weights.fixed_bytes_per_sequence,
            context_tokens=CONTEXT_TOKENS,
            mixes_chunks=runner.mixes_chunks,
        )
        plan = MemoryPlan(
            kv_bytes=self.scheduler.statistics().budget_bytes, ram_tier_bytes=ram_bytes
        )
        self.memory = MemoryBudget(
            plan,
            plan_for=lambda state_bytes: plan,
            scheduler=self.scheduler,
            cache=self.cache,
            most_parked_bytes=most_parked_bytes,
        )

    def loop(self, inbox: ScriptInbox) -> WorkerLoop:
        return WorkerLoop(
            engine=self.engine,
            scheduler=self.scheduler,
            inbox=inbox,
            cache=self.cache,
            sessions=self.sessions,
            memory=self.memory,
            model=ModelOptions(
                adapters=self._adapters,
                forms=self.forms,
                speculates=self._speculates,
                draft_model=self.draft_model,
                costs=self.weights,
            ),
        )

    def serve(
        self,
        script: Iterable[Sequence[Command]],
        *,
        in_turn: bool = False,
        on_receive: Callable[[], None] = lambda: None,
    ) -> ScriptInbox:
        """Run the script to its end, then end the worker and close its store.

        `on_receive`: called between two steps.
        """
        script = [*script]
        generated_before = {
            command.request_id: len(command.generated_token_ids)
            for commands in script
            for command in commands
            if isinstance(command, SequenceRequest)
        }
        inbox = ScriptInbox(script, in_turn=in_turn, on_receive=on_receive)
        loop = self.loop(inbox)
        loop.run()
        self.counters = loop.statistics()
        inbox.check_protocol(generated_before=generated_before)
        loop.check_invariants()
        self.index.check_invariants()
        assert not inbox.open_requests()
        assert open_sequences(self.engine) == 0
        return inbox


def one_after_the_other(*requests: Command) -> list[Sequence[Command]]:
    """A script in which each request arrives after all earlier ones have ended."""
    script: list[Sequence[Command]] = []
    for request in requests:
        script += [[request], *[[]] * 40]
    return script


def tiny_worker(folder: Path | None = None, *, name: str = "llama", **more: Any) -> CachingWorker:
    """A worker with one of the tiny models."""
    return CachingWorker(probed(name), vocab_size=VOCAB_SIZE, folder=folder, **more)


def random_prompt(tokens: int, seed: str = "a") -> tuple[int, ...]:
    """Token ids; those of different seeds are equal only by chance."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))
