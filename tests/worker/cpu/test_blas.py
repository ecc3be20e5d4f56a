from __future__ import annotations

import ctypes.util
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.worker.cpu import blas
from holdfast.worker.cpu.blas import BlasReport
from tests.fakes.server_process import python_output

needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or ctypes.util.find_library("openblas") is None,
    reason="OpenBLAS is not installed",
)
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="there is no C compiler",
)
BEHIND_THE_SHIM = {"HOLDFAST_KERNELS": "1"}
OF_THE_SYSTEM = {"HOLDFAST_KERNELS": "0"}


def run(code: str, **variables: str) -> str:
    prelude = "import sys, os\nfrom holdfast.worker.cpu import blas\n"
    return python_output(prelude + code, OPENBLAS_NUM_THREADS="", **variables)


@pytest.mark.parametrize(
    ("variables", "file", "of_numpy"),
    [
        pytest.param(BEHIND_THE_SHIM, "products", True, marks=needs_compiler, id="behind the shim"),
        pytest.param(OF_THE_SYSTEM, "openblas", False, marks=needs_openblas, id="of the system"),
    ],
)
def test_openblas_replaces_the_built_in_blas(
    variables: dict[str, str], file: str, of_numpy: bool
) -> None:
    out = run(
        "r = blas.prepare_blas(2)\n"
        "print(r.in_front, r.name, r.threads, 'openblas' in r.file, 'mlx.core' in sys.modules)\n"
        "print(r.core and r.core in str(r), blas._threads_of(r.file).get())\n"
        "print('numpy.libs' in r.file, r.few_rows > 0, r.no_kernel == '')\n"
        "print(blas.prepare_blas(3) is r, blas.current_blas() is r)\n"
        "import mlx.core as mx\n"
        "a = mx.arange(12, dtype=mx.float32).reshape(3, 4)\n"
        f"print((a @ a.T)[2, 2].item(), {file!r} in blas._file_of_symbol('cblas_sgemm'))\n"
        "import numpy\n"
        "(numpys,) = blas.blas_of_numpy()\n"
        "print(numpys.get(), numpys.core == r.core)\n"
        "mx.clear_streams()",
        **variables,
    )
    *lines, numpys = out.splitlines()
    assert lines == [
        "True OpenBLAS 2 True False",
        "True 2",
        f"{of_numpy} {of_numpy} {of_numpy}",
        "True True",
        "366.0 True",
    ]
    assert numpys == "2 True" or not of_numpy


@needs_openblas
def test_without_a_compiler_the_systems_is_used() -> None:
    out = run(
        "r = blas.prepare_blas(2); print('numpy.libs' in r.file, r.few_rows, r.no_kernel)",
        HOLDFAST_KERNELS="1",
        PATH="/nowhere",
    )
    assert out == "False 0 there is no C compiler (cc, gcc, clang)"


@needs_compiler
def test_threads_follow_the_environment_without_changing_it() -> None:
    out = run(
        "before = dict(os.environ); r = blas.prepare_blas(); print(r.threads, before == "
        "dict(os.environ))"
    )
    assert out == "1 True"


@pytest.mark.parametrize(
    ("variables", "core", "flags", "unused"),
    [
        ({"OPENBLAS_CORETYPE": "Haswell"}, "Haswell", "avx2 avx512f avx512bw avx512vl", "AVX-512"),
        ({"OPENBLAS_CORETYPE": "Nehalem"}, "Nehalem", "avx avx2", "AVX2"),
        ({"OPENBLAS_CORETYPE": "Haswell"}, "Haswell", "avx2", ""),
        ({"OPENBLAS_CORETYPE": "SkylakeX"}, "SkylakeX", "avx2 avx512f avx512bw avx512vl", ""),
        ({}, "Zen", "avx2 avx512f avx512bw avx512vl", ""),
        ({"OPENBLAS_CORETYPE": "ARMV8"}, "armv8", "asimd sve", ""),
    ],
)
def test_instructions_forbidden_by_the_environment_are_named(
    variables: dict[str, str],
    core: str,
    flags: str,
    unused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t: fpu sse {flags}\n")
    monkeypatch.setattr(blas, "_CPU_INFO", tmp_path / "cpuinfo")
    assert blas.unused_instructions(core) == unused


def test_after_importing_mlx_it_is_too_late() -> None:
    out = run(
        "import mlx.core; r = blas.prepare_blas(); print(r.in_front, r); mlx.core.clear_streams()"
    )
    assert out.startswith("False built in (")


def test_unusable_libraries_are_named() -> None:
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
