from __future__ import annotations

import os
import subprocess
import sys

from holdfast.models import platform


def test_the_report_names_device_versions_and_memory() -> None:
    report = platform.report()
    assert report.device in ("cpu", "gpu")
    assert report.backend in ("cpu", "metal", "cuda")
    assert report.mlx_version.count(".") >= 2
    assert report.mlx_lm_version.count(".") >= 2
    assert report.memory.total_bytes > 0
    assert (report.device == "cpu") == (platform.working_set_bytes() == 0)


def test_preparing_the_device_is_harmless_without_a_gpu() -> None:
    before = platform.report().backend
    platform.prepare_device()
    assert platform.report().backend == before


def test_importing_it_imports_no_mlx() -> None:
    code = "import sys; from holdfast.models import platform, download, measure; print('mlx.core' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": "src"}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_what_would_make_it_faster_is_recommended() -> None:
    from holdfast.models.blas import BlasReport

    slow, fast = BlasReport(in_front=False), BlasReport(in_front=True)
    advice = platform._recommendations("cpu", slow, compiler=False)
    if sys.platform == "linux":
        assert any("OpenBLAS" in line for line in advice)
    assert any("g++" in line for line in advice)
    assert platform._recommendations("cpu", fast, compiler=True) == []
    assert platform._recommendations("metal", slow, compiler=True) == []
