"""Tests of the worker compute as a worker on this device does."""

from __future__ import annotations

from holdfast.worker.cpu.backend import backend_of_device
from holdfast.worker.engine.backend import use

use(backend_of_device())
