from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.machine.device_memory import (
    ALL_OF_IT,
    DeviceMemory,
    MemoryPlan,
    MemoryShare,
    memory_report,
    plan_memory,
    state_bytes,
    usable_bytes,
    wired_bytes,
)
from tests.fakes.server_process import environment, python_output

GIB = 1 << 30


def test_the_machines_memory_is_reported(tmp_path: Path) -> None:
    report = memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none")
    assert 0 < report.available_bytes <= report.total_bytes


def written(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")
    return folder


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (
            {
                "memory.max": GIB // 4,
                "memory.current": GIB // 8,
                "memory.stat": f"anon 1\ninactive_file {GIB // 16}",
            },
            GIB // 4 - GIB // 16,
        ),
        (
            {"memory/memory.limit_in_bytes": GIB // 4, "memory/memory.usage_in_bytes": 1000},
            GIB // 4 - 1000,
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_control_groups_limit_is_the_total(
    tmp_path: Path, files: dict[str, object], available: int
) -> None:
    report = memory_report(cgroup=written(tmp_path, files), own_cgroups=tmp_path / "none")
    assert (report.total_bytes, report.available_bytes) == (GIB // 4, available)


def test_an_unlimited_group_does_not_limit_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none").total_bytes > GIB // 2


def test_parent_groups_limit_memory_too(tmp_path: Path) -> None:
    files = {
        "fs/user.slice/holdfast.service/memory.max": GIB // 2,
        "fs/user.slice/holdfast.service/memory.current": 1000,
        "fs/user.slice/memory.max": GIB,
        "fs/user.slice/memory.current": GIB - GIB // 8,
        "cgroup": "0::/user.slice/holdfast.service",
    }
    written(tmp_path, files)  # type: ignore[arg-type]
    report = memory_report(cgroup=tmp_path / "fs", own_cgroups=tmp_path / "cgroup")
    assert (report.total_bytes, report.available_bytes) == (GIB // 2, GIB // 8)


@pytest.mark.parametrize("own", ["0::/../other\n", "nonsense", "0::/gone/away\n", ""])
def test_an_unknown_control_group_leaves_the_root(tmp_path: Path, own: str) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB // 4}")
    (tmp_path / "cgroup").write_text(own)
    assert memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "cgroup").total_bytes == GIB // 4


def in_a_shell(limit: str, code: str) -> str:
    """The output of Python code in a process with a limit."""
    command = f"ulimit {limit}; exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    shell = ["/bin/sh", "-c", command]
    done = subprocess.run(shell, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no such limits")


@ONLY_LINUX
@pytest.mark.parametrize("option", ["-v", "-d"])
def test_the_limits_of_the_process_are_respected(option: str) -> None:
    code = (
        "from holdfast.machine.device_memory import memory_report as report\n"
        "before = report(); taken = bytearray(200 << 20); after = report()\n"
        "print(before.total_bytes, before.available_bytes, after.available_bytes)"
    )
    total, before, after = map(int, in_a_shell(f"{option} {GIB >> 10}", code).split())
    assert total == GIB
    assert GIB // 2 < before < GIB
    assert 150 << 20 < before - after < 250 << 20


@ONLY_LINUX
def test_a_limited_process_gets_a_budget_within_its_limit() -> None:
    code = "from holdfast import LLM\nwith LLM() as llm: print(llm.info.kv_budget_bytes)"
    assert 64 << 20 <= int(in_a_shell(f"-v {(4 * GIB) >> 10}", code)) < 2.4 * GIB


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


def test_weights_may_use_available_memory_or_the_working_set() -> None:
    assert 0 < usable_bytes(0) < 1 << 50
    assert usable_bytes(1 << 50) == 1 << 50


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_large_blocks_are_returned_to_the_system() -> None:
    """A small block above each of them keeps glibc from doing so by itself."""
    program = """
import psutil
from holdfast.machine.device_memory import return_large_blocks
return_large_blocks()
resident = lambda: psutil.Process().memory_info().rss
bytearray(30 << 20)  # from now on, glibc would keep blocks of this size
before = resident()
blocks = [(bytearray(b"x") * (5 << 20), bytearray(b"y") * 1000) for _ in range(20)]
small = [each for _, each in blocks]
del blocks
print(resident() - before)
"""
    assert int(python_output(program)) < 20 << 20
