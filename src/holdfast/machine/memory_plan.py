"""Divides the memory that the weights of models leave free: between the loaded models, and in a worker
between KV and cached blocks. The settings may give other sizes than these.

A working set is the memory that the system lets a GPU use. With unified memory, GPU and processor share
the machine's memory. The RAM tier is the cached blocks in RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ModelLoadError
from holdfast.machine.device_memory import DeviceMemory

# KV gets this share of the memory that is free after loading; the rest is for activations,
# snapshots and other programs
_KV_SHARE = 0.6
# on a GPU with unified memory, KV and cached blocks get this share of the part of the working set
# that weights and steps leave free
_UNIFIED_SHARE = 0.8
_RAM_TIER_PARTS = 4  # cached blocks in RAM get the KV budget divided by this
# weights are wired if they are at least this share of the working set; the system need not page
# out smaller ones
_WIRED_FROM_SHARE = 0.4
_WIRED_MARGIN = 1.01  # because buffers are rounded up to whole pages
_SMALLEST_BUDGET_BYTES = 64 << 20
_LARGEST_AUTO_BUDGET_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """The part of the memory that a worker may use, considering the other workers."""

    parts: int = 1  # the memory for KV has this many equal parts, of which this worker gets one
    promised_bytes: int = 0  # memory that other workers may still allocate
    # memory used by other workers; for devices that report only their total memory
    taken_bytes: int = 0
    wired_bytes: int = 0  # memory wired by other workers
    # memory for KV and cached blocks in RAM, on a GPU that shares the machine's memory; None:
    # unknown
    state_bytes: int | None = None


ALL_OF_IT = MemoryShare()  # the share of a worker that is alone


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a worker divides the memory that its weights leave free."""

    kv_bytes: int  # live KV and recurrent states
    ram_tier_bytes: int  # cached blocks in RAM


def plan_memory(
    memory: DeviceMemory,
    *,
    weight_bytes: int,
    kv_bytes: int | None = None,
    ram_tier_bytes: int | None = None,
    reserve_bytes: int = 0,
    full_context_bytes: int = 0,
    share: MemoryShare = ALL_OF_IT,
) -> MemoryPlan:
    """Divide the memory that the weights leave free. Call it after loading.

    kv_bytes, ram_tier_bytes: the settings model.memory_bytes and store.ram_bytes; None: automatic.

    reserve_bytes: memory that a step needs besides KV, for activations and reused buffers.

    full_context_bytes: KV of one sequence that fills the model's context.

    On a GPU with unified memory, the budget ignores what other programs use now, because the system
    makes room for a working set. There, KV and cached blocks together get a share of the part of
    the working set that weights and steps leave free. KV gets at least one full context if
    possible. On other machines, the KV budget is a share of the free memory. Raises ModelLoadError
    if the settings ask for more than exists.
    """
    is_unified_gpu = memory.unified and memory.working_set_bytes > 0
    _check_requested(kv_bytes, memory)
    if is_unified_gpu:
        free_bytes = share.state_bytes
        if free_bytes is None:
            worker_bytes = weight_bytes + reserve_bytes
            free_bytes = state_bytes(
                memory.working_set_bytes, taken_bytes=(worker_bytes,), parts=share.parts
            )
        return _plan_of_working_set(
            free_bytes=free_bytes,
            kv_bytes=kv_bytes,
            ram_tier_bytes=ram_tier_bytes,
            full_context_bytes=full_context_bytes,
        )
    if kv_bytes is None:
        free_bytes = memory.available_bytes
        if memory.working_set_bytes:
            free_bytes = memory.working_set_bytes - weight_bytes - share.taken_bytes - reserve_bytes
        part_bytes = (free_bytes - share.promised_bytes) // share.parts
        kv_bytes = _bounded_budget(int(part_bytes * _KV_SHARE))
    if ram_tier_bytes is None:
        ram_tier_bytes = kv_bytes // _RAM_TIER_PARTS
    return MemoryPlan(kv_bytes=kv_bytes, ram_tier_bytes=ram_tier_bytes)


def _check_requested(kv_bytes: int | None, memory: DeviceMemory) -> None:
    """Raise ModelLoadError if the setting model.memory_bytes is more than the device's memory."""
    is_discrete = memory.working_set_bytes > 0 and not memory.unified
    total_bytes = memory.working_set_bytes if is_discrete else memory.total_bytes
    if kv_bytes is not None and kv_bytes > total_bytes:
        raise ModelLoadError(
            f"model.memory_bytes = {kv_bytes:,} is more than the {total_bytes:,} bytes of memory "
            "on this machine"
        )


def state_bytes(working_set_bytes: int, *, taken_bytes: Sequence[int], parts: int = 1) -> int:
    """How many bytes each loaded model may use for KV and cached blocks in RAM.

    This is an equal part of the memory that the loaded models leave of the working set.
    taken_bytes: weights and step memory of each loaded model. parts: the working set is divided by
    this first, to leave room for other models whose weights are unknown.
    """
    free_bytes = working_set_bytes // parts - sum(taken_bytes)
    return max(0, free_bytes // len(taken_bytes))


def _plan_of_working_set(
    *, free_bytes: int, kv_bytes: int | None, ram_tier_bytes: int | None, full_context_bytes: int
) -> MemoryPlan:
    """Divide a share of the free part of a working set between KV and cached blocks in RAM; if KV
    would not hold a full context, it gets more than this share if possible.
    """
    cache_bytes = int(free_bytes * _UNIFIED_SHARE)
    if kv_bytes is None:
        if ram_tier_bytes is None:
            kv_bytes = cache_bytes * _RAM_TIER_PARTS // (_RAM_TIER_PARTS + 1)
        else:
            kv_bytes = cache_bytes - ram_tier_bytes
        if kv_bytes < full_context_bytes <= free_bytes - (ram_tier_bytes or 0):
            kv_bytes = full_context_bytes
        kv_bytes = _bounded_budget(kv_bytes)
    if ram_tier_bytes is None:
        ram_tier_bytes = max(0, min(cache_bytes // (_RAM_TIER_PARTS + 1), free_bytes - kv_bytes))
    return MemoryPlan(kv_bytes=kv_bytes, ram_tier_bytes=ram_tier_bytes)


def _bounded_budget(kv_bytes: int) -> int:
    """An automatic budget within the limits: enough for short requests, and no absurd number."""
    return min(max(kv_bytes, _SMALLEST_BUDGET_BYTES), _LARGEST_AUTO_BUDGET_BYTES)


def wired_bytes(
    requested: int | None,
    *,
    weight_bytes: int,
    working_set_bytes: int,
    share: MemoryShare = ALL_OF_IT,
) -> int:
    """How much memory a worker wires (never pages out) while it serves.

    requested: the setting model.wired_bytes; None: wire the weights if they are a large part of the
    working set. All workers together never wire more than the working set. Wiring a whole working
    set under load can cause a kernel panic (ml-explore/mlx#3186); wiring nothing makes a model near
    the limit 40 times slower (vmlx-swift#418).
    """
    if requested is None:
        is_heavy = weight_bytes >= working_set_bytes * _WIRED_FROM_SHARE
        requested = int(weight_bytes * _WIRED_MARGIN) if is_heavy else 0
    return max(0, min(requested, working_set_bytes - share.wired_bytes))
