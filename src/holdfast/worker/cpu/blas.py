"""Loads a fast BLAS before MLX's own on Linux CPUs.

MLX's CPU wheel for Linux is linked with the reference BLAS. The symbols of a globally loaded
library take precedence over those of libraries loaded later. So a faster BLAS must be loaded before
the first import of `mlx.core`; this module does not import MLX. Measured: float32 matrix products
become 13 times faster.

With a C compiler, the shim of `kernels/products.py` is loaded, which passes MLX's calls on to the
OpenBLAS in numpy's wheel: other libraries need not be installed, and only one BLAS with its threads
is in the process. Without a compiler, an OpenBLAS or MKL of the system is loaded if there is one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.machine.cores import usable_cores

_CPU_INFO = Path("/proc/cpuinfo")
AVX512_CORES = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})  # as OpenBLAS names them
_OLDER_CORES = frozenset(
    {"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Sandybridge"}
    | {"Opteron", "Barcelona", "Bobcat", "Bulldozer", "Piledriver", "Steamroller"}
)  # names of OpenBLAS for x86 without AVX2
_CORE_VARIABLE = "OPENBLAS_CORETYPE"
_SYMBOLS_OF_MLX = ("cblas_sgemm", "cblas_dgemm", "sgemm_", "sgemv_", "strsm_")  # what MLX calls
# beginnings and ends of the names of functions: OpenBLAS in wheels has a prefix, and a suffix for
# 64-bit integers
_PREFIXES = ("", "scipy_")
_SUFFIXES = ("", "64_", "_64")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """Which BLAS library MLX uses.

    in_front: whether a faster library was loaded before MLX's own. If not, MLX uses its own, and
    `reason` says why. file: the library. no_shim: why MLX's calls do not go through the shim of
    `kernels/products.py`; empty if they do. few_rows: products of up to this many rows are
    computed by a C kernel; if 0, `no_kernel` says why. core: the processor type for which OpenBLAS
    has chosen its kernels; empty if unknown.
    """

    in_front: bool
    name: str = "built in"
    version: str = ""
    threads: int = 0  # for matrix products; MLX's own BLAS always uses one
    file: str = ""
    core: str = ""
    reason: str = ""
    no_shim: str = "MLX calls its own BLAS"
    few_rows: int = 0

    @property
    def no_kernel(self) -> str:
        """Why few rows are not computed by the kernel; empty if they are."""
        return self.no_shim or ("" if self.few_rows else "HOLDFAST_KERNELS turns it off")

    def __str__(self) -> str:
        if not self.in_front:
            return f"built in ({self.reason})" if self.reason else "built in"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        core = f" for {self.core}" if self.core else ""
        return f"{self.name} {self.version}{core}, {threads}".replace(" ,", ",")


_current = BlasReport(in_front=False, reason="no other BLAS was loaded")


def prepare_blas(threads: int | None = None) -> BlasReport:
    """Load a fast BLAS, so that MLX uses it. Call this before anything imports MLX.

    threads: None means one per usable core. If the system is not Linux, MLX was already imported,
    or no library is usable, the function loads none, and the result says why. A second call returns
    the result of the first one.
    """
    global _current
    if _current.in_front:
        return _current
    threads = threads or _wanted_threads()
    if sys.platform != "linux":
        _current = BlasReport(in_front=False, threads=threads, reason="only needed on Linux")
    elif "mlx.core" in sys.modules:
        _current = BlasReport(
            in_front=False,
            threads=threads,
            reason="MLX was imported before a faster one could be loaded",
        )
    else:
        _current = _load_first(_candidates(), threads=threads)
    return _current


def current_blas() -> BlasReport:
    """The result of `prepare_blas`."""
    return _current


@dataclass(frozen=True, slots=True)
class BlasThreads:
    """Gets and sets the number of threads of one loaded BLAS, for the whole process.

    file: the library. core: the processor type for which OpenBLAS has chosen its kernels; empty if
    unknown.
    """

    get: Callable[[], int]
    set: Callable[[int], None]
    file: str
    core: str = ""

    @property
    def is_behind_shim(self) -> bool:
        """Whether the shim of `kernels/products.py` passes products on to it, and sets its thread
        count within `products.blas_on_one_thread`.
        """
        return self.file == _current.file and not _current.no_shim


def blas_of_numpy() -> tuple[BlasThreads, ...]:
    """Return the BLAS libraries that numpy uses: its own, or the one that was loaded before MLX.

    Call it after numpy was imported. Linux only; empty if unknown.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    files = {
        os.path.realpath(line[line.index("/") :])
        for line in lines
        if "/" in line and ("openblas" in line or "mkl_rt" in line)
    }
    files_of_numpy = files - {_current.file}
    return tuple(
        threads
        for file in sorted(files_of_numpy or files)
        if (threads := _threads_of(file)) is not None
    )


