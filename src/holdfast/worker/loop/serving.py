"""Builds the loop of a worker from a model folder.

Importing this module imports MLX: device thread only.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.config import ModelSettings, SchedulerSettings, StoreSettings
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.machine import device_memory, platform
from holdfast.machine.device_memory import pressure_reader
from holdfast.models.file_hashing import FileHashing, HashCache, ModelChanged
from holdfast.models.weight_files import checked_tensor_bytes
from holdfast.store.block import StoreRefused
from holdfast.store.maintenance import store_limits
from holdfast.store.store import BlockStore
from holdfast.wire.commands import WorkerSettings
from holdfast.wire.events import ModelInfo
from holdfast.wire.images import VisionInfo
from holdfast.worker.cpu.blas import current_blas
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.engine.backend import Backend
from holdfast.worker.engine.constraints import Constraints, Grammars
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.fingerprint import Fingerprints, identity_lister
from holdfast.worker.engine.image_probe import probe_images
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.layouts import Runner, choose_sharing
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.engine.probe import (
    choose_layout,
    choose_runner,
    probe_kv_forms,
    warnings_about,
    warnings_about_kernels,
)
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.codec import PayloadFormat
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.device import use_device
from holdfast.worker.loop.device_steps import log_failure
from holdfast.worker.loop.inbox import Inbox, Progress, Pulse
from holdfast.worker.loop.loop import ModelOptions, WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.loop.worker_memory import (
    WorkerMemory,
    contexts_that_fit,
    divide_memory,
    free_memory,
    give_back_memory,
    release_memory_while_idle,
    sequence_costs,
)
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from holdfast.worker.sessions.service import SessionService
from holdfast.worker.vision.feature_cache import FEATURE_DISK_BYTES, FEATURE_RAM_BYTES, FeatureCache
from holdfast.worker.vision.image_process import ImageProcess
from holdfast.worker.vision.images import WorkerImages
from holdfast.worker.vision.model import VisionModel

cache_logger = logging.getLogger("holdfast.cache")
_FEATURES = "features"
_KEPT_DRAFT_PARTS = 32  # states of the draft model without a sequence: 1/32 of the KV budget
_MOST_OF_FREE_MEMORY = 0.1  # for the weights of a draft model that nobody asked for
LOAD_ATTEMPTS = 3  # in case the model's files change while they are loaded

logger = logging.getLogger("holdfast.worker")


def open_cache(
    costs: KVCosts,
    *,
    fingerprints: Fingerprints,
    settings: WorkerSettings,
    ram_tier_bytes: int,
) -> PrefixCache | None:
    """Open the prefix cache of a model; returns None for a layout whose state cannot be cached.

    ram_tier_bytes: the limit for blocks in RAM. Raises ConfigError if the store's folder cannot be
    used.
    """
    if costs.form is None:
        return None  # the probe has warned about this
    store = settings.store
    fingerprint = fingerprints.model
    blocks = (
        _open_store(store, fingerprint, served_as=settings.model.name) if store.folder else None
    )
    index = PrefixIndex(fingerprint=fingerprint, ram_budget_bytes=ram_tier_bytes, disk=blocks)
    return PrefixCache(
        index,
        store=blocks,
        payloads=PayloadFormat(model=costs.form),
        most_parked_bytes=store.ram_bytes,
        fingerprints=fingerprints,
    )


def _open_store(store: StoreSettings, fingerprint: str, *, served_as: str) -> BlockStore:
    limits = store_limits(store)
    try:
        return BlockStore(
            Path(store.folder),
            fingerprint=fingerprint,
            served_as=served_as,
            limits=limits,
        )
    except StoreRefused as refusal:
        raise ConfigError(f"store.folder = {store.folder!r}: {refusal}") from refusal


def build_loop(
    inbox: Inbox, progress: Progress, *, settings: WorkerSettings, pulse: Pulse
) -> tuple[WorkerLoop, ModelInfo]:
    """Load and probe the model, and build the loop.

    If the model's files change during the load, the model is loaded again, because it could be a
    mix of two versions. Raises ModelLoadError if the model or a setting is invalid.
    """
    folder = Path(settings.folder)
    files = identity_lister(folder, settings.model)
    cache = HashCache(Path(settings.hash_cache) if settings.hash_cache else None)
    for attempts_left in reversed(range(LOAD_ATTEMPTS)):
        try:
            with FileHashing(files, cache=cache) as hashing:
                return _load_and_build(inbox, progress, hashing, settings=settings, pulse=pulse)
        except ModelChanged as change:
            if not attempts_left:
                raise
            logger.warning("%s; the model is loaded again", change)
        # outside the except block, because there the exception still references the loaded model
        give_back_memory()
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A loaded draft model. costs: of a sequence in it."""

    name: str
    engine: Engine
    costs: KVCosts
    weight_bytes: int
    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """A loaded model with its engine and the measured costs."""

    loaded: LoadedModel
    runner: Runner
    constraints: Constraints
    engine: Engine
    forms: KVForms
    draft: LoadedDraft | None = None

    def open_images(self, settings: WorkerSettings, *, fingerprint: str) -> None:
        """Let the engine process images, if the model can and a test of its images succeeds."""
        loaded = self.loaded
        if loaded.images is None or not isinstance(loaded.model, VisionModel):
            return
        folder = Path(settings.images)
        features = FeatureCache(
            folder / _FEATURES if settings.images else None,
            fingerprint=fingerprint,
            ram_bytes=FEATURE_RAM_BYTES,
            disk_bytes=FEATURE_DISK_BYTES,
        )
        processor = loaded.images
        reader = ImageProcess(Path(settings.folder), lambda: processor.info, images=folder)
        open_with = partial(WorkerImages, loaded.model, processor, reader=reader)
        test_features = FeatureCache(
            None, fingerprint="", ram_bytes=FEATURE_RAM_BYTES, disk_bytes=0
        )
        loaded.images.info = probe_images(self.runner, open_with(features=test_features))
        if not loaded.images.info.refused:
            self.engine.images = open_with(features=features)

    @property
    def costs(self) -> KVCosts:
        """The memory of a sequence that does not choose its form, without memory pressure."""
        return self.forms.costs[self.forms.default_now]

    @property
    def draft_costs(self) -> KVCosts | None:
        return None if self.draft is None else self.draft.costs

    @property
    def contexts_of(self) -> Callable[[int], dict[str, int]]:
        """Returns, for a KV budget in bytes, the longest context that fits in each form of keys and
        values. The function does not refer to the draft model, so that this can be freed if it fails.
        """
        return partial(
            contexts_that_fit,
            self.forms,
            most_tokens=self.loaded.context_tokens,
            draft=self.draft_costs,
        )

    def sequence_costs(self, form: KVBits) -> SequenceCosts:
        """The memory that the scheduler reserves for a sequence with keys and values in a form."""
        costs = sequence_costs(self.forms.costs[form], self.draft_costs)
        ends_at_blocks = form != "native" and self.engine.ends_spans_at_blocks
        return replace(costs, form=form, block_tokens=BLOCK_TOKENS if ends_at_blocks else None)


