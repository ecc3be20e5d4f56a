"""The base class of the checks of one subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.checks import Checks


class Part:
    """The checks of one subject in one run."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.simulation = checks.simulation
        self.world = checks.world

    def _violation(self, invariant: str, what: str) -> None:
        self.simulation.violation(invariant, what)
