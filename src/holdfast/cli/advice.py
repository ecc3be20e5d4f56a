"""What to install so that models run faster on this machine."""

from __future__ import annotations

import shutil
from importlib.metadata import distributions
from pathlib import Path

from holdfast.machine.platform import PlatformReport

_CUDA_WHEELS = {"mlx-cuda-12", "mlx-cuda-13"}
_UNHIDE_CUDA = "pip install --force-reinstall --no-deps mlx-cuda-13"
# From the clone: no index has a distribution of ours yet, and the name `holdfast` on PyPI is
# another project's.
_INSTALL_CUDA = f"pip install -c constraints.txt '.[cuda]' && {_UNHIDE_CUDA}"


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
