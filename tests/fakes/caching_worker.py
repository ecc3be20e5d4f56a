"""A worker's loop with a real engine, cache and store on a tiny model, driven by a script or step by
step.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.config import KVBitsChoice, SchedulerSettings
from holdfast.machine.memory_plan import MemoryPlan
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.events import Finished
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.engine import sequence
from holdfast.worker.engine.constraints import Constraints
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import BLOCK_TOKENS, CopyPolicy, SpanResult
from holdfast.worker.kv import full
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.codec import PayloadFormat
from holdfast.worker.kv.live import LiveState
from holdfast.worker.loop import cache_client
from holdfast.worker.loop.loop import ModelOptions, WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.prefix import cache, live_tier, lookup, tree
from holdfast.worker.prefix import chain as prefix_chain
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from holdfast.worker.sessions.service import SessionService
from tests.fakes.architectures import probed
from tests.fakes.script_inbox import AfterEarlier, ScriptInbox
from tests.fakes.tiny_models import VOCAB_SIZE

SETTINGS = SchedulerSettings(
    max_running=4, max_queued=64, step_tokens=64, min_chunk_tokens=4, expected_output_tokens=8
)
CONTEXT_TOKENS = 4096
SMALL_BLOCK = 16
MOST_STEPS = 3000


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


class FailingOnce(Engine):
    """The real engine, except that the `fails_at`-th collect raises, like a device's late error."""

    fails_at = 0
    collected = 0

    def collect(self, pending: Any) -> tuple[SpanResult, ...]:
        result = super().collect(pending)
        self.collected += 1
        if self.collected == self.fails_at:
            raise RuntimeError("the device failed in this step")
        return result


class RunningAhead(Engine):
    """The real engine, but step k+1 is dispatched before step k is collected, as on a GPU."""

    @property
    def runs_ahead(self) -> bool:
        return True


def live_bytes(engine: Engine) -> int:
    """The bytes of all live states of an engine."""
    # by identity: sequences that decode together keep rows of one stack
    arrays = {
        id(array): array
        for sequence in engine._sequences.values()
        for array in sequence.live.arrays()
    }
    return _nbytes(arrays.values())


def open_sequences(engine: Engine) -> int:
    """The number of open sequences."""
    return len(engine._sequences)


