"""A worker's process in the simulated world: the real link, heart, loop, scheduler, prefix cache,
sessions and store, over the simulated device.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from holdfast.machine.device_memory import DeviceMemory
from holdfast.machine.memory_plan import MemoryPlan, plan_memory
from holdfast.machine.process_time import QueueTimes
from holdfast.store.maintenance import store_limits
from holdfast.store.store import BlockStore
from holdfast.wire.commands import Assignment, WorkerSettings
from holdfast.wire.events import ModelInfo
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.engine import code_attention
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.codec import PayloadFormat
from holdfast.worker.loop import counters, inbox
from holdfast.worker.loop.device_steps import DeviceBroken
from holdfast.worker.loop.inbox import Heart, Inbox, Progress, Pulse, ZmqInbox
from holdfast.worker.loop.loop import ModelOptions, WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.loop.process import WorkerEnd, live
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from holdfast.worker.sessions.service import SessionService
from tests.simulation import vision
from tests.simulation.device import (
    VOCAB_SIZE,
    Costs,
    Deadly,
    Fault,
    SecondLayer,
    SimulatedEngine,
    SimulatedFailure,
    ToyRunner,
    Weights,
    fingerprint_of,
    make_engine,
)
from tests.simulation.links import Wake
from tests.simulation.pictures import name_of_file
from tests.simulation.world import Killed, Process, World, world, world_or_none

_REAL_GETPID = os.getpid
CONTEXT_TOKENS = 8192
DEATHS_OF_AN_IMAGE = 4  # of image processes, until it is refused


@dataclass
class Machine:
    """The machine that all processes share: its memory, its device, and its planned faults.

    loads: the faults of the next loads of workers, in order.
    """

    memory: DeviceMemory = DeviceMemory(
        total_bytes=64 << 20, available_bytes=48 << 20, unified=False
    )
    costs: Costs = field(default_factory=Costs)
    load_seconds: float = 0.5
    runs_ahead: bool = False
    weight_bytes: int = 1 << 20
    loads: list[Fault] = field(default_factory=list)
    failing_starts: int = 0  # how many of the next processes cannot be started
    deadly: Deadly = field(default_factory=Deadly)
    starts: list[tuple[str, bool]] = field(default_factory=list)  # see `most_failed_starts`
    short_lives: int = 0  # how many of the next workers die soon after they are loaded
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)  # by pid, if alive
    ended_at: list[float] = field(default_factory=list)  # when workers ended
    excess_bytes: int = 0  # that each process takes beyond its weights
    second: SecondLayer = "none"  # of all models
    repeats: bool = False
    is_terse: bool = False
    has_draft_model: bool = False
    sees_images: vision.Vision = ""
    image_faults: list[vision.ImageFault] = field(default_factory=list)  # of the next tasks
    # how often the image process has failed with each image
    image_faults_of: Counter[str] = field(default_factory=Counter)
    adapters: tuple[str, ...] = ()  # of all models
    # of the weights of each model, and of each adapter (MODEL:ADAPTER)
    versions: Counter[str] = field(default_factory=Counter)

    def deadly_images(self) -> set[str]:
        """The pictures that may be refused because the image process has failed with them too often."""
        planned = len(self.image_faults)
        return {
            name_of_file(image)
            for image, failures in self.image_faults_of.items()
            if failures + planned >= DEATHS_OF_AN_IMAGE
        }

    def most_failed_starts(self, model: str) -> int:
        """How many starts of a model's worker have failed in a row, at most. `starts` has the model
        of each start, and whether it was ready before its end; "": no process could be started.
        """
        most = in_a_row = 0
        for name, was_ready in self.starts:
            if name in ("", model):
                in_a_row = 0 if was_ready else in_a_row + 1
                most = max(most, in_a_row)
        return most

    def weights_of(self, model: str) -> Weights:
        """The weights that a worker loads now."""
        return Weights(
            f"{model} {self.versions[model]}",
            second=self.second,
            repeats=self.repeats,
            is_terse=self.is_terse,
            adapters=tuple((each, self.versions[f"{model}:{each}"]) for each in self.adapters),
        )

    def all_weights_of(self, model: str) -> Mapping[str, Sequence[Weights]]:
        """All weights that a model has ever had, with each version of its adapters, by the fingerprint
        of the base model.
        """
        found = {}
        for version in range(self.versions[model] + 1):
            base = replace(self.weights_of(model), name=f"{model} {version}")
            found[fingerprint_of(base)] = [base.with_adapter("")] + [
                replace(base, adapters=((each, number),)).with_adapter(each)
                for each in self.adapters
                for number in range(self.versions[f"{model}:{each}"] + 1)
            ]
        return found


@dataclass(eq=False)
class SimulatedWorker:
    """A worker's process, with the parts that checks inspect."""

    process: Process
    settings: WorkerSettings
    engine: SimulatedEngine | None = None
    draft_engine: SimulatedEngine | None = None
    loop: WorkerLoop | None = None
    cache: PrefixCache | None = None
    index: PrefixIndex | None = None
    store: BlockStore | None = None
    wake: Wake = field(default_factory=Wake)
    weights: Weights = Weights()
    endpoint: str = ""
    ready_at: float = math.inf

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.model.name


