"""Builds the loop of a worker from a model folder.

Importing this module imports MLX: device thread only.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import msgspec

from holdfast.config import SchedulerSettings
from holdfast.machine import platform
from holdfast.machine.memory_pressure import pressure_reader
from holdfast.models.file_hashing import FileHashing, ModelChanged
from holdfast.models.hash_cache import HashCache
from holdfast.wire.assignment import WorkerSettings
from holdfast.wire.events import ModelInfo
from holdfast.worker.engine.constraints import Constraints
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.fingerprint import files_of_identity, runs_own_code
from holdfast.worker.engine.grammars import Grammars
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.long_context import warnings_about_kernels
from holdfast.worker.engine.probe import choose_layout, warnings_about
from holdfast.worker.engine.sharing import choose_sharing
from holdfast.worker.engine.weight_format import give_back_freed_memory
from holdfast.worker.loop.cache_setup import open_cache, open_sessions
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.inbox import Inbox
from holdfast.worker.loop.lifecycle import Progress
from holdfast.worker.loop.loop import WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.loop.memory_setup import WorkerMemory, divide_memory
from holdfast.worker.loop.pulse import Pulse
from holdfast.worker.prefix.no_cache import NoCache
from holdfast.worker.scheduler.decision import SequenceCosts
from holdfast.worker.scheduler.scheduler import Scheduler

STEP_TOKENS_ON_CPU = 512
STEP_TOKENS_ON_GPU = 2048
LOAD_ATTEMPTS = 3  # for a model that somebody is writing to

logger = logging.getLogger("holdfast.worker.loop")


def build_loop(
    inbox: Inbox, progress: Progress, *, settings: WorkerSettings, pulse: Pulse
) -> tuple[WorkerLoop, ModelInfo]:
    """Load and probe the model and put the loop together.

    Raises ModelLoadError when the model or a setting is at fault.

    A model that is changed while it is loaded is loaded again: what is in memory would be of no
    version, and so would its states.
    """
    folder = Path(settings.folder)
    own_code = runs_own_code(folder, trust_remote_code=settings.model.trust_remote_code)
    files = partial(files_of_identity, folder, runs_own_code=own_code)
    cache = HashCache(Path(settings.hash_cache) if settings.hash_cache else None)
    for attempts_left in reversed(range(LOAD_ATTEMPTS)):
        try:
            with FileHashing(files, cache=cache) as hashing:
                return _loop_over(inbox, progress, hashing, settings=settings, pulse=pulse)
        except ModelChanged as change:
            if not attempts_left:
                raise
            logger.warning("%s; it is loaded again", change)
        _give_back_memory()  # behind the handler: the error holds what was loaded
    raise AssertionError("unreachable")


def _loop_over(
    inbox: Inbox,
    progress: Progress,
    hashing: FileHashing,
    *,
    settings: WorkerSettings,
    pulse: Pulse,
) -> tuple[WorkerLoop, ModelInfo]:
    started_at = time.perf_counter()
    model = settings.model
    platform.use_device(model.device)
    loaded = load_model(Path(settings.folder), model, progress=progress)
    grammars = Grammars(Path(settings.folder), vocab_size=loaded.vocab_size)
    grammars.prepare()
    progress("probing", 0.0)
    runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size, wanted=model.layout)
    warnings = _warned(loaded, runner)
    constraints = Constraints(grammars, vocab_size=loaded.vocab_size)
    engine = Engine(runner, vocab_size=loaded.vocab_size, constraints=constraints)
    measured = engine.measure_costs()
    choose_sharing(runner)
    costs = SequenceCosts(
        kv_bytes_per_token=measured.bytes_per_token, fixed_bytes_per_sequence=measured.fixed_bytes
    )
    step_tokens = _step_tokens(settings.scheduler, on_cpu=loaded.platform.device == "cpu")
    scheduler = replace(settings.scheduler, step_tokens=step_tokens)
    memory = divide_memory(engine, loaded, measured, settings=settings, step_tokens=step_tokens)
    plans = Scheduler(
        scheduler,
        costs,
        budget_bytes=memory.plan.kv_bytes,
        context_tokens=loaded.context_tokens,
        mixes_chunks=engine.mixes_chunks,
        bounds=memory.bounds,
    )
    progress("probing", 1.0)
    progress("hashing", 0.0)  # it began with the load, and has mostly ended by now
    kept = open_cache(
        loaded,
        measured,
        hashes=hashing.result(),
        settings=settings,
        ram_tier_bytes=memory.plan.ram_tier_bytes,
    )
    budget = MemoryBudget(
        memory.plan,
        scheduler=plans,
        cache=NoCache() if kept is None else kept,
        most_parked_bytes=settings.store.ram_bytes,
        clear_buffers=_give_back_memory,
        plan_for=memory.plan_for,
        read_pressure=pressure_reader(),
    )
    loop = WorkerLoop(
        engine=engine,
        scheduler=plans,
        inbox=inbox,
        retry_chunk_tokens=step_tokens,
        cache=kept,
        sessions=None
        if kept is None
        else open_sessions(kept, settings.store, context_tokens=loaded.context_tokens),
        memory=budget,
        on_rest=_rest,
        on_wake=partial(platform.wire, memory.wired_bytes),
        pulse=pulse,
        counters=Counters(constraints=constraints.figures, device_bytes=platform.taken_bytes),
    )
    _give_back_memory()
    # what was loaded; the buffers of a step come later, and are not
    platform.wire(memory.wired_bytes)
    # model and modules live as long as the worker: no collection between two steps need look at
    # them
    gc.freeze()
    progress("hashing", 1.0)
    load_seconds = time.perf_counter() - started_at
    info = _info(loaded, runner, costs, memory, load_seconds=load_seconds)
    return loop, msgspec.structs.replace(info, warnings=warnings)


def _warned(loaded: LoadedModel, runner: Runner) -> tuple[str, ...]:
    """What a user has to know of this model; it is in the log too."""
    warnings = (*warnings_about(runner), *warnings_about_kernels(loaded.model))
    for warning in warnings:
        logger.warning("%s", warning)
    return warnings


def _rest() -> None:
    """Take nothing from others while there is nothing to do: weights may be paged out, and free
    buffers go back.
    """
    platform.wire(0)
    _give_back_memory()


def _give_back_memory() -> None:
    """Return what loading or a busy time has left unused: measured after loading the demo model, 84
    MB resident become 61.
    """
    gc.collect()
    give_back_freed_memory()


def let_go_of_device() -> None:
    """The last thing a device thread does: MLX aborts at exit when a thread's streams are still
    there.
    """
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()


def _step_tokens(scheduler: SchedulerSettings, *, on_cpu: bool) -> int:
    """The size of a step: as set, or what suits the device, where that was left to us."""
    if scheduler.step_tokens is not None:
        return scheduler.step_tokens
    suits = STEP_TOKENS_ON_CPU if on_cpu else STEP_TOKENS_ON_GPU
    return max(suits, scheduler.max_running, scheduler.min_chunk_tokens)


def _info(
    loaded: LoadedModel,
    runner: Runner,
    costs: SequenceCosts,
    memory: WorkerMemory,
    *,
    load_seconds: float,
) -> ModelInfo:
    found = loaded.platform
    return ModelInfo(
        model_type=loaded.model_type,
        layout=runner.name,
        layout_reason=runner.reason,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        compute_dtype=str(loaded.compute_dtype).removeprefix("mlx.core."),
        context_tokens=loaded.context_tokens,
        vocab_size=loaded.vocab_size,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        fixed_bytes_per_sequence=costs.fixed_bytes_per_sequence,
        kv_budget_bytes=memory.plan.kv_bytes,
        device=found.device_name or found.device,
        is_on_cpu=found.device == "cpu",
        wired_bytes=memory.wired_bytes,
        reserve_bytes=memory.reserve_bytes,
        device_memory_bytes=found.memory.working_set_bytes,
        embedding_dimensions=runner.hidden_size,
        blas=str(found.blas),
        load_seconds=load_seconds,
    )
