from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.machine import platform


def test_matrix_products_are_measured_in_another_process() -> None:
    assert platform.measure_gflops(blas=True, threads=1, size=64) > 0
    assert platform.measure_gflops(blas=False, threads=1, size=64) > 0


def test_the_platform_report_comes_from_another_process() -> None:
    report = platform.platform_in_subprocess(threads=1)
    assert report.mlx_version
    assert report.memory.total_bytes > 0


def test_a_module_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.chdir(tmp_path)
    assert platform.platform_in_subprocess(threads=1).mlx_version


def test_a_failing_measurement_is_reported_in_one_line() -> None:
    with pytest.raises(HoldfastError, match="measuring this machine failed"):
        platform._child("nonsense", kind=str)