def _threads_of(file: str) -> BlasThreads | None:
    """Access to the thread count of a loaded library; None if it is no BLAS with such functions."""
    try:
        library = _Library.opened(file)
    except OSError:
        return None
    get_threads, set_threads = _thread_functions(library)
    if get_threads is None:
        return None
    return BlasThreads(get_threads, set_threads, file, library.text("openblas_get_corename"))


def _thread_functions(library: _Library) -> tuple[Any, Any]:
    """The functions that get and set the thread count; None if there are none."""
    if library.has("openblas_set_num_threads"):
        names = (f"openblas_{verb}_num_threads" for verb in ("get", "set"))
        get_threads, set_threads = map(library.function, names)
        return get_threads, set_threads
    if hasattr(library.handle, "MKL_Set_Num_Threads"):
        return library.handle.MKL_Get_Max_Threads, library.handle.MKL_Set_Num_Threads
    return None, None


def unused_instructions(core: str) -> str:
    """Instructions that this CPU has, but OpenBLAS does not use because OPENBLAS_CORETYPE is set.

    core: the processor type that OpenBLAS names. Empty if there are none.
    """
    if _CORE_VARIABLE not in os.environ or not core:
        return ""
    try:
        flags = set(_CPU_INFO.read_text().split())
    except OSError:
        return ""
    if {"avx512f", "avx512bw", "avx512vl"} <= flags and core not in AVX512_CORES:
        return "AVX-512"
    return "AVX2" if "avx2" in flags and core in _OLDER_CORES else ""


@dataclass(frozen=True, slots=True)
class _Library:
    """A loaded library and how the names of its functions begin and end."""

    handle: ctypes.CDLL
    prefix: str
    suffix: str

    @classmethod
    def opened(cls, file: str) -> _Library:
        """Load a library, without making its symbols global. Raises OSError."""
        handle = ctypes.CDLL(file, mode=ctypes.RTLD_LOCAL)
        for prefix, suffix in itertools.product(_PREFIXES, _SUFFIXES):
            if hasattr(handle, f"{prefix}cblas_sgemm{suffix}"):
                return cls(handle, prefix, suffix)
        return cls(handle, "", "")

    def has(self, name: str) -> bool:
        return hasattr(self.handle, f"{self.prefix}{name}{self.suffix}")

    def function(self, name: str) -> Any:
        return getattr(self.handle, f"{self.prefix}{name}{self.suffix}")

    def text(self, name: str) -> str:
        """The text that a function without parameters returns; empty if it does not exist."""
        if not self.has(name):
            return ""
        function = self.function(name)
        function.restype = ctypes.c_char_p
        text: bytes | None = function()
        return (text or b"").decode(errors="replace")

    @property
    def config(self) -> str:
        """OpenBLAS's description of itself, such as "OpenBLAS 0.3.30 USE64BITINT …"; else empty."""
        return self.text("openblas_get_config")

    @property
    def takes_64_bits(self) -> bool:
        return "64" in self.suffix or "USE64BITINT" in self.config


def _wanted_threads() -> int:
    """Return one thread per usable core, or fewer if one of `_THREAD_VARIABLES` says so."""
    limits = [
        int(value)
        for name in _THREAD_VARIABLES
        if (value := os.environ.get(name, "")).isdigit() and int(value) > 0
    ]
    return min([usable_cores(), *limits[:1]])


def _candidates() -> list[str]:
    """Return the files and library names to try: first the BLAS in numpy's wheel."""
    prefixes = [os.environ.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix]
    folders = [Path(prefix) / "lib" for prefix in dict.fromkeys(prefixes) if prefix]
    files = [
        str(folder / name)
        for name in ("libopenblas.so.0", "libmkl_rt.so.2")
        for folder in folders
        if (folder / name).exists()
    ]
    return [*_files_in_numpys_wheel(), *files, "libopenblas.so.0", "libmkl_rt.so.2"]