def start_worker(world: World, machine: Machine, assignment: Assignment, process: Process) -> None:
    """Run a worker in its process."""
    settings = assignment.settings
    worker = SimulatedWorker(process, settings, endpoint=assignment.endpoint)
    worker.weights = machine.weights_of(settings.model.name)
    machine.workers[process.pid] = worker

    def forget() -> None:
        machine.workers.pop(process.pid, None)
        machine.ended_at.append(world.now)
        machine.starts.append((worker.name, worker.loop is not None))

    process.ends.append(forget)
    vision.belongs_to(machine, process)
    pulse = Pulse(interval_seconds=settings.residency.heartbeat_seconds)
    heart = Heart(assignment.heartbeat_endpoint, pulse)

    def main() -> None:
        heart.start()
        link = ZmqInbox(assignment.endpoint, wake_fd=worker.wake)  # type: ignore[arg-type]
        end = WorkerEnd.BROKEN
        with contextlib.suppress(SimulatedFailure, DeviceBroken):  # the process ends with an error
            end = live(
                link, lambda link, progress: _build(world, machine, worker, link, progress, pulse)
            )
        heart.stop()
        process.exit(int(end))
        raise Killed

    process.spawn(main, "device")


@cache
def kv_costs(second: SecondLayer) -> Mapping[KVBits, KVCosts]:
    """The memory of a sequence of the toy model, by form."""
    runner = ToyRunner(Weights(second=second))
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    native = engine.measure_costs()
    assert native.form is not None
    runner.set_form(native.form)
    return {"native": native} | {each: engine.measure_costs(each) for each in BITS}  # type: ignore[dict-item]


def _die(worker: SimulatedWorker) -> None:
    if not worker.process.is_dead:
        worker.process.world.on_fault(worker.process, "worker dies")
        worker.process.kill()


