"""What to install so that models run faster on this machine."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.models.platform import PlatformReport


def advice(report: PlatformReport | None) -> tuple[str, ...]:
    """Lines for a person, most useful first. `report`: None when MLX does not run at all."""
    if report is None:
        return ("MLX does not run here: see the error; `pip install --force-reinstall mlx` may help",)
    lines = []
    if report.backend == "cpu":
        lines += [line for line in (_cuda_advice(), _mac_advice()) if line]
    return (*lines, *report.recommendations)


def _cuda_advice() -> str:
    """Why an NVIDIA GPU stands idle, if one does."""
    if platform.system() != "Linux" or not (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()):
        return ""
    if not _is_installed("mlx-cuda-13") and not _is_installed("mlx-cuda-12"):
        return "there is an NVIDIA GPU: pip install 'holdfast[cuda]'"
    # Both wheels bring the file mlx/lib/libmlx.so; the one that was written last is used.
    return "MLX for CUDA is installed, but hidden by the one for CPUs: pip install --force-reinstall --no-deps mlx-cuda-13"


def _mac_advice() -> str:
    if platform.system() != "Darwin":
        return ""
    if platform.machine() == "x86_64":
        return "this Python runs as an Intel program: install one for Apple silicon (arm64), MLX needs it"
    return "Metal is not used: MLX wants macOS 14 or newer, on the machine itself"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
