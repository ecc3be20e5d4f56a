"""An engine that is given step k+1 before step k is collected, as on a GPU."""

from __future__ import annotations

from holdfast.worker.engine.engine import Engine


class RunningAhead(Engine):
    """The real engine, except for that."""

    @property
    def runs_ahead(self) -> bool:
        return True
