"""Kernels are compiled once, kept privately, and optional."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.worker.cpu.kernels import build
from holdfast.worker.cpu.kernels.build import Kernel
from tests.fakes.fewer_instructions import QUICKLY
from tests.fakes.slow import slow

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only used on Linux"),
    pytest.mark.skipif(
        shutil.which("cc") is None
        and shutil.which("gcc") is None
        and shutil.which("clang") is None,
        reason="there is no C compiler",
    ),
]
NAME = "decode_attention"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0"))  # compiles in a tenth of the time
    build.kernel.cache_clear()
    yield tmp_path / "holdfast" / "kernels"
    build.kernel.cache_clear()


def loaded_again() -> Kernel:
    build.kernel.cache_clear()
    return build.kernel(NAME)


def test_a_kernel_is_compiled_once_and_found_again(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(lambda _: loaded_again(), range(2)))
    assert all(kernel.library for kernel in kernels)
    (file,) = folder.iterdir()
    built = file.stat().st_ino
    assert loaded_again().library is not None
    assert [each.stat().st_ino for each in folder.iterdir()] == [built]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_versions_unused_for_long_are_deleted(folder: Path) -> None:
    assert loaded_again().library is not None
    (current,) = folder.iterdir()
    old = [folder / f"{NAME}-{version}.so" for version in range(build.MOST_VERSIONS)]
    for version, file in enumerate(old):
        file.touch()
        os.utime(file, (version, version))
    assert loaded_again().library is not None
    assert set(folder.iterdir()) == {current, *old[1:]}


def test_a_folder_writable_by_others_is_not_trusted(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    kernel = loaded_again()
    assert kernel.library is None
    assert kernel.reason == f"other users can write to {folder}"


@pytest.fixture
def temporary(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for kernels when nothing can be written to the user's caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(build, "_TEMPORARY_FOLDERS", (str(tmp_path / "missing"), str(tmp_path)))
    (tmp_path / "missing").write_text("a file")
    return tmp_path / f"holdfast-kernels-{os.getuid()}"


def test_without_a_writable_home_the_temporary_folder_is_used(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert NAME in build.uncompiled()
    assert loaded_again().library is not None
    assert temporary.stat().st_mode & 0o777 == 0o700
    (file,) = temporary.iterdir()
    built = file.stat().st_ino
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"compiled kernels are kept in {temporary}, because " in line.message
    assert NAME not in build.uncompiled()
    assert loaded_again().library is not None
    assert [each.stat().st_ino for each in temporary.iterdir()] == [built]


@pytest.mark.parametrize("how", ["writable by others", "a link"])
def test_a_temporary_folder_created_by_others_is_not_trusted(
    how: str, temporary: Path, tmp_path: Path
) -> None:
    if how == "a link":
        (tmp_path / "target").mkdir(mode=0o700)
        temporary.symlink_to(tmp_path / "target")
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    kernel = loaded_again()
    assert kernel.library is None
    assert str(temporary) in kernel.reason


def test_the_log_says_that_a_kernel_is_being_compiled(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        loaded_again()
        loaded_again()
    (line,) = [record.message for record in caplog.records if "compiling" in record.message]
    assert NAME in line
    assert "10 s" in line


def test_a_failing_compiler_is_named_as_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_FLAGS", ("-fno-such-flag",))
    kernel = loaded_again()
    assert kernel.library is None
    assert kernel.reason.startswith("the compiler failed: ")
    assert list(folder.iterdir()) == []


def test_without_a_compiler_the_kernel_is_unavailable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert loaded_again() == Kernel(None, "there is no C compiler (cc, gcc, clang)")


def test_a_variable_disables_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert loaded_again() == Kernel(None, "HOLDFAST_KERNELS is 0")
    assert not folder.exists()


@pytest.mark.parametrize("names", ["decode_attention", "few_rows,decode_attention", "1", ""])
def test_kernels_can_be_chosen_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setenv(build.SWITCH, names)
    assert build.is_on(NAME)
    assert build.is_on("products") == (names in ("", "1"))


SOURCES = sorted(Path(build.__file__).parent.glob("*.c"))
# As on CPUs without AVX-512, and without AVX. The usual -O3 enables more warnings, but takes longer.
LESS = ["-mno-avx512f", "-mno-avx"] if platform.machine() == "x86_64" else []


@pytest.mark.parametrize("less", [QUICKLY, *slow("", *LESS)])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_sources_compile_without_warnings(tmp_path: Path, source: Path, less: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler
    done = subprocess.run(
        [
            compiler,
            *build._FLAGS,
            *less.split(),
            "-Wall",
            "-Wextra",
            "-Wno-psabi",  # the functions with vectors are static
            "-o",
            str(tmp_path / "out.so"),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