class CachingWorker:
    """One life of a worker.

    `folder`: of its store, if any; a second worker with the same folder is a restart.
    """

    def __init__(
        self,
        model: str | Runner = "llama",
        folder: Path | None = None,
        *,
        vocab_size: int = VOCAB_SIZE,
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
        """model: the name of a tiny one, or a probed one. has_measured_costs: count bytes as measured
        on the model, also for a budget in tokens; otherwise a token is a byte. adapters: the
        fingerprints of the model's adapters, by name. kv_bits: of requests that do not choose; if
        "native", no request can choose.
        """
        self.model = model
        runner = probed(model) if isinstance(model, str) else model
        self.inbox = ScriptInbox([])
        self.sent: dict[str, SequenceRequest] = {}
        self._nothing_comes = threading.Event()
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
        self.fingerprints = Fingerprints(fingerprint, adapters or {})
        self._speculates = speculates
        self.draft_model = draft_model
        self.cache = PrefixCache(
            self.index,
            store=self.store,
            payloads=PayloadFormat(model=costs.form),
            most_parked_bytes=most_parked_bytes,
            fingerprints=self.fingerprints,
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
                form=each,
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

    @functools.cached_property
    def loop(self) -> WorkerLoop:
        return WorkerLoop(
            engine=self.engine,
            scheduler=self.scheduler,
            inbox=self.inbox,
            cache=self.cache,
            sessions=self.sessions,
            memory=self.memory,
            model=ModelOptions(
                fingerprints=self.fingerprints,
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
        self.inbox = inbox = ScriptInbox(script, in_turn=in_turn, on_receive=on_receive)
        self.loop.run()
        self.counters = self.loop.statistics()
        inbox.check_protocol(generated_before=generated_before)
        self.loop.check_invariants()
        self.index.check_invariants()
        assert not inbox.open_requests()
        assert open_sequences(self.engine) == 0
        return inbox

    def end(self) -> None:
        """Shut it down, ending all requests."""
        self.loop._shut_down()
        self.check()

    def send(self, *commands: Command) -> None:
        """Commands arrive together."""
        self.sent |= {
            command.request_id: command
            for command in commands
            if isinstance(command, SequenceRequest)
        }
        self.loop._handle(list(commands))
        self.loop._send()
        self.check()

    def step(self) -> bool:
        """One iteration of the loop; returns whether there was something to do."""
        self.loop._quantize_running(self.memory)
        is_busy = self.loop._advance()
        self.loop._send()
        if not is_busy:
            self.loop._flush_if_idle()
        self.check()
        return is_busy

    def run_to_end(self, *, but: Sequence[str] = ()) -> None:
        """Until all requests have ended except those expected to wait for ever."""
        for _ in range(MOST_STEPS):
            if not set(self.open()) - set(but):
                return
            if not self.step():
                self._nothing_comes.wait(0.0005)  # for the disk
        raise AssertionError(f"these never end: {self.open()}")

    def open(self) -> list[str]:
        """Requests without an end."""
        return list(self.inbox.open_requests())

    def ended(self) -> list[str]:
        """Requests that were answered."""
        return [event.request_id for event in self.inbox.events if isinstance(event, Finished)]

    def check_answer(self, request_id: str) -> None:
        """It equals the answer alone; a cancelled one equals its beginning."""
        request, tokens = self.sent[request_id], tuple(self.inbox.tokens(request_id))
        assert isinstance(self.model, str)
        alone = answer_alone(self.model, tuple(request.prompt_token_ids), request.max_tokens)
        reason = self.inbox.finished(request_id).reason.value
        assert reason in ("length", "cancelled"), (
            request_id,
            reason,
            self.inbox.finished(request_id).error,
        )
        assert tokens == (alone if reason == "length" else alone[: len(tokens)]), request_id

    def check(self) -> None:
        """All accounts agree with each other and with the arrays."""
        self.loop.check_invariants()
        self.index.check_invariants()
        self.loop._cache_client._record_live_states(self.cache)  # as the next step begins
        chains = list(self.cache.live._chains)
        assert all(chain.state is not None for chain in chains), "a live chain without a state"
        for chain in chains:
            for key in chain.keys:
                assert chain in self.index._holders[key], "a key that does not know its holder"
                start, tokens = self.index.tree.run_of(key)
                assert start + tokens <= chain.state.tokens, "a holder that has not all of a block"
        for holders in self.index._holders.values():
            assert holders <= set(chains), "a holder that is not live"
        held, parked = held_and_parked(
            [c.state for c in chains if not c.is_parked], [c.state for c in chains if c.is_parked]
        )
        own = sum(
            chain.held_tokens * chain.state.bytes_per_token()
            for chain in chains
            if not chain.is_parked and not chain.state.can_share
        )
        assert self.cache.live.held.total_bytes == held + parked + own, "held memory is miscounted"
        assert self.cache.live.held.parked_bytes == parked, "parked memory is miscounted"
        running = [chain for chain in chains if not chain.is_parked and chain.state.can_share]
        assert all(chain.held_tokens == chain.state.frozen_tokens for chain in running), (
            "frozen and held tokens differ"
        )
        for chain in running:
            sequence = self.loop._ledger.find(chain.request_id)
            assert (
                sequence is None
                or not sequence.scheduled.is_running
                or sequence.scheduled.held_tokens == chain.held_tokens
            ), "the scheduler holds other tokens apart"
        assert self.cache.live.held.parked == sum(chain.is_parked for chain in chains)


def make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few tokens, so that short prompts have several, are shared, and frozen parts are
    merged.
    """
    for module in (cache, cache_client, prefix_chain, live_tier, lookup, tree):
        monkeypatch.setattr(module, "BLOCK_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(live_tier, "LEAST_SHARED_TOKENS", SMALL_BLOCK)
    small = functools.partial(CopyPolicy, block_tokens=SMALL_BLOCK)
    monkeypatch.setattr(sequence, "CopyPolicy", small)
    monkeypatch.setattr(cache, "BOUNDARY_TOKENS", 2 * SMALL_BLOCK)
    monkeypatch.setattr(cache, "TEND_SECONDS", 0.0)
    monkeypatch.setattr(cache_client, "LEAST_SHARED_TOKENS", SMALL_BLOCK)
    monkeypatch.setattr(full, "_SHORT_PART", SMALL_BLOCK // 2)


@functools.cache
def answer_alone(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The answer to a request on a worker without a cache."""
    request = greedy("alone", prompt, max_tokens=max_tokens)
    return tuple(CachingWorker(name).serve([[request]]).tokens("alone"))


def held_and_parked(
    running: Sequence[LiveState | None], parked: Sequence[LiveState | None]
) -> tuple[int, int]:
    """Bytes frozen by running states, and those of parked ones in addition."""
    frozen = {
        id(a): a for each in running if each for leaf in each.leaves for a in leaf.frozen_arrays()
    }
    all_parked = {id(a): a for each in parked if each for a in each.arrays()}
    beside = [array for key, array in all_parked.items() if key not in frozen]
    return _nbytes(frozen.values()), _nbytes(beside)


def _nbytes(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def one_after_the_other(*requests: Command) -> list[Sequence[Command]]:
    """A script in which each request arrives after all earlier ones have ended."""
    return [AfterEarlier((request,)) for request in requests]


def random_prompt(tokens: int, seed: str = "a") -> tuple[int, ...]:
    """Token ids; those of different seeds are equal only by chance."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))
