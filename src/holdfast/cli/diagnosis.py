"""What `holdfast doctor` finds out. Everything that needs MLX happens in processes of its own."""

from __future__ import annotations

import dataclasses
import os
import platform as standard_platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from holdfast.cli.layout_check import LayoutCheck, check_layout
from holdfast.config import ModelSettings
from holdfast.errors import HoldfastError
from holdfast.front.fleet.crash_reports import CrashReport, last_report
from holdfast.front.prompt.dialects import DialectReport
from holdfast.machine.cores import usable_cores
from holdfast.machine.device_memory import DeviceMemory, memory_report
from holdfast.machine.platform import PlatformReport
from holdfast.models.download import resolve_model, served_id
from holdfast.models.measure import measure_gflops, platform_in_subprocess
from holdfast.user_folders import crash_reports_folder

_CUDA_WHEELS = {"mlx-cuda-12", "mlx-cuda-13"}
_UNHIDE_CUDA = "pip install --force-reinstall --no-deps mlx-cuda-13"
# From the clone: no index has a distribution of ours yet, and the name `holdfast` on PyPI is
# another project's.
_INSTALL_CUDA = f"pip install -c constraints.txt '.[cuda]' && {_UNHIDE_CUDA}"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said without MLX."""

    system: str
    architecture: str
    usable_cores: int
    memory: DeviceMemory
    python: str


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Billions of float32 operations per second in matrix products."""

    as_installed_gflops: float
    in_use_gflops: float  # the same number where no BLAS is put in front


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings; None where one failed, and `problems` says why."""

    machine: Machine
    platform: PlatformReport | None = None
    speed: Speed | None = None
    model_name: str = ""
    folder: str = ""
    model: LayoutCheck | None = None
    dialect: DialectReport | None = None
    last_crash: CrashReport | None = None  # of a worker of a server of this user
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def diagnose(settings: ModelSettings, *, progress: Callable[[str, float], None]) -> Diagnosis:
    """Look at everything; takes a few seconds and the time to load the model (and to fetch it)."""
    last_crash = last_report(crash_reports_folder(os.environ))
    found = Diagnosis(machine=_machine(), model_name=settings.path, last_crash=last_crash)
    for stage, look in (
        ("machine", _with_platform),
        ("speed", _with_speed),
        ("model", _with_model),
        ("dialect", _with_dialect),
    ):
        progress(stage, 0.0)
        try:
            found = look(found, settings, progress)
        except HoldfastError as error:
            found = msgspec.structs.replace(found, problems=(*found.problems, str(error)))
        progress(stage, 1.0)
    lines = advice(
        found.platform,
        system=standard_platform.system(),
        architecture=standard_platform.machine(),
        nvidia_gpu=has_nvidia_gpu(),
        cuda_wheel=has_cuda_wheel(),
    )
    if found.model is not None:
        lines = (*found.model.warnings, *lines)
    return msgspec.structs.replace(found, advice=lines)


def _machine() -> Machine:
    return Machine(
        system=f"{standard_platform.system()} {standard_platform.release()}",
        architecture=standard_platform.machine(),
        usable_cores=usable_cores(),
        memory=memory_report(),
        python=f"{standard_platform.python_version()} ({sys.executable})",
    )


def _with_platform(found: Diagnosis, settings: ModelSettings, _progress: object) -> Diagnosis:
    return msgspec.structs.replace(found, platform=platform_in_subprocess(threads=settings.threads))


def _with_speed(found: Diagnosis, settings: ModelSettings, _progress: object) -> Diagnosis:
    if found.platform is None:
        return found
    installed = measure_gflops(blas=False, threads=settings.threads)
    in_use = (
        measure_gflops(blas=True, threads=settings.threads)
        if found.platform.blas.in_front
        else installed
    )
    return msgspec.structs.replace(
        found, speed=Speed(as_installed_gflops=installed, in_use_gflops=in_use)
    )


def _with_model(
    found: Diagnosis, settings: ModelSettings, progress: Callable[[str, float], None]
) -> Diagnosis:
    folder = str(resolve_model(settings, progress=progress))
    found = msgspec.structs.replace(found, model_name=served_id(settings), folder=folder)
    if found.platform is None:
        return found
    return msgspec.structs.replace(
        found, model=check_layout(dataclasses.replace(settings, path=folder))
    )


def _with_dialect(found: Diagnosis, _settings: ModelSettings, _progress: object) -> Diagnosis:
    if not found.folder:
        return found
    # brings the tokenizer's library
    from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle

    return msgspec.structs.replace(
        found, dialect=load_tokenizer_bundle(Path(found.folder)).dialect_report
    )


def has_nvidia_gpu() -> bool:
    """Whether there is an NVIDIA GPU, whatever MLX says."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def has_cuda_wheel() -> bool:
    """Whether MLX for CUDA is installed, working or not."""
    return any(wheel.name in _CUDA_WHEELS for wheel in distributions())


def advice(
    report: PlatformReport | None,
    *,
    system: str,
    architecture: str,
    nvidia_gpu: bool,
    cuda_wheel: bool,
) -> tuple[str, ...]:
    """Lines for a person, most useful first.

    report: None when MLX does not run at all. system: Linux, Darwin. architecture: of this Python.
    """
    if report is None:
        return (
            "MLX does not run here: see the error; `pip install --force-reinstall mlx` may help",
        )
    idle = ""
    if report.backend == "cpu":
        idle = _idle_gpu(system, architecture, nvidia_gpu=nvidia_gpu, cuda_wheel=cuda_wheel)
    return (*((idle,) if idle else ()), *report.recommendations)


def _idle_gpu(system: str, architecture: str, *, nvidia_gpu: bool, cuda_wheel: bool) -> str:
    """Why a GPU that may be there is not used."""
    if system == "Darwin":
        if architecture == "x86_64":
            return (
                "this Python is an Intel program: install one for Apple silicon (arm64), MLX needs "
                "it"
            )
        return "Metal is not used: MLX wants macOS 14 or newer, on the machine itself"
    if not nvidia_gpu:
        return ""
    if not cuda_wheel:
        return (
            "there is an NVIDIA GPU that is not used: run `make venv` in Holdfast's clone, or "
            f"there {_INSTALL_CUDA}"
        )
    # Both wheels bring the file mlx/lib/libmlx.so; the one that was written last is used.
    return f"MLX for CUDA is installed, but hidden by the one for CPUs: {_UNHIDE_CUDA}"
