from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.cli import machine_report
from holdfast.errors import HoldfastError
from holdfast.worker.cpu.blas import BlasReport


def test_matrix_products_are_measured_in_another_process() -> None:
    assert machine_report.measure_gflops(blas=True, threads=1, size=64) > 0
    assert machine_report.measure_gflops(blas=False, threads=1, size=64) > 0


def test_the_platform_report_comes_from_another_process() -> None:
    report = machine_report.machine_report(threads=1)
    assert report.mlx_version
    assert report.memory.total_bytes > 0


def test_a_module_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.chdir(tmp_path)
    assert machine_report.machine_report(threads=1).mlx_version


def test_a_failing_measurement_is_reported_in_one_line() -> None:
    with pytest.raises(HoldfastError, match="measuring this machine ended with code 1: usage"):
        machine_report._run_in_child_process("nonsense", answer_type=str)


def test_the_report_recommends_faster_settings() -> None:
    slow, fast = BlasReport(in_front=False), BlasReport(in_front=True, few_rows=16)
    advice = machine_report._recommendations("cpu", slow, can_compile=False)
    if sys.platform == "linux":
        assert any("OpenBLAS" in line for line in advice)
    assert any("g++" in line for line in advice)
    assert machine_report._recommendations("cpu", fast, can_compile=True) == []
    assert machine_report._recommendations("metal", slow, can_compile=True) == []


@pytest.mark.skipif(sys.platform != "linux", reason="about Linux")
def test_a_needlessly_slow_blas_gets_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = BlasReport(in_front=True, no_shim="there is no C compiler")
    (line,) = machine_report._recommendations("cpu", without, can_compile=True)
    assert "there is no C compiler" in line
    monkeypatch.setattr(
        machine_report, "unused_instructions", lambda core: "AVX-512" if core else ""
    )
    forced = BlasReport(in_front=True, few_rows=16, core="Haswell")
    (line,) = machine_report._recommendations("cpu", forced, can_compile=True)
    assert line.startswith("unset OPENBLAS_CORETYPE") and "Haswell" in line and "AVX-512" in line
