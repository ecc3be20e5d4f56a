"""How a worker divides the memory that its model leaves free, and what it gives back while it is idle.

`MemoryBudget` changes the division while the worker serves. Device thread only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.machine import device_memory, memory_plan, platform
from holdfast.machine.memory_plan import MemoryPlan, MemoryShare
from holdfast.wire.commands import WorkerSettings
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.load import LoadedModel
from holdfast.worker.engine.weight_format import give_back_freed_memory
from holdfast.worker.kv.bits import AUTO_WHEN_SHORT
from holdfast.worker.kv.layer import HeadsForm
from holdfast.worker.scheduler.cost_model import UNBOUNDED, ChunkBounds
from holdfast.worker.scheduler.sequence import SequenceCosts
from holdfast.worker.vision.feature_cache import FEATURE_RAM_BYTES
from holdfast.worker.vision.images import MOST_INPUT_BYTES

# longest step that only prefills: the GPU watchdog of macOS kills much longer steps (mlx-lm#1572)
ALONE_SECONDS = 1.5
WARM_UP_TOKENS = 256  # prefilled once after loading, to measure the memory of a step
LEAST_CACHE_BYTES = 512 << 20
_CACHE_MARGIN = 1.25
_FUSED_HEAD_DIMENSIONS = {64, 80, 96, 128}  # MLX's fused attention stores no scores for these
_SCORE_COPIES = 3  # scores, softmax, and the result being written
_SCORE_ITEM_BYTES = 2
_SCORE_PARTS = 16  # attention scores may take 1/16 of the working set


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """How the memory of a worker is divided."""

    plan: MemoryPlan
    # returns the plan for a given number of bytes for KV and cached blocks
    plan_for: Callable[[int], MemoryPlan]
    bounds: ChunkBounds
    reserve_bytes: int  # for activations, attention scores and reused buffers
    wired_bytes: int


def divide_memory(
    engine: Engine,
    loaded: LoadedModel,
    costs: KVCosts,
    *,
    settings: WorkerSettings,
    step_tokens: int,
    draft_costs: KVCosts | None = None,
    draft_weight_bytes: int = 0,
) -> WorkerMemory:
    """Measure the memory of a step, divide the memory that the weights leave, and set MLX's limits.

    draft_costs: of a sequence in the draft model, if there is one. Raises ModelLoadError if the
    settings request more memory than there is.
    """
    working_set_bytes = platform.working_set_bytes()
    bounds = UNBOUNDED
    activation_bytes = 0
    cache_bytes = 0
    if working_set_bytes:
        activation_bytes, reused_bytes = engine.measure_step(min(WARM_UP_TOKENS, step_tokens))
        scale = max(1.0, step_tokens / WARM_UP_TOKENS)
        activation_bytes = int(activation_bytes * scale)
        cache_bytes = max(LEAST_CACHE_BYTES, int(reused_bytes * scale * _CACHE_MARGIN))
        bounds = chunk_bounds(loaded.model, costs, working_set_bytes=working_set_bytes)
    image_bytes = 0 if loaded.images is None else FEATURE_RAM_BYTES + MOST_INPUT_BYTES
    reserve_bytes = activation_bytes + cache_bytes + bounds.score_bytes + image_bytes
    weight_bytes = loaded.weight_bytes + draft_weight_bytes
    full_costs = sequence_costs(costs, draft_costs)
    memory = device_memory.memory_report(working_set_bytes=working_set_bytes)
    plan_memory = partial(
        memory_plan.plan_memory,
        memory,
        weight_bytes=weight_bytes,
        kv_bytes=settings.model.memory_bytes,
        ram_tier_bytes=settings.store.ram_bytes,
        reserve_bytes=reserve_bytes,
        full_context_bytes=full_costs.bytes_for(loaded.context_tokens),
    )
    plan = plan_memory(share=settings.share)
    if cache_bytes:
        platform.bound_memory(
            cache_bytes=cache_bytes,
            total_bytes=weight_bytes + plan.kv_bytes + plan.ram_tier_bytes + reserve_bytes,
        )
    wired_bytes = memory_plan.wired_bytes(
        settings.model.wired_bytes,
        weight_bytes=weight_bytes,
        working_set_bytes=working_set_bytes,
        share=settings.share,
    )
    return WorkerMemory(
        plan=plan,
        bounds=bounds,
        reserve_bytes=reserve_bytes,
        wired_bytes=wired_bytes,
        plan_for=lambda state_bytes: plan_memory(share=MemoryShare(state_bytes=state_bytes)),
    )


def contexts_that_fit(
    forms: KVForms, kv_bytes: int, *, most_tokens: int, draft: KVCosts | None = None
) -> dict[str, int]:
    """The length of the longest sequence that fits a KV budget, for each form of keys and values,
    but at most `most_tokens`. draft: the costs of a sequence in a draft model, if there is one.
    """
    context_tokens: dict[str, int] = {}
    for form, kv_costs in forms.costs.items():
        costs = sequence_costs(kv_costs, draft)
        context_tokens[form] = costs.longest_sequence(kv_bytes, most_tokens=most_tokens)
    # "auto": a sequence that does not fit natively is quantized
    auto_tokens = context_tokens["native"]
    if auto_tokens < most_tokens and not forms.refusal(AUTO_WHEN_SHORT):
        auto_tokens = max(auto_tokens, context_tokens[AUTO_WHEN_SHORT])
    return {**context_tokens, "auto": auto_tokens}


def sequence_costs(costs: KVCosts, draft: KVCosts | None) -> SequenceCosts:
    """The memory of a sequence, with that of its state in a draft model (None: there is none)."""
    return SequenceCosts(
        kv_bytes_per_token=costs.bytes_per_token,
        fixed_bytes_per_sequence=costs.fixed_bytes + (0 if draft is None else draft.fixed_bytes),
        draft_bytes_per_token=0 if draft is None else draft.bytes_per_token,
    )


def chunk_bounds(model: Any, costs: KVCosts, *, working_set_bytes: int) -> ChunkBounds:
    """Limits for the size of prompt chunks on a GPU: the duration of a step, and the memory that
    attention scores take for head dimensions without a fused kernel.
    """
    heads = getattr(getattr(model, "args", None), "num_attention_heads", None)
    layer_forms = () if costs.form is None else costs.form.block
    dimensions = {each.dimension for each in layer_forms if isinstance(each, HeadsForm)}
    if not isinstance(heads, int) or dimensions <= _FUSED_HEAD_DIMENSIONS:
        return ChunkBounds(seconds=ALONE_SECONDS)
    return ChunkBounds(
        seconds=ALONE_SECONDS,
        score_bytes_per_pair=heads * _SCORE_ITEM_BYTES * _SCORE_COPIES,
        score_bytes=working_set_bytes // _SCORE_PARTS,
    )


def release_memory_while_idle() -> None:
    """Let the system page weights out, and release free buffers, while the worker is idle."""
    platform.wire(0)
    give_back_memory()


def free_memory(engine: Engine) -> None:
    """Free what is kept for later use only, because memory is short."""
    if engine.images is not None:
        engine.images.free_cached()
    give_back_memory()


def give_back_memory() -> None:
    """Return unused memory to the system after loading or a busy time: after loading the demo
    model, resident memory falls from 84 to 61 MB (measured).
    """
    gc.collect()
    give_back_freed_memory()
