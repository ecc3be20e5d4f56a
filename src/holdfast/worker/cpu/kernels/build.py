"""Compiles the C kernels on first use, for the CPU of this machine, and caches the compiled files.

A kernel is optional: without a compiler, or if HOLDFAST_KERNELS turns it off, its callers compute
the same result with MLX or numpy. HOLDFAST_KERNELS is 0 to turn all kernels off, or the names of
those to use, separated by commas. Compiled files are kept in the user's cache folder or, if that is
read-only, in a subfolder of the system's temporary folder that only the user can write to (the
fallback folder).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from holdfast.files import kernels_folder

logger = logging.getLogger(__name__)

SWITCH = "HOLDFAST_KERNELS"
_COMPILERS = ("cc", "gcc", "clang")
# Tuned for AMD's Zen, GCC avoids fused multiply-add in some loops, but not in others: a row alone
# would be rounded differently than among others, and products of 4 to 32 rows take twice as long.
_TUNING = ("-mtune=skylake-avx512",) if platform.machine() == "x86_64" else ()
_ALWAYS_FUSED = ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0")
_FLAGS = ("-O3", "-march=native", *_TUNING, *_ALWAYS_FUSED, "-shared", "-fPIC", "-pthread")
_BUILD_SECONDS = 900  # 5 to 15 on an idle machine, many times more on a busy one
_PRIVATE_MODE = 0o700
_TEMPORARY_FOLDERS = ("/var/tmp", "/tmp")
MOST_VERSIONS = 4  # compiled files to keep of each kernel, for several environments; each 40 KB


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel. library: None if the kernel cannot be used; `reason` then says why."""

    library: ctypes.CDLL | None
    reason: str = ""


def is_on(name: str) -> bool:
    """Whether HOLDFAST_KERNELS lets the kernel `name` be used."""
    names = os.environ.get(SWITCH, "")
    return names in ("", "1") or name in names.split(",")


def turned_off(name: str) -> str:
    """Why HOLDFAST_KERNELS does not let the kernel `name` be used; empty if it does."""
    return "" if is_on(name) else f"{SWITCH} is {os.environ[SWITCH]}"


@cache
def kernel(name: str) -> Kernel:
    """Load the kernel `name`, and compile it if this version was not compiled here before."""
    if reason := turned_off(name):
        return Kernel(None, reason)
    if sys.platform != "linux":
        return Kernel(None, "only used on Linux")
    source = Path(__file__).with_name(f"{name}.c")
    try:
        return Kernel(ctypes.CDLL(str(_compiled(source))))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = _reason(error)
        logger.info("the kernel %s is not used: %s", name, reason)
        return Kernel(None, reason)


def _compiled(source: Path) -> Path:
    """Compile a source file unless that was done before, and return the compiled file. Raises
    OSError, RuntimeError or SubprocessError.
    """
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(f"there is no C compiler ({', '.join(_COMPILERS)})")
    name = _file_name(source, compiler)
    folders = _folders()
    if (compiled := _find(name, folders)) is not None:
        with suppress(OSError):  # the folder has become read-only
            os.utime(compiled)  # `_delete_unused` deletes the files with the oldest times
            _delete_unused(compiled.parent, source.stem)
        return compiled
    folder, why_not_first = _writable(folders)
    if why_not_first:
        logger.warning("compiled kernels are kept in %s, because %s", folder, why_not_first)
    logger.info(
        "compiling the kernel %s for this CPU, once; on an idle machine, this takes some 10 s",
        source.stem,
    )
    target = folder / name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / target.name
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(built), str(source), "-lm"],
            check=True,
            capture_output=True,
            timeout=_BUILD_SECONDS,
        )
        built.replace(target)  # atomic: several workers may compile concurrently
    _delete_unused(folder, source.stem)
    return target


def uncompiled() -> tuple[str, ...]:
    """The names of the kernels that the next start will compile; empty if it cannot compile any."""
    compiler = _compiler()
    if sys.platform != "linux" or compiler is None:
        return ()
    sources = [source for source in sorted(Path(__file__).parent.glob("*.c")) if is_on(source.stem)]
    try:
        folders = _folders()
        return tuple(
            source.stem
            for source in sources
            if _find(_file_name(source, compiler), folders) is None
        )
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return ()


def _compiler() -> str | None:
    """The path of the first C compiler that is installed; None if there is none."""
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _file_name(source: Path, compiler: str) -> str:
    """The name of the compiled file: a hash of all that its code depends on."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=_BUILD_SECONDS
    ).stdout
    sources = [source, *sorted(source.parent.glob("*.h"))]
    identity = [
        *(file.read_bytes() for file in sources),
        version,
        " ".join(_FLAGS).encode(),
        _cpu().encode(),
    ]
    digest = hashlib.sha256(b"\0".join(identity)).hexdigest()[:32]
    return f"{source.stem}-{digest}.so"


def _folders() -> list[Path]:
    """The folders that may contain compiled kernels, the best one first. TMPDIR is not used,
    because each worker has its own, which is deleted.
    """
    try:
        in_cache = [kernels_folder(os.environ)]
    except RuntimeError:  # the user lacks a home folder
        in_cache = []
    return [*in_cache, *fallback_folders()]


def fallback_folders() -> list[Path]:
    """This user's folders for compiled kernels outside the cache folder, the best one first."""
    return [Path(each) / f"holdfast-kernels-{os.getuid()}" for each in _TEMPORARY_FOLDERS]


def kept_elsewhere() -> list[Path]:
    """The fallback folders that exist. A link, or another user's folder, is not one of them."""
    folders = []
    for folder in fallback_folders():
        with suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                folders.append(folder)
    return folders


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    """A compiled file in one of the folders; None if there is none. Raises RuntimeError if other
    users can write to its folder.
    """
    for folder in folders:
        if (folder / name).exists():
            _check_private(folder)
            return folder / name
    return None


def _writable(folders: Sequence[Path]) -> tuple[Path, str]:
    """The first writable folder, and why the folders before it are not used.

    Raises RuntimeError if other users can write to it, OSError if no folder is writable.
    """
    refusals: list[str] = []
    for folder in folders:
        try:
            folder.mkdir(mode=_PRIVATE_MODE, parents=True, exist_ok=True)
            _check_private(folder)
            with tempfile.TemporaryFile(dir=folder):
                return folder, "; ".join(refusals)
        except OSError as error:
            refusals.append(f"{folder} cannot be written ({error.strerror})")
    raise OSError("; ".join(refusals))


def _delete_unused(folder: Path, name: str) -> None:
    """Delete the compiled versions of a kernel, except the most recently loaded ones."""
    with suppress(FileNotFoundError):  # another process deletes them at the same time
        versions = sorted(folder.glob(f"{name}-*.so"), key=lambda file: file.stat().st_mtime_ns)
        for file in versions[:-MOST_VERSIONS]:
            file.unlink(missing_ok=True)


def _check_private(folder: Path) -> None:
    """Raise RuntimeError if other users can write to a folder."""
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) and folder.parent in map(Path, _TEMPORARY_FOLDERS):
        raise RuntimeError(f"{folder} is a symbolic link")
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"other users can write to {folder}")


def _cpu() -> str:
    """A text that differs between CPUs for which -march=native creates different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(names)})])


def _reason(error: Exception) -> str:
    """Why a kernel could not be compiled or loaded, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"the compiler failed: {lines[0] if lines else f'exit status {error.returncode}'}"
    return str(error)
