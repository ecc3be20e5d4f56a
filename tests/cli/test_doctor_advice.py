"""Doctor's recommendations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.cli.doctor import advice, has_cuda_wheel, has_nvidia_gpu
from holdfast.cli.machine_report import MachineReport
from holdfast.machine.device_memory import DeviceMemory
from holdfast.worker.cpu.blas import BlasReport

ON_CPU = MachineReport(
    device="cpu",
    backend="cpu",
    device_name="a processor",
    mlx_version="0.32.4",
    mlx_lm_version="0.32.2",
    blas=BlasReport(in_front=False),
    memory=DeviceMemory(total_bytes=1, available_bytes=1),
    can_compile=False,
    recommendations=("install OpenBLAS", "install g++"),
)


LINUX: dict[str, Any] = {
    "system": "Linux",
    "architecture": "x86_64",
    "nvidia_gpu": False,
    "cuda_wheel": False,
}


def test_without_mlx_the_first_advice_is_mlx() -> None:
    assert "MLX does not run" in advice(None, **LINUX)[0]


def test_the_platforms_recommendations_are_passed_on() -> None:
    assert advice(ON_CPU, **LINUX) == ON_CPU.recommendations


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"nvidia_gpu": True},
            "pip install -c constraints.txt '.[cuda]' && pip install --force-reinstall --no-deps "
            "mlx-cuda-13",
        ),
        ({"nvidia_gpu": True, "cuda_wheel": True}, "--force-reinstall"),
        ({"system": "Darwin"}, "Apple silicon"),
        ({"system": "Darwin", "architecture": "arm64"}, "macOS 14"),
    ],
)
def test_an_unused_gpu_comes_first(changes: dict[str, Any], part: str) -> None:
    first, *rest = advice(ON_CPU, **LINUX | changes)
    assert part in first
    assert tuple(rest) == ON_CPU.recommendations


def test_a_gpu_in_use_needs_no_advice_about_gpus() -> None:
    on_gpu = dataclasses.replace(ON_CPU, device="gpu", backend="cuda", recommendations=())
    assert advice(on_gpu, **LINUX | {"nvidia_gpu": True}) == ()


def test_detection_works_on_any_machine() -> None:
    assert {has_nvidia_gpu(), has_cuda_wheel()} <= {True, False}