def _load_and_build(
    inbox: Inbox,
    progress: Progress,
    hashing: FileHashing,
    *,
    settings: WorkerSettings,
    pulse: Pulse,
) -> tuple[WorkerLoop, ModelInfo]:
    started_at = time.perf_counter()
    probed = _load_and_probe(settings, progress)
    step_tokens = _chosen_step_tokens(settings.scheduler, probed.runner.backend)
    memory = divide_memory(
        probed.engine,
        probed.loaded,
        probed.costs,
        settings=settings,
        step_tokens=step_tokens,
        draft_costs=probed.draft_costs,
        draft_weight_bytes=0 if probed.draft is None else probed.draft.weight_bytes,
    )
    scheduler = _new_scheduler(probed, memory, replace(settings.scheduler, step_tokens=step_tokens))
    progress("probing", 1.0)
    progress("hashing", 0.0)  # hashing began with the load, and is mostly done by now
    fingerprints = probed.loaded.fingerprints(Path(settings.folder), hashing.result())
    probed.open_images(settings, fingerprint=fingerprints.model)
    cache = open_cache(
        probed.costs,
        fingerprints=fingerprints,
        settings=settings,
        ram_tier_bytes=memory.plan.ram_tier_bytes,
    )
    loop = _build_worker_loop(
        inbox,
        probed,
        scheduler,
        cache=cache,
        fingerprints=fingerprints,
        memory=memory,
        settings=settings,
        step_tokens=step_tokens,
        pulse=pulse,
    )
    give_back_memory()
    # only now, so that the model is wired, but not the buffers of steps
    platform.wire(memory.wired_bytes)
    gc.freeze()  # model and modules live as long as the worker: garbage collection can skip them
    progress("hashing", 1.0)
    info = _model_info(
        probed,
        memory,
        load_seconds=time.perf_counter() - started_at,
        fingerprint=fingerprints.model,
    )
    return loop, info


def _new_scheduler(probed: _Probed, memory: WorkerMemory, settings: SchedulerSettings) -> Scheduler:
    return Scheduler(
        settings,
        probed.sequence_costs(probed.forms.default_now),
        budget_bytes=memory.plan.kv_bytes,
        context_tokens=probed.loaded.context_tokens,
        mixes_chunks=probed.engine.mixes_chunks,
        bounds=memory.bounds,
    )


