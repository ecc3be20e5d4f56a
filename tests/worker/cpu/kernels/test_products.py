"""Linear layers of few rows, and the products passed on to a BLAS, compared with numpy."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from holdfast.worker.cpu.blas import current_blas
from holdfast.worker.cpu.kernels.products import Floats, linear, linear_in_numpy, product
from tests.fakes.fewer_instructions import QUICKLY, folder_of_kernels
from tests.fakes.server_process import python_output
from tests.fakes.slow import slow

MOST_ROWS = current_blas().few_rows
pytestmark = pytest.mark.skipif(not MOST_ROWS, reason=f"no kernel: {current_blas().no_kernel}")


def normal(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 80])
def test_linear_layers_equal_numpys(rows: int) -> None:
    for inner, outputs in ((1, 1), (15, 3), (16, 4), (64, 130), (131, 77), (768, 9), (40, 8200)):
        inputs, weights, bias = normal(rows, inner), normal(outputs, inner), normal(rows, outputs)
        for added in (None, bias):
            wanted = linear_in_numpy(inputs, weights, added)
            np.testing.assert_allclose(linear(inputs, weights, added), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, MOST_ROWS, MOST_ROWS + 1])
def test_products_with_matrices_that_are_not_transposed(rows: int) -> None:
    for inner, columns in ((1, 1), (15, 3), (300, 64), (700, 130), (3, 77), (9, 8200)):
        inputs, matrix, bias = normal(rows, inner), normal(inner, columns), normal(rows, columns)
        for added in (None, bias):
            got = product(inputs, matrix, added)
            wanted = inputs @ matrix + (0 if added is None else added)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
            if rows <= MOST_ROWS:
                for row in range(rows):
                    alone = None if added is None else added[row : row + 1]
                    assert (product(inputs[row : row + 1], matrix, alone) == got[row]).all()


def test_rows_of_larger_matrices_are_read_in_place() -> None:
    inputs, weights = normal(8, 200)[::2, :50], normal(30, 90)[::3, 20:70]
    np.testing.assert_allclose(
        linear(inputs, weights), linear_in_numpy(inputs, weights), rtol=1e-4, atol=1e-4
    )
    matrix = normal(90, 60)[10:60, 5:50]
    np.testing.assert_allclose(product(inputs, matrix), inputs @ matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inner", "outputs"), [(64, 300), (131, 77), (768, 2304)])
def test_a_row_is_the_same_alone_and_among_others(inner: int, outputs: int) -> None:
    inputs, weights = normal(MOST_ROWS, inner), normal(outputs, inner)
    for rows in (2, 3, 4, 5, 7, MOST_ROWS):
        among_others = linear(inputs[:rows], weights)
        for row in range(rows):
            assert (among_others[row] == linear(inputs[row : row + 1], weights)[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("inner", [48, 50])
def test_non_finite_values_reach_the_result(bad: float, inner: int) -> None:
    for at in (0, 20, inner - 1):
        inputs, weights = normal(4, inner), normal(12, inner)
        inputs[2, at] = bad
        result = linear(inputs, weights)
        assert not np.isfinite(result[2]).any()
        assert np.isfinite(np.delete(result, 2, axis=0)).all()
        inputs, weights = normal(4, inner), normal(12, inner)
        weights[7, at] = bad
        result = linear(inputs, weights)
        assert not np.isfinite(result[:, 7]).any()
        assert np.isfinite(np.delete(result, 7, axis=1)).all()


def test_an_overflow_reaches_the_result() -> None:
    inputs, weights = np.full((3, 40), 1e20, np.float32), np.full((9, 40), 1e20, np.float32)
    assert np.isposinf(linear(inputs, weights)).all()


def test_threads_change_nothing() -> None:
    code = (
        "import numpy as np\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from holdfast.worker.cpu.blas import prepare_blas\n"
        "assert prepare_blas(3).few_rows\n"
        "from holdfast.worker.cpu.kernels.products import linear, linear_in_numpy\n"
        "rng = np.random.default_rng(0)\n"
        "inputs = rng.standard_normal((2, 512), np.float32)\n"
        "weights = rng.standard_normal((3000, 512), np.float32)\n"
        "wanted = linear(inputs, weights)\n"
        "assert np.allclose(wanted, linear_in_numpy(inputs, weights), rtol=1e-4, atol=1e-4)\n"
        "with ThreadPoolExecutor(4) as pool:\n"  # concurrent calls do not disturb each other
        "    got = list(pool.map(lambda _: linear(inputs, weights), range(60)))\n"
        "print(all((each == wanted).all() for each in got))\n"
    )
    assert python_output(code) == "True"


@pytest.mark.parametrize("kernels", ["", "products"])  # with and without the kernel for few rows
def test_mlx_computes_with_it(kernels: str) -> None:
    code = (
        "from holdfast.worker.cpu.blas import prepare_blas\n"
        "report = prepare_blas(1)\n"
        "import numpy as np, mlx.core as mx\n"
        "mx.set_default_device(mx.cpu)\n"
        "rng = np.random.default_rng(0)\n"
        "right = True\n"
        "for rows in (1, 3, 80):\n"
        "    a, b = rng.standard_normal((rows, 50)), rng.standard_normal((70, 50))\n"
        "    for kind in (np.float32, np.float64, np.complex64):\n"
        "        x, w = mx.array(a.astype(kind)), mx.array(b.astype(kind))\n"
        "        for got in (x @ w.T, x @ mx.contiguous(w.T)):\n"
        "            right = right and np.allclose(np.array(got), a @ b.T, atol=1e-4)\n"
        "print(right, report.in_front, report.few_rows, report.no_kernel)\n"
        "mx.clear_streams()\n"
    )
    few_rows = "0 HOLDFAST_KERNELS turns it off" if kernels else str(MOST_ROWS)
    assert python_output(code, HOLDFAST_KERNELS=kernels) == f"True True {few_rows}"


RECORDING_BLAS = """
import ctypes, os, threading
import numpy as np
from holdfast.worker.cpu.blas import prepare_blas
prepare_blas(3)
from holdfast.worker.cpu.kernels import packed_products, products
library = products.library()
threads = [3]
calls = []
Get, Set = ctypes.CFUNCTYPE(ctypes.c_int), ctypes.CFUNCTYPE(None, ctypes.c_int)
get, put = Get(lambda: threads[0]), Set(lambda count: threads.__setitem__(0, count))
ints, pointer, number = [ctypes.c_int] * 3, ctypes.c_void_p, ctypes.c_float
sizes = [ctypes.c_int] * 3
def recorded(order, of_a, of_b, m, n, k, *rest):
    calls.append((m, n, k, threads[0]))
    if threading.current_thread() is threading.main_thread():
        others_work.wait(60)
    else:
        others_work.set()
        while not finished.wait(0.01):
            if sum(n for _, n, *_ in calls) == 3000 and state_of_main() == "S":
                print("sleeps", flush=True)
                finished.set()
