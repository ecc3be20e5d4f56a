from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from holdfast.errors import ModelLoadError
from holdfast.machine.device_memory import DeviceMemory
from holdfast.machine.memory_plan import (
    ALL_OF_IT,
    MemoryPlan,
    MemoryShare,
    plan_memory,
    state_bytes,
    wired_bytes,
)

GIB = 1 << 30


def test_a_requested_budget_is_used_if_it_fits() -> None:
    memory = DeviceMemory(total_bytes=8 * GIB, available_bytes=GIB)
    assert plan_memory(memory, weight_bytes=0, kv_bytes=3 * GIB).kv_bytes == 3 * GIB
    with pytest.raises(ModelLoadError, match="more than the"):
        plan_memory(memory, weight_bytes=0, kv_bytes=9 * GIB)


def test_without_a_gpu_the_budget_is_a_share_of_free_memory() -> None:
    memory = DeviceMemory(total_bytes=32 * GIB, available_bytes=10 * GIB)
    assert plan_memory(memory, weight_bytes=20 * GIB) == MemoryPlan(
        kv_bytes=6 * GIB, ram_tier_bytes=6 * GIB // 4
    )
    assert plan_memory(memory, weight_bytes=20 * GIB, ram_tier_bytes=0) == MemoryPlan(
        kv_bytes=6 * GIB, ram_tier_bytes=0
    )


def test_a_discrete_gpu_ignores_host_memory() -> None:
    memory = DeviceMemory(
        total_bytes=8 * GIB, available_bytes=GIB, working_set_bytes=80 * GIB, unified=False
    )
    assert plan_memory(memory, weight_bytes=20 * GIB).kv_bytes == 36 * GIB
    assert plan_memory(memory, weight_bytes=20 * GIB, kv_bytes=60 * GIB).kv_bytes == 60 * GIB
    assert plan_memory(memory, weight_bytes=20 * GIB, reserve_bytes=10 * GIB).kv_bytes == 30 * GIB


def test_a_crowded_machine_still_gets_a_small_budget() -> None:
    memory = DeviceMemory(total_bytes=GIB, available_bytes=0, working_set_bytes=1, unified=True)
    assert plan_memory(memory, weight_bytes=GIB).kv_bytes == 64 << 20


GB = 10**9
# working sets: reported for 32 and 128, assumed for 16 and 64
MACS = {16: 12.7 * GB, 32: 26.8 * GB, 64: 55.7 * GB, 128: 115.4 * GB}


@dataclass(frozen=True)
class Model:
    weight_bytes: int
    token_bytes: int
    context_tokens: int

    @property
    def full_context_bytes(self) -> int:
        return self.token_bytes * self.context_tokens


QWEN3_8B = Model(int(4.6 * GB), 147_456, 40_960)
QWEN3_30B = Model(int(17.2 * GB), 98_304, 40_960)
QWEN3_1B = Model(GB, 114_688, 40_960)


def a_mac(gigabytes: int, *, available_bytes: int | None = None) -> DeviceMemory:
    total_bytes = gigabytes << 30
    return DeviceMemory(
        total_bytes=total_bytes,
        available_bytes=total_bytes // 2 if available_bytes is None else available_bytes,
        working_set_bytes=int(MACS[gigabytes]),
        unified=True,
    )


def plan_of(memory: DeviceMemory, model: Model, share: MemoryShare = ALL_OF_IT) -> MemoryPlan:
    return plan_memory(
        memory,
        weight_bytes=model.weight_bytes,
        reserve_bytes=GB,
        full_context_bytes=model.full_context_bytes,
        share=share,
    )


def test_with_unified_memory_the_budget_ignores_other_programs() -> None:
    busy, idle = a_mac(16, available_bytes=1 << 30), a_mac(16, available_bytes=12 << 30)
    assert plan_of(busy, QWEN3_8B) == plan_of(idle, QWEN3_8B)


def test_a_full_context_fits_if_possible() -> None:
    plan = plan_of(a_mac(16), QWEN3_8B)
    # 6.0 GB of the 7.1 that are left; the share alone gives 4.5
    assert plan.kv_bytes == QWEN3_8B.full_context_bytes
    assert (
        plan_of(a_mac(32), QWEN3_30B).kv_bytes // QWEN3_30B.token_bytes >= QWEN3_30B.context_tokens
    )


@pytest.mark.parametrize(
    ("gigabytes", "models"),
    [
        (gigabytes, models)
        for gigabytes, fitting in MACS.items()
        for models in (
            *((QWEN3_8B,), (QWEN3_30B,), (QWEN3_8B, QWEN3_1B), (QWEN3_1B, QWEN3_8B)),
            *((QWEN3_30B, QWEN3_8B), (QWEN3_1B, QWEN3_8B, QWEN3_1B)),
            (QWEN3_30B, QWEN3_8B, QWEN3_1B),
        )
        # otherwise, the front unloads a model first
        if sum(model.weight_bytes + GB for model in models) <= fitting
    ],
)
def test_all_models_together_never_exceed_the_working_set(
    gigabytes: int, models: tuple[Model, ...]
) -> None:
    memory = a_mac(gigabytes)
    weights = [model.weight_bytes + GB for model in models]
    share = MemoryShare(state_bytes=state_bytes(memory.working_set_bytes, taken_bytes=weights))
    plans = [plan_of(memory, model, share) for model in models]
    used = sum(weights) + sum(plan.kv_bytes + plan.ram_tier_bytes for plan in plans)
    assert used <= memory.working_set_bytes + (64 << 20) * len(models), (
        "each model gets a minimum of 64 MiB, whatever is left"
    )


def test_models_that_load_together_divide_the_working_set() -> None:
    memory, share = a_mac(32), MemoryShare(parts=2)
    plans = [plan_of(memory, model, share) for model in (QWEN3_8B, QWEN3_1B)]
    used = (
        sum(plan.kv_bytes + plan.ram_tier_bytes for plan in plans)
        + QWEN3_8B.weight_bytes
        + QWEN3_1B.weight_bytes
        + 2 * GB
    )
    assert used <= memory.working_set_bytes


def test_large_weights_are_wired() -> None:
    assert wired_bytes(None, weight_bytes=10 * GIB, working_set_bytes=20 * GIB) == int(
        10 * GIB * 1.01
    )
    assert wired_bytes(None, weight_bytes=GIB, working_set_bytes=20 * GIB) == 0
    assert wired_bytes(0, weight_bytes=10 * GIB, working_set_bytes=20 * GIB) == 0
    assert wired_bytes(12 * GIB, weight_bytes=GIB, working_set_bytes=20 * GIB) == 12 * GIB
    assert wired_bytes(99 * GIB, weight_bytes=GIB, working_set_bytes=20 * GIB) == 20 * GIB
    assert wired_bytes(None, weight_bytes=GIB, working_set_bytes=0) == 0


def test_all_workers_together_wire_at_most_the_working_set() -> None:
    share = MemoryShare(wired_bytes=15 * GIB)
    wired = partial(wired_bytes, None, weight_bytes=10 * GIB, working_set_bytes=20 * GIB)
    assert wired(share=share) == 5 * GIB
    assert wired(share=MemoryShare(wired_bytes=30 * GIB)) == 0
