"""What intake needs of residency."""

from __future__ import annotations

from typing import Protocol

from holdfast.link.client import EngineClient


class Leases(Protocol):
    """Residency, as far as requests and sessions use it."""

    async def lease(self, model: str, *, sequences: int = 1) -> EngineClient:
        """The running worker of a model, for so many sequences; waits for a while when the model is being loaded.

        Raises UnknownModel, WorkerUnavailable and QueueFull.
        """
        ...
