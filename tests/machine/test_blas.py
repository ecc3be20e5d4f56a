from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest

from holdfast.machine.blas import BlasReport

needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or ctypes.util.find_library("openblas") is None,
    reason="OpenBLAS is not installed",
)


def run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", **variables}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    prelude = "import sys, os\nfrom holdfast.machine import blas\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@needs_openblas
def test_openblas_replaces_the_built_in_blas() -> None:
    out = run(
        "r = blas.prepare_blas(2); print(r.in_front, r.name, r.threads, 'openblas' in r.file, "
        "'mlx.core' in sys.modules)"
    )
    assert out == "True OpenBLAS 2 True False"


@needs_openblas
def test_mlx_computes_with_it() -> None:
    code = (
        "blas.prepare_blas(1)\n"
        "import ctypes, mlx.core as mx\n"
        "a = mx.arange(12, dtype=mx.float32).reshape(3, 4)\n"
        "print((a @ a.T)[2, 2].item(), 'openblas' in blas._file_of_symbol('cblas_sgemm'))\n"
        "mx.clear_streams()"
    )
    assert run(code) == "366.0 True"


@needs_openblas
def test_a_second_call_changes_nothing() -> None:
    assert (
        run("a = blas.prepare_blas(1); print(blas.prepare_blas(3) is a, blas.current_blas() is a)")
        == "True True"
    )


@needs_openblas
def test_threads_follow_the_environment_and_leave_it_alone() -> None:
    out = run(
        "before = dict(os.environ); r = blas.prepare_blas(); print(r.threads, before == "
        "dict(os.environ))"
    )
    assert out == "1 True"


def test_after_the_import_of_mlx_it_is_too_late() -> None:
    out = run(
        "import mlx.core; r = blas.prepare_blas(); print(r.in_front, r); mlx.core.clear_streams()"
    )
    assert out.startswith("False built in (")


def test_libraries_that_cannot_be_used_are_named() -> None:
    out = run(
        "r = blas._load_first(['libnowhere.so', 'libc.so.6'], threads=1); print(r.in_front, "
        "r.reason)"
    )
    if sys.platform == "linux":
        assert out == "False libc.so.6: lacks cblas_sgemm"


@pytest.mark.parametrize(
    ("threads", "said"), [(1, "OpenBLAS 0.3, 1 thread"), (2, "OpenBLAS 0.3, 2 threads")]
)
def test_threads_have_singular_and_plural(threads: int, said: str) -> None:
    assert str(BlasReport(in_front=True, name="OpenBLAS", version="0.3", threads=threads)) == said
