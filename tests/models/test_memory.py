from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.memory import MemoryReport, kv_budget_bytes, memory_report, usable_bytes

GIB = 1 << 30


def test_the_machines_memory_is_reported(tmp_path: Path) -> None:
    report = memory_report(cgroup=tmp_path)
    assert 0 < report.available_bytes <= report.total_bytes


def test_a_control_groups_limit_is_the_total_and_its_file_cache_counts_as_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB // 4}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 8}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 16}\n")
    report = memory_report(cgroup=tmp_path)
    assert report.total_bytes == GIB // 4
    assert report.available_bytes == GIB // 4 - GIB // 16


def test_the_first_version_of_control_groups_is_understood(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{GIB // 4}")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert memory_report(cgroup=tmp_path).available_bytes == GIB // 4 - 1000


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_report(cgroup=tmp_path).total_bytes > GIB // 2


def test_a_requested_budget_is_taken_unless_it_is_more_than_there_is() -> None:
    memory = MemoryReport(total_bytes=8 * GIB, available_bytes=GIB)
    assert kv_budget_bytes(3 * GIB, memory=memory, weight_bytes=0) == 3 * GIB
    with pytest.raises(ModelLoadError, match="more than the"):
        kv_budget_bytes(9 * GIB, memory=memory, weight_bytes=0)


def test_the_automatic_budget_is_a_share_of_what_the_weights_left() -> None:
    memory = MemoryReport(total_bytes=32 * GIB, available_bytes=10 * GIB)
    assert kv_budget_bytes(0, memory=memory, weight_bytes=20 * GIB) == 6 * GIB


def test_with_unified_memory_the_working_set_bounds_it() -> None:
    memory = MemoryReport(total_bytes=32 * GIB, available_bytes=20 * GIB, working_set_bytes=24 * GIB, unified=True)
    assert kv_budget_bytes(0, memory=memory, weight_bytes=14 * GIB) == 6 * GIB
    assert kv_budget_bytes(0, memory=memory, weight_bytes=0) == 12 * GIB


def test_a_gpu_with_memory_of_its_own_does_not_mind_the_hosts() -> None:
    memory = MemoryReport(total_bytes=8 * GIB, available_bytes=GIB, working_set_bytes=80 * GIB, unified=False)
    assert kv_budget_bytes(0, memory=memory, weight_bytes=20 * GIB) == 36 * GIB
    assert kv_budget_bytes(60 * GIB, memory=memory, weight_bytes=20 * GIB) == 60 * GIB


def test_a_crowded_machine_still_gets_a_small_budget() -> None:
    memory = MemoryReport(total_bytes=GIB, available_bytes=0, working_set_bytes=1)
    assert kv_budget_bytes(0, memory=memory, weight_bytes=GIB) == 64 << 20


def test_weights_may_take_what_is_available_or_the_working_set() -> None:
    assert 0 < usable_bytes(0) < 1 << 50
    assert usable_bytes(1 << 50) == 1 << 50
