"""Selects the device of a process and the code that computes on it in place of MLX, and releases the
device at the end.
"""

from __future__ import annotations

import contextlib

import mlx.core as mx

from holdfast.config import DeviceChoice
from holdfast.machine import platform
from holdfast.worker.engine import backend
from holdfast.worker.engine.backend import Backend


def use_device(device: DeviceChoice) -> None:
    """Select the device for this thread, and its backend for this process. Call it before a model
    is loaded.

    Raises ModelLoadError if a GPU is requested but there is none.
    """
    platform.use_device(device)
    backend.use(backend_of_device())


def backend_of_device() -> Backend:
    """The backend of MLX's default device. On a GPU, that for CPUs is not imported."""
    if mx.default_device() != mx.Device(mx.cpu):
        return Backend()
    from holdfast.worker.cpu.backend import CpuBackend

    return CpuBackend()


def finish_steps() -> None:
    """Wait until the device has nothing to do. Device thread only."""
    with contextlib.suppress(RuntimeError):  # of a step that failed, which was reported
        mx.synchronize()


def release_device() -> None:
    """Free the streams of this thread before it ends: MLX aborts at exit if any are left."""
    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()
