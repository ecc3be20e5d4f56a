"""Selects the device of a process, and what computes on it in place of MLX."""

from __future__ import annotations

from holdfast.config import DeviceChoice
from holdfast.machine import platform
from holdfast.worker.cpu.backend import backend_of_device
from holdfast.worker.engine import backend


def use_device(device: DeviceChoice) -> None:
    """Select the device for this thread, and its backend for this process. Call it before a model
    is loaded.

    Raises ModelLoadError if a GPU is requested but there is none.
    """
    platform.use_device(device)
    backend.use(backend_of_device())