Gemm = ctypes.CFUNCTYPE(None, *ints, *sizes, number, pointer, ctypes.c_int, pointer, ctypes.c_int,
    number, pointer, ctypes.c_int)
gemm = Gemm(recorded)
def state_of_main():
    stat = open(f"/proc/self/task/{threading.main_thread().native_id}/stat").read()
    return stat.rpartition(")")[2].split()[0]
others_work, finished = threading.Event(), threading.Event()
products.use(products.Blas(gemm, gemm, gemm, get, put, False), threads=3, most_rows=16)
"""


def test_a_blas_computes_each_product_on_one_thread() -> None:
    """BLAS threads wait for each other by yielding, which wastes processor time."""
    code = (
        f"{RECORDING_BLAS}\nothers_work.set(); finished.set()\n"
        "for rows, outputs in ((80, 3000), (3000, 80), (700, 600), (40, 40)):\n"
        "    calls.clear()\n"
        "    inputs, weights = (np.zeros((size, 96), np.float32) for size in (rows, outputs))\n"
        "    products.linear(inputs, weights)\n"
        "    is_whole = sum(m * n for m, n, *_ in calls) == rows * outputs\n"
        "    print({threads for *_, threads in calls}, threads, is_whole, len(calls) > 1)"
    )
    small = "{1} [3] True False"
    assert python_output(code).splitlines() == ["{1} [3] True True"] * 3 + [small]


def test_a_thread_waiting_for_others_sleeps() -> None:
    """It has computed its parts, and the others have not."""
    code = (
        f"{RECORDING_BLAS}\n"
        "threading.Timer(20, finished.set).start()\n"
        "products.linear(np.zeros((80, 96), np.float32), np.zeros((3000, 96), np.float32))\n"
        "os._exit(0)"
    )
    assert python_output(code) == "sleeps"


@pytest.mark.parametrize("threads", [3, *slow(1, 2, 5)])
def test_split_products_are_correct(threads: int) -> None:
    code = (
        "import numpy as np\n"
        "from holdfast.worker.cpu.blas import prepare_blas\n"
        f"report = prepare_blas({threads})\n"
        "import mlx.core as mx\n"
        "for m, n, k in ((65, 2100, 96), (2100, 65, 96), (513, 514, 70), (97, 97, 700), (65, 96, 400)):\n"
        "    a, b, c = (mx.random.normal(shape) for shape in ((m, k), (n, k), (m, n)))\n"
        "    x, w, y = (np.array(each) for each in (a, b, c))\n"
        "    up, across = mx.contiguous(a.T).T, mx.contiguous(b.T)\n"
        "    mx.eval(up, across)\n"
        "    for got in (a @ b.T, up @ b.T, a @ across, up @ across, mx.addmm(c, a, b.T) - c):\n"
        "        assert np.allclose(np.array(got), x @ w.T, rtol=1e-3, atol=1e-3), (m, n, k)\n"
        "print(report.in_front)\n"
        "mx.clear_streams()"
    )
    assert python_output(code) == "True"


def test_a_shim_that_disagrees_with_numpy_is_not_used() -> None:
    code = (
        "from holdfast.worker.cpu.kernels import products\n"
        "products.linear_in_numpy = lambda inputs, weights: 2 * (inputs @ weights.T)\n"
        "from holdfast.worker.cpu.blas import prepare_blas\n"
        "report = prepare_blas(1)\n"
        "print(report.few_rows, report.no_kernel)"
    )
    assert python_output(code) == "0 it disagrees with numpy on this machine"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("less", ["-mno-avx512f", "-mno-avx"])
def test_it_is_correct_with_shorter_vectors(
    less: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    code = (
        "from holdfast.worker.cpu.kernels import build\n"
        f"build._FLAGS = (*build._FLAGS, {less!r}, {QUICKLY!r})\n"
        "from holdfast.worker.cpu.blas import prepare_blas\n"
        "report = prepare_blas(2)\n"  # compares it with numpy
        "print(report.few_rows, report.no_kernel)"
    )
    folder = folder_of_kernels(pytestconfig, otherwise=tmp_path)
    assert python_output(code, XDG_CACHE_HOME=str(folder)) == "16"
