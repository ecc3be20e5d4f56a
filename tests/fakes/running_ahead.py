"""An engine that is asked for step k+1 before step k is collected, as on a GPU."""

from __future__ import annotations

from holdfast.worker.engine.engine import Engine


class RunningAhead(Engine):
    """The real one, but for that."""

    @property
    def runs_ahead(self) -> bool:
        return True
