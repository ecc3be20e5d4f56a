from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.machine.device_memory import memory_report, usable_bytes
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
