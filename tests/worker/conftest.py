"""Tests of the worker compute as a worker on this device does."""

from __future__ import annotations

from holdfast.worker.engine.backend import use
from holdfast.worker.loop.device import backend_of_device

use(backend_of_device())
