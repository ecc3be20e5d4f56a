"""Divides a worker's memory among weights, live KV, blocks in RAM and the steps themselves.

Device thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.machine import device_memory, platform
from holdfast.machine.device_memory import MemoryPlan, MemoryShare
from holdfast.wire.assignment import WorkerSettings
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.load import LoadedModel
from holdfast.worker.kv.form import HeadsForm
from holdfast.worker.scheduler.decision import UNBOUNDED, ChunkBounds

# longest step that only prefills: the GPU watchdog of macOS kills much longer ones (mlx-lm#1572)
ALONE_SECONDS = 1.5
WARM_UP_TOKENS = 256  # read once after loading, to measure what a step takes
LEAST_CACHE_BYTES = 512 << 20
_CACHE_MARGIN = 1.25
_FUSED_HEAD_DIMENSIONS = {64, 80, 96, 128}  # for which MLX's attention stores no scores
_SCORE_COPIES = 3  # scores, softmax, and what is being written
_SCORE_ITEM_BYTES = 2
_SCORE_PARTS = 16  # one part in so many of the working set is for attention scores


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """How much of what a worker may use."""

    plan: MemoryPlan
    bounds: ChunkBounds = UNBOUNDED
    reserve_bytes: int = 0  # for activations, attention scores and buffers that are used again
    wired_bytes: int = 0
    # for another number of bytes for KV and blocks
    plan_for: Callable[[int], MemoryPlan] | None = None


def divide_memory(
    engine: Engine,
    loaded: LoadedModel,
    costs: KVCosts,
    *,
    settings: WorkerSettings,
    step_tokens: int,
) -> WorkerMemory:
    """Measure what a step takes, divide what the weights leave, and tell MLX its limits.

    Raises ModelLoadError when more is requested than there is.
    """
    working_set_bytes = platform.working_set_bytes()
    bounds, activation_bytes, cache_bytes = UNBOUNDED, 0, 0
    if working_set_bytes:
        activation_bytes, used_again_bytes = engine.measure_step(min(WARM_UP_TOKENS, step_tokens))
        scale = max(1.0, step_tokens / WARM_UP_TOKENS)
        activation_bytes = int(activation_bytes * scale)
        cache_bytes = max(LEAST_CACHE_BYTES, int(used_again_bytes * scale * _CACHE_MARGIN))
        bounds = chunk_bounds(loaded.model, costs, working_set_bytes=working_set_bytes)
    reserve_bytes = activation_bytes + cache_bytes + bounds.score_bytes
    memory = device_memory.memory_report(working_set_bytes=working_set_bytes)
    plan_memory = partial(
        device_memory.plan_memory,
        memory,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=settings.model.memory_bytes,
        ram_tier_bytes=settings.store.ram_bytes,
        reserve_bytes=reserve_bytes,
        full_context_bytes=costs.bytes_per_token * loaded.context_tokens + costs.fixed_bytes,
    )
    plan = plan_memory(share=settings.share)
    if cache_bytes:
        platform.bound_memory(
            cache_bytes=cache_bytes,
            total_bytes=loaded.weight_bytes + plan.kv_bytes + plan.ram_tier_bytes + reserve_bytes,
        )
    wired_bytes = device_memory.wired_bytes(
        settings.model.wired_bytes,
        weight_bytes=loaded.weight_bytes,
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


def chunk_bounds(model: Any, costs: KVCosts, *, working_set_bytes: int) -> ChunkBounds:
    """The bounds of prompt chunks on a GPU.

    Attention of head dimensions that no fused kernel takes stores its scores.
    """
    heads = getattr(getattr(model, "args", None), "num_attention_heads", None)
    block = () if costs.form is None else costs.form.block
    dimensions = {each.dimension for each in block if isinstance(each, HeadsForm)}
    if not isinstance(heads, int) or dimensions <= _FUSED_HEAD_DIMENSIONS:
        return ChunkBounds(seconds=ALONE_SECONDS)
    return ChunkBounds(
        seconds=ALONE_SECONDS,
        score_bytes_per_pair=heads * _SCORE_ITEM_BYTES * _SCORE_COPIES,
        score_bytes=working_set_bytes // _SCORE_PARTS,
    )