def _load_and_probe(settings: WorkerSettings, progress: Progress) -> _Probed:
    """Load the model, and find out by tests how it can be run and what its sequences cost."""
    model = settings.model
    use_device(model.device)
    loaded = load_model(Path(settings.folder), model, progress=progress)
    grammars = Grammars(Path(settings.folder), vocab_size=loaded.vocab_size)
    grammars.prepare()
    progress("probing", 0.0)
    runner = choose_runner(loaded, wanted_layout=model.layout)
    constraints = Constraints(grammars, vocab_size=loaded.vocab_size)
    engine = Engine(runner, vocab_size=loaded.vocab_size, constraints=constraints)
    forms = probe_kv_forms(engine, runner, vocab_size=loaded.vocab_size)
    forms.choose_default(model)
    choose_sharing(runner)
    return _Probed(
        loaded=loaded,
        runner=runner,
        constraints=constraints,
        engine=engine,
        forms=forms,
        draft=_chosen_draft(settings, loaded) if _speculates(engine, model) else None,
    )


def _chosen_draft(settings: WorkerSettings, model: LoadedModel) -> LoadedDraft | None:
    """Load the draft model, if there is one. One that was found, not asked for, is left out where it
    does not fit. Raises ModelLoadError if the one that was asked for cannot draft.
    """
    if not settings.draft_folder:
        return None
    if settings.model.speculation != "auto":
        return _load_draft(settings)
    reason = _reason_not_to_load(Path(settings.draft_folder), model)
    if not reason:
        try:
            return _load_draft(settings)
        except ModelLoadError as error:
            reason = str(error)
    logger.info(
        "%s could draft for %s, but is not used: %s; to use it: --speculation %s",
        settings.draft_name,
        settings.model.name,
        reason,
        settings.draft_name,
    )
    return None


def _load_draft(settings: WorkerSettings) -> LoadedDraft:
    """Load the draft model. Raises ModelLoadError if it cannot draft."""
    draft_settings = settings.model.of_base_model(context_tokens=None)
    loaded = load_model(
        Path(settings.draft_folder), draft_settings, progress=lambda stage, fraction: None
    )
    runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size)
    engine = Engine(runner, vocab_size=loaded.vocab_size)
    costs = engine.measure_costs()
    if costs.form is None:
        raise ModelLoadError(
            f"{settings.draft_name} cannot draft for {settings.model.name}: its state cannot go back "
            "to an earlier token"
        )
    return LoadedDraft(
        name=settings.draft_name,
        engine=engine,
        costs=costs,
        weight_bytes=loaded.weight_bytes,
        vocab_size=loaded.vocab_size,
        context_tokens=loaded.context_tokens,
    )


def _reason_not_to_load(draft: Path, model: LoadedModel) -> str:
    """Why a draft model that was found, not asked for, should not be loaded; empty: it should."""
    if model.platform.device != "cpu":
        return "what it gains was not measured on a GPU"
    free_bytes = device_memory.memory_report().available_bytes
    # float32 takes twice the bytes of a file in 16 bits
    if 2 * checked_tensor_bytes(draft) > free_bytes * _MOST_OF_FREE_MEMORY:
        return "there is too little free memory"
    return ""


def _draft_model(draft: LoadedDraft | None, *, kv_bytes: int) -> DraftModel | None:
    """Try the draft model out; None if there is none, or if it fails."""
    model: DraftModel | None = None
    if draft is not None:
        with log_failure("the draft model %s failed, and is not used", draft.name):
            model = DraftModel(
                draft.engine,
                name=draft.name,
                vocab_size=draft.vocab_size,
                context_tokens=draft.context_tokens,
                most_cached_bytes=kv_bytes // _KEPT_DRAFT_PARTS,
            )
    return model


