from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.machine.cores import usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight hardware threads on four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for cpu in range(8):
        topology = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu % 4}\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def cores(machine: Path) -> int:
    return usable_cores(cpus=machine / "cpus", cgroup=machine / "cgroup")


def test_two_threads_of_a_core_count_once(machine: Path) -> None:
    assert cores(machine) == 4


def test_only_allowed_cpus_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4}, raising=False)
    assert cores(machine) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", 4)],
)
def test_the_control_groups_cpu_quota_counts(machine: Path, content: str, expected: int) -> None:
    (machine / "cgroup" / "cpu.max").write_text(content)
    assert cores(machine) == expected


def test_control_groups_version_1_is_supported(machine: Path) -> None:
    folder = machine / "cgroup" / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000")
    for quota, expected in (("300000", 3), ("-1", 4)):
        (folder / "cpu.cfs_quota_us").write_text(quota)
        assert cores(machine) == expected


def test_an_unknown_topology_counts_each_cpu(tmp_path: Path, machine: Path) -> None:
    assert usable_cores(cpus=tmp_path / "nowhere", cgroup=tmp_path / "nowhere") == 8
