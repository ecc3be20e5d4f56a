"""Puts a fast BLAS in front of the reference BLAS that the Linux CPU wheel of MLX is linked
against; finds numpy's.

Symbols of a library that is loaded globally come before those of libraries loaded later. So
OpenBLAS or MKL must be loaded before the first import of `mlx.core`; this module imports no MLX.
Measured: float32 products become 13 times faster.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.machine.cores import usable_cores

_SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "sgemm_", "sgemv_", "strsm_")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """The BLAS that MLX computes with. `in_front` False: MLX's own, and `reason` says why."""

    in_front: bool
    name: str = "built in"
    version: str = ""
    threads: int = 0  # that products may use; MLX's own BLAS uses one whatever it says
    file: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if not self.in_front:
            return f"built in ({self.reason})" if self.reason else "built in"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.name} {self.version}, {threads}".replace(" ,", ",")


_current = BlasReport(in_front=False, reason="nothing was put in front of it")


def prepare_blas(threads: int | None = None) -> BlasReport:
    """Load OpenBLAS or MKL ahead of MLX; `threads` None means one per usable core.

    Call before anything imports MLX.

    Does nothing on systems other than Linux, after MLX was imported, or when neither library can be
    used; the result says so.
    Idempotent: a later call only returns what the first one found.
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
    """What `prepare_blas` found."""
    return _current


@dataclass(frozen=True, slots=True)
class BlasThreads:
    """The number of threads that one loaded library multiplies with, for the whole process.

    core: the processor whose kernels OpenBLAS has chosen, "" where it does not say.
    """

    get: Callable[[], int]
    set: Callable[[int], None]
    core: str = ""


def blas_of_numpy() -> tuple[BlasThreads, ...]:
    """What numpy, once imported, multiplies with: a library of its own, or the one in front of MLX.

    Linux; empty when unknown.
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
    own = files - {_current.file}
    return tuple(
        threads for file in sorted(own or files) if (threads := _threads_of(file)) is not None
    )


def _threads_of(file: str) -> BlasThreads | None:
    try:
        library = ctypes.CDLL(file)
    except OSError:
        return None
    for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
        get, put = (f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set"))
        if hasattr(library, put):
            return BlasThreads(
                getattr(library, get),
                getattr(library, put),
                _core(library, f"{prefix}openblas_get_corename{suffix}"),
            )
    if hasattr(library, "MKL_Set_Num_Threads"):
        return BlasThreads(library.MKL_Get_Max_Threads, library.MKL_Set_Num_Threads)
    return None


def _wanted_threads() -> int:
    """One per usable core, fewer if the environment says so."""
    said = [
        int(value)
        for name in _THREAD_VARIABLES
        if (value := os.environ.get(name, "")).isdigit() and int(value) > 0
    ]
    return min([usable_cores(), *said[:1]])


def _candidates() -> list[str]:
    """Files and names to try.

    Wheels such as numpy's or scipy-openblas prefix their symbols and cannot stand in front.
    """
    prefixes = [os.environ.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix]
    folders = [Path(prefix) / "lib" for prefix in dict.fromkeys(prefixes) if prefix]
    files = [
        str(folder / name)
        for name in ("libopenblas.so.0", "libmkl_rt.so.2")
        for folder in folders
        if (folder / name).exists()
    ]
    return [*files, "libopenblas.so.0", "libmkl_rt.so.2"]


def _load_first(candidates: list[str], *, threads: int) -> BlasReport:
    refusals = []
    for candidate in candidates:
        try:
            # Its threads start while it is loaded, one per core of the machine unless told
            # otherwise.
            with _thread_variables(threads):
                library = ctypes.CDLL(candidate, mode=ctypes.RTLD_LOCAL)
        except OSError:
            continue
        refusal = _refusal(library)
        if refusal:
            refusals.append(f"{candidate}: {refusal}")
            continue
        # the same library, now before all that come later
        ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        return _described(library, candidate, threads)
    return BlasReport(
        in_front=False,
        threads=threads,
        reason="; ".join(refusals) or "neither OpenBLAS nor MKL was found",
    )


def _refusal(library: ctypes.CDLL) -> str:
    missing = [symbol for symbol in _SYMBOLS if not hasattr(library, symbol)]
    if missing:
        return f"lacks {missing[0]}"
    return "takes 64-bit integers" if "USE64BITINT" in _openblas_config(library) else ""


def _described(library: ctypes.CDLL, candidate: str, threads: int) -> BlasReport:
    file = _file_of_symbol("cblas_sgemm")
    if file != _file_of_symbol("cblas_sgemm", library):
        return BlasReport(
            in_front=False, threads=threads, reason=f"{file} comes before {candidate}"
        )
    config = _openblas_config(library)
    if config:
        library.openblas_set_num_threads(threads)
        version = config.split()[1] if config.startswith("OpenBLAS ") else ""
        return BlasReport(
            in_front=True, name="OpenBLAS", version=version, threads=threads, file=file
        )
    if hasattr(library, "MKL_Set_Num_Threads"):
        library.MKL_Set_Num_Threads(threads)
        return BlasReport(in_front=True, name="MKL", threads=threads, file=file)
    return BlasReport(in_front=True, name=Path(file).name, threads=threads, file=file)


def _core(library: ctypes.CDLL, name: str) -> str:
    if not hasattr(library, name):
        return ""
    question = getattr(library, name)
    question.restype = ctypes.c_char_p
    core: bytes | None = question()
    return (core or b"").decode(errors="replace")


def _openblas_config(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return ""
    library.openblas_get_config.restype = ctypes.c_char_p
    config: bytes | None = library.openblas_get_config()
    return (config or b"").decode(errors="replace")


def _file_of_symbol(symbol: str, library: ctypes.CDLL | None = None) -> str:
    """The file that provides the symbol: to whatever is loaded next, or in `library`.

    Empty if nobody does.
    """
    process = ctypes.CDLL(None)
    try:
        function = getattr(library or process, symbol)
    except AttributeError:
        return ""
    info = (ctypes.c_char_p * 4)()  # Dl_info: four pointers, the first of them to the file's name
    found = process.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    file = info[0] if found else None
    return os.path.realpath(os.fsdecode(file)) if file else ""


@contextmanager
def _thread_variables(threads: int) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