def _build_worker_loop(
    inbox: Inbox,
    probed: _Probed,
    scheduler: Scheduler,
    *,
    cache: PrefixCache | None,
    fingerprints: Fingerprints,
    memory: WorkerMemory,
    settings: WorkerSettings,
    step_tokens: int,
    pulse: Pulse,
) -> WorkerLoop:
    store = settings.store
    sessions = None
    if cache is not None:
        sessions = SessionService(
            cache,
            most=store.max_sessions,
            ttl_seconds=store.session_seconds,
            pinned_percent=store.pinned_percent,
            context_tokens=probed.loaded.context_tokens,
        )
    budget = MemoryBudget(
        memory.plan,
        plan_for=memory.plan_for,
        contexts_of=probed.contexts_of,
        scheduler=scheduler,
        cache=cache,
        most_parked_bytes=store.ram_bytes,
        clear_buffers=partial(free_memory, probed.engine),
        read_pressure=pressure_reader(),
    )
    counters = Counters(constraints=probed.constraints.figures, device_bytes=platform.taken_bytes)
    if probed.engine.images is not None:
        counters.images = probed.engine.images.figures
    return WorkerLoop(
        engine=probed.engine,
        scheduler=scheduler,
        inbox=inbox,
        model=ModelOptions(
            retry_chunk_tokens=step_tokens,
            fingerprints=fingerprints,
            forms=probed.forms,
            costs={form: probed.sequence_costs(form) for form in probed.forms.costs},
            speculates=_speculates(probed.engine, settings.model),
            draft_model=_draft_model(probed.draft, kv_bytes=memory.plan.kv_bytes),
        ),
        cache=cache,
        sessions=sessions,
        memory=budget,
        on_rest=release_memory_while_idle,
        on_wake=partial(platform.wire, memory.wired_bytes),
        pulse=pulse,
        counters=counters,
    )


def _speculates(engine: Engine, model: ModelSettings) -> bool:
    return model.speculation != "off" and not engine.speculation_refused


def _chosen_step_tokens(scheduler: SchedulerSettings, backend: Backend) -> int:
    """The step size of the settings, or the default for the device if the settings have none."""
    if scheduler.step_tokens is not None:
        return scheduler.step_tokens
    return max(backend.step_tokens, scheduler.max_running, scheduler.min_chunk_tokens)


def _model_info(
    probed: _Probed,
    memory: WorkerMemory,
    *,
    load_seconds: float,
    fingerprint: str,
) -> ModelInfo:
    loaded = probed.loaded
    context_tokens_by_form = _contexts_that_fit(probed, memory)
    runner = probed.runner
    machine = loaded.platform
    forms = probed.forms
    warnings = (
        *warnings_about(runner),
        *warnings_about_kernels(loaded.model),
        *forms.warnings,
    )
    for warning in warnings:
        logger.warning("%s", warning)
    return ModelInfo(
        model_type=loaded.model_type,
        layout=runner.name,
        layout_reason=runner.reason,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        compute_dtype=str(loaded.compute_dtype).removeprefix("mlx.core."),
        context_tokens=context_tokens_by_form[forms.default],
        own_context_tokens=loaded.own_context_tokens,
        vocab_size=loaded.vocab_size,
        fingerprint=fingerprint,
        kv=forms.health(),
        context_tokens_by_bits=context_tokens_by_form,
        fixed_bytes_per_sequence=probed.costs.fixed_bytes,
        kv_budget_bytes=memory.plan.kv_bytes,
        device=machine.device_name or machine.device,
        is_on_cpu=machine.device == "cpu",
        wired_bytes=memory.wired_bytes,
        reserve_bytes=memory.reserve_bytes,
        device_memory_bytes=machine.memory.working_set_bytes,
        embedding_dimensions=runner.hidden_size,
        blas=str(current_blas()),
        load_seconds=load_seconds,
        speculation_refused=probed.engine.speculation_refused,
        vision=_vision_info(loaded),
        draft_model="" if probed.draft is None else probed.draft.name,
        draft_weight_bytes=0 if probed.draft is None else probed.draft.weight_bytes,
        kept_layers=loaded.kept_layers,
        weights_note=loaded.weight_format.note,
        attention=runner.backend.describe_attention(loaded.model),
        warnings=warnings,
    )


def _vision_info(loaded: LoadedModel) -> VisionInfo | None:
    """What the model does with images, or why it refuses them; None for a model of text only."""
    if loaded.images is not None:
        return loaded.images.info
    if not loaded.images_refused:
        return None
    return VisionInfo(
        template_placeholder="", written="", placeholder="", refused=loaded.images_refused
    )


def _contexts_that_fit(probed: _Probed, memory: WorkerMemory) -> dict[str, int]:
    """The longest context, in tokens, whose KV fits the memory, for each supported form
    of keys and values. Logs a warning if that is less than the model's context.
    """
    context_tokens = probed.loaded.context_tokens
    context_tokens_by_form = probed.contexts_of(memory.plan.kv_bytes)
    if context_tokens_by_form[probed.forms.default] < context_tokens:
        logger.warning(
            "the context is limited to %s of %s tokens, because more does not fit the %.2f GiB "
            "for KV; model.memory_bytes sets how much KV may take",
            f"{context_tokens_by_form[probed.forms.default]:,}",
            f"{context_tokens:,}",
            memory.plan.kv_bytes / (1 << 30),
        )
    return context_tokens_by_form