def _files_in_numpys_wheel() -> list[str]:
    """The OpenBLAS that comes with numpy, found without importing numpy."""
    numpy = importlib.util.find_spec("numpy")
    folders = numpy.submodule_search_locations if numpy else None
    return [
        str(file)
        for folder in folders or ()
        for file in Path(folder).with_name("numpy.libs").glob("*openblas*.so*")
    ]


def _load_first(candidates: list[str], *, threads: int) -> BlasReport:
    """Load the first usable library so that MLX calls it, through the shim if possible."""
    # not at the top: it imports numpy, which the command line does not need
    from holdfast.worker.cpu.kernels import products

    no_shim = products.unavailable()
    refusals = []
    for candidate in candidates:
        try:
            # the library starts its threads while it is loaded, by default one per core of the
            # machine
            with _thread_variables(threads):
                library = _Library.opened(candidate)
        except OSError:
            continue
        names = [f"cblas_{letter}gemm" for letter in "sdc"]
        if not no_shim and all(library.has(name) for name in names):
            sgemm, dgemm, cgemm = map(library.function, names)
            get_threads, set_threads = _thread_functions(library)
            blas = products.Blas(
                *(sgemm, dgemm, cgemm), get_threads, set_threads, library.takes_64_bits
            )
            shim_file = products.put_before_mlx(blas, threads=threads)
            if shim_file:
                return _set_threads(library, shim_file, threads, few_rows=products.few_rows())
            no_shim = "it disagrees with numpy on this machine"
        refusal = _refusal(library)
        if refusal:
            refusals.append(f"{candidate}: {refusal}")
            continue
        # load the same library globally, so that it comes before all that are loaded later
        ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        file = _file_of_symbol("cblas_sgemm", library.handle)
        return _set_threads(library, file, threads, no_shim=no_shim)
    return BlasReport(
        in_front=False,
        threads=threads,
        reason="; ".join(refusals) or "neither OpenBLAS nor MKL was found",
        no_shim=no_shim,
    )


def _refusal(library: _Library) -> str:
    """Why MLX cannot use the library without the shim; empty if it can."""
    missing = [symbol for symbol in _SYMBOLS_OF_MLX if not hasattr(library.handle, symbol)]
    if missing:
        return f"lacks {missing[0]}"
    return "takes 64-bit integers" if library.takes_64_bits else ""


def _set_threads(
    library: _Library, loaded_file: str, threads: int, *, few_rows: int = 0, no_shim: str = ""
) -> BlasReport:
    """Check that MLX will call the loaded file, set the number of threads of the BLAS, and report.

    loaded_file: the file that MLX should call: the shim or the BLAS. few_rows, no_shim: as in
    `BlasReport`.
    """
    called_file = _file_of_symbol("cblas_sgemm")
    if called_file != os.path.realpath(loaded_file):
        return BlasReport(
            in_front=False, threads=threads, reason=f"{called_file} comes before {loaded_file}"
        )
    file = _file_of_symbol(f"{library.prefix}cblas_sgemm{library.suffix}", library.handle)
    name, version = Path(file).name, ""
    if library.config:
        library.function("openblas_set_num_threads")(threads)
        name = "OpenBLAS"
        version = library.config.split()[1] if library.config.startswith("OpenBLAS ") else ""
    elif hasattr(library.handle, "MKL_Set_Num_Threads"):
        library.handle.MKL_Set_Num_Threads(threads)
        name = "MKL"
    return BlasReport(
        in_front=True,
        name=name,
        version=version,
        threads=threads,
        file=file,
        core=library.text("openblas_get_corename"),
        no_shim=no_shim,
        few_rows=few_rows,
    )


def _file_of_symbol(symbol: str, library: ctypes.CDLL | None = None) -> str:
    """The file that provides a symbol to libraries loaded later, or in `library`; empty: none."""
    process = ctypes.CDLL(None)
    try:
        function = getattr(library or process, symbol)
    except AttributeError:
        return ""
    info = (ctypes.c_char_p * 4)()  # Dl_info: four pointers; the first one points to the file name
    is_found = process.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    file = info[0] if is_found else None
    return os.path.realpath(os.fsdecode(file)) if file else ""


@contextmanager
def _thread_variables(threads: int) -> Iterator[None]:
    """Set the environment variables by which BLAS libraries choose their threads, within the block."""
    previous_values = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
