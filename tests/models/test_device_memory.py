from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.device_memory import DeviceMemory, kv_budget_bytes, memory_report, usable_bytes

GIB = 1 << 30


def test_the_machines_memory_is_reported(tmp_path: Path) -> None:
    report = memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none")
    assert 0 < report.available_bytes <= report.total_bytes


def test_a_control_groups_limit_is_the_total_and_its_file_cache_counts_as_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB // 4}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 8}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 16}\n")
    report = memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none")
    assert report.total_bytes == GIB // 4
    assert report.available_bytes == GIB // 4 - GIB // 16


def test_the_first_version_of_control_groups_is_understood(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{GIB // 4}")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none").available_bytes == GIB // 4 - 1000


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "none").total_bytes > GIB // 2


def test_groups_above_the_own_one_limit_too(tmp_path: Path) -> None:
    own = tmp_path / "fs" / "user.slice" / "holdfast.service"
    own.mkdir(parents=True)
    (own / "memory.max").write_text(f"{GIB // 2}")
    (own / "memory.current").write_text("1000")
    (own.parent / "memory.max").write_text(f"{GIB}")
    (own.parent / "memory.current").write_text(f"{GIB - GIB // 8}")
    (tmp_path / "cgroup").write_text("0::/user.slice/holdfast.service\n")
    report = memory_report(cgroup=tmp_path / "fs", own_cgroups=tmp_path / "cgroup")
    assert (report.total_bytes, report.available_bytes) == (GIB // 2, GIB // 8)


@pytest.mark.parametrize("own", ["0::/../other\n", "nonsense", "0::/gone/away\n", ""])
def test_a_group_that_cannot_be_found_leaves_the_root(tmp_path: Path, own: str) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB // 4}")
    (tmp_path / "cgroup").write_text(own)
    assert memory_report(cgroup=tmp_path, own_cgroups=tmp_path / "cgroup").total_bytes == GIB // 4


def in_a_shell(limit: str, code: str) -> str:
    """What Python code prints in a process with a limit."""
    command = f"ulimit {limit}; exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    source = str(Path(__file__).parents[2] / "src")
    environ = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["/bin/sh", "-c", command], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce these limits")


@ONLY_LINUX
@pytest.mark.parametrize("option", ["-v", "-d"])
def test_the_limits_of_the_process_itself_are_seen(option: str) -> None:
    code = (
        "from holdfast.models.device_memory import memory_report; before = memory_report(); taken = bytearray(200 << 20);"
        "after = memory_report(); print(before.total_bytes, before.available_bytes, after.available_bytes)"
    )
    total, before, after = (int(number) for number in in_a_shell(f"{option} {GIB >> 10}", code).split())
    assert total == GIB
    assert GIB // 2 < before < GIB
    assert 150 << 20 < before - after < 250 << 20


@ONLY_LINUX
def test_a_limited_process_gets_a_budget_within_its_limit() -> None:
    code = "from holdfast import LLM\nwith LLM() as llm: print(llm.info.kv_budget_bytes)"
    assert 64 << 20 <= int(in_a_shell(f"-v {(4 * GIB) >> 10}", code)) < 2.4 * GIB


def test_a_requested_budget_is_taken_unless_it_is_more_than_there_is() -> None:
    memory = DeviceMemory(total_bytes=8 * GIB, available_bytes=GIB)
    assert kv_budget_bytes(3 * GIB, memory=memory, weight_bytes=0) == 3 * GIB
    with pytest.raises(ModelLoadError, match="more than the"):
        kv_budget_bytes(9 * GIB, memory=memory, weight_bytes=0)


def test_the_automatic_budget_is_a_share_of_what_the_weights_left() -> None:
    memory = DeviceMemory(total_bytes=32 * GIB, available_bytes=10 * GIB)
    assert kv_budget_bytes(None, memory=memory, weight_bytes=20 * GIB) == 6 * GIB


def test_with_unified_memory_the_working_set_bounds_it() -> None:
    memory = DeviceMemory(total_bytes=32 * GIB, available_bytes=20 * GIB, working_set_bytes=24 * GIB, unified=True)
    assert kv_budget_bytes(None, memory=memory, weight_bytes=14 * GIB) == 6 * GIB
    assert kv_budget_bytes(None, memory=memory, weight_bytes=0) == 12 * GIB


def test_a_gpu_with_memory_of_its_own_does_not_mind_the_hosts() -> None:
    memory = DeviceMemory(total_bytes=8 * GIB, available_bytes=GIB, working_set_bytes=80 * GIB, unified=False)
    assert kv_budget_bytes(None, memory=memory, weight_bytes=20 * GIB) == 36 * GIB
    assert kv_budget_bytes(60 * GIB, memory=memory, weight_bytes=20 * GIB) == 60 * GIB


def test_a_crowded_machine_still_gets_a_small_budget() -> None:
    memory = DeviceMemory(total_bytes=GIB, available_bytes=0, working_set_bytes=1)
    assert kv_budget_bytes(None, memory=memory, weight_bytes=GIB) == 64 << 20


def test_weights_may_take_what_is_available_or_the_working_set() -> None:
    assert 0 < usable_bytes(0) < 1 << 50
    assert usable_bytes(1 << 50) == 1 << 50
