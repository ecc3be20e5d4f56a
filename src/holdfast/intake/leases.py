"""What intake needs of residency."""

from __future__ import annotations

from typing import Protocol

from holdfast.link.client import EngineClient


class Leases(Protocol):
    """Residency, as far as requests and sessions use it."""

    def lease(self, model: str) -> EngineClient:
        """The running worker of a model. Raises UnknownModel and WorkerUnavailable."""
        ...