def _build(
    world: World,
    machine: Machine,
    worker: SimulatedWorker,
    link: Inbox,
    progress: Progress,
    pulse: Pulse,
) -> tuple[WorkerLoop, ModelInfo]:
    settings = worker.settings
    progress("reading", 0.0)
    fault = machine.loads.pop(0) if machine.loads else None
    if fault is not None:
        world.tell(f"the load of {worker.process.name} {fault.value}")
        world.on_fault(worker.process, f"a load {fault.value}")
    world.block(machine.load_seconds * world.random.uniform(0.5, 2.0))
    if fault is Fault.HANG:
        world.block()
    if fault is Fault.DIES:
        worker.process.kill()
        world.block()
    if fault is Fault.ERROR:
        raise SimulatedFailure("the simulated load failed")
    progress("reading", 1.0)
    weights = worker.weights
    by_bits = kv_costs(weights.second)
    engine = make_engine(
        world,
        weights=weights,
        costs=machine.costs,
        runs_ahead=machine.runs_ahead,
        deadly=machine.deadly,
    )
    native = by_bits["native"]
    assert native.form is not None
    engine._runner.set_form(native.form)
    forms = KVForms(default=settings.model.kv_bits, costs=by_bits, refused={})
    engine.images = vision.open_images(
        Path(settings.images),
        weights=weights.name,
        fingerprint=fingerprint_of(weights),
        vision=machine.sees_images,
    )
    plan_for = _planner(machine, settings)
    plan = plan_for(settings.share.state_bytes)
    draft_model = None
    if machine.has_draft_model:
        # it has other keys and values, but repeats the same phrases
        worker.draft_engine = make_engine(
            world,
            weights=Weights(f"{weights.name} drafted", repeats=weights.repeats),
            costs=Costs(step_seconds=machine.costs.step_seconds / 8, token_seconds=0.00002),
            runs_ahead=machine.runs_ahead,
            deadly=Deadly(),
        )
        draft_model = DraftModel(
            worker.draft_engine,
            name="draft",
            vocab_size=VOCAB_SIZE,
            context_tokens=CONTEXT_TOKENS,
            most_cached_bytes=plan.kv_bytes // 8,
        )
    costs = {
        each: SequenceCosts(
            form=each,
            kv_bytes_per_token=measured.bytes_per_token,
            fixed_bytes_per_sequence=measured.fixed_bytes,
            draft_bytes_per_token=kv_costs("none")["native"].bytes_per_token if draft_model else 0,
            block_tokens=BLOCK_TOKENS if each != "native" and engine.ends_spans_at_blocks else None,
        )
        for each, measured in by_bits.items()
    }
    step_tokens = settings.scheduler.step_tokens or 512
    scheduler = Scheduler(
        replace(settings.scheduler, step_tokens=step_tokens),
        costs[forms.default_now],
        budget_bytes=plan.kv_bytes,
        context_tokens=CONTEXT_TOKENS,
        mixes_chunks=True,
    )
    fingerprint = fingerprint_of(weights)
    fingerprints = Fingerprints(
        fingerprint,
        {each: fingerprint_of(weights.with_adapter(each)) for each, _ in weights.adapters},
    )
    store = None
    if settings.store.folder:
        store = BlockStore(
            Path(settings.store.folder),
            fingerprint=fingerprint,
            served_as=settings.model.name,
            limits=store_limits(settings.store),
        )
    index = PrefixIndex(fingerprint=fingerprint, ram_budget_bytes=plan.ram_tier_bytes, disk=store)
    cache = PrefixCache(
        index,
        store=store,
        payloads=PayloadFormat(model=native.form),
        most_parked_bytes=settings.store.ram_bytes,
        fingerprints=fingerprints,
    )
    sessions = SessionService(
        cache,
        most=settings.store.max_sessions,
        ttl_seconds=settings.store.session_seconds,
        pinned_percent=settings.store.pinned_percent,
        context_tokens=CONTEXT_TOKENS,
    )
    fitting = _contexts(costs, plan.kv_bytes)
    budget = MemoryBudget(
        plan,
        plan_for=plan_for,
        contexts_of=lambda kv_bytes: _contexts(costs, kv_bytes),
        scheduler=scheduler,
        cache=cache,
        most_parked_bytes=settings.store.ram_bytes,
    )
    loop = WorkerLoop(
        engine=engine,
        scheduler=scheduler,
        inbox=link,
        model=ModelOptions(
            retry_chunk_tokens=step_tokens,
            fingerprints=fingerprints,
            forms=forms,
            costs=costs,
            speculates=settings.model.speculation != "off",
            draft_model=draft_model,
        ),
        cache=cache,
        sessions=sessions,
        memory=budget,
        pulse=pulse,
    )
    worker.engine, worker.loop, worker.cache, worker.index = engine, loop, cache, index
    worker.store, worker.ready_at = store, world.now
    if machine.short_lives:
        machine.short_lives -= 1
        world.after(
            world.random.uniform(0.0, 8.0) * machine.costs.step_seconds, lambda: _die(worker)
        )
    info = ModelInfo(
        model_type="toy",
        layout="rows",
        layout_reason="",
        parameters=1,
        weight_bytes=machine.weight_bytes,
        compute_dtype="float32",
        context_tokens=fitting[forms.default_now],
        own_context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB_SIZE,
        kv=forms.health(),
        context_tokens_by_bits=fitting,
        fixed_bytes_per_sequence=native.fixed_bytes,
        kv_budget_bytes=plan.kv_bytes,
        device="simulated",
        is_on_cpu=True,
        fingerprint=fingerprint,
        load_seconds=machine.load_seconds,
        vision=vision.VISION if machine.sees_images else None,
    )
    return loop, info


def _contexts(costs: Mapping[KVBits, SequenceCosts], kv_bytes: int) -> dict[str, int]:
    """The longest sequence that fits, by the value of `kv_bits`."""
    found: dict[str, int] = {
        each: own.longest_sequence(kv_bytes, most_tokens=CONTEXT_TOKENS)
        for each, own in costs.items()
    }
    return {**found, "auto": max(found["native"], found["8"])}


def _planner(machine: Machine, settings: WorkerSettings) -> Callable[[int | None], MemoryPlan]:
    def plan_for(state_bytes: int | None) -> MemoryPlan:
        return plan_memory(
            machine.memory,
            weight_bytes=machine.weight_bytes,
            kv_bytes=settings.model.memory_bytes,
            ram_tier_bytes=settings.store.ram_bytes,
            share=replace(settings.share, state_bytes=state_bytes),
        )

    return plan_for


def _may_lack_memory(call: Callable[..., None]) -> Callable[..., None]:
    """A computation of the device, which a sweep can let run out of memory."""

    def checked(*args: Any, **more: Any) -> None:
        found = world_or_none()
        if found is not None and found.fails("allocation"):
            raise SimulatedFailure("[malloc] Unable to allocate 4096 bytes.")
        call(*args, **more)

    return checked


def install() -> None:
    """Replace measurements of this machine, so that none reaches the world."""
    mx.eval, mx.async_eval = _may_lack_memory(mx.eval), _may_lack_memory(mx.async_eval)
    mx.disable_compile()  # compiling takes longer than it saves here
    os.setpriority = lambda *_: None
    os.getpid = lambda: world().here.pid if world_or_none() else _REAL_GETPID()
    code_attention.is_right = lambda: False  # would be measured; the toy does not use it
    inbox.own_queue_times = QueueTimes
    inbox._major_page_faults = lambda: 0
    counters._this_process = _NoProcess


class _NoProcess:
    """In place of psutil's process."""

    def memory_info(self) -> _NoProcess:
        return self

    rss = 0
