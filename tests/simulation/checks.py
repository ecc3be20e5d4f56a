"""What must always be true in the simulated world, by name."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Accepted, Finished, Rejected, TokensGenerated
from tests.simulation.actions import Call, Trouble, Turn
from tests.simulation.agents import Heard, expected
from tests.simulation.device import Oracle

if TYPE_CHECKING:
    from tests.simulation.front import SimulatedFront
    from tests.simulation.simulation import Simulation


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str, *, at: float) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what, self.at = invariant, what, at


class Checks:
    """Watches one run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.states: set[tuple[str, str]] = set()
        self.answers = 0
        self.excuses: list[tuple[float, Trouble]] = []
        # what the front has asked workers, by request id
        self.requests: dict[str, SequenceRequest] = {}
        self._models: dict[str, str] = {}
        self._checked = 0
        _running[:] = [self]

    # -- what agents report

    def began(self, request_id: str, turn: Turn) -> None:
        """An agent has sent a request."""

    def ended(
        self, request_id: str, turn: Turn, heard: Heard, *, began: float, front: SimulatedFront
    ) -> None:
        """An agent has the whole answer: it must be right."""
        self.answers += 1
        self._check_texts(request_id, turn, heard, is_whole=heard.status == 200 and not heard.error)

    def broke(
        self, request_id: str, turn: Turn, heard: Heard, *, began: float, front: SimulatedFront
    ) -> None:
        """An agent has a part of the answer."""
        self._check_texts(request_id, turn, heard, is_whole=False)

    def _check_texts(self, request_id: str, turn: Turn, heard: Heard, *, is_whole: bool) -> None:
        for choice, text in heard.texts.items():
            request = self.requests.get(f"{request_id}/{choice}")
            if request is None:
                continue
            right, end = expected(request, turn.model)
            if is_whole and (text, heard.ends.get(choice)) != (right, end):
                self.simulation.violation(
                    "the oracle's tokens",
                    f"choice {choice} of {request_id} is {text!r} ({heard.ends.get(choice)}) "
                    f"instead of {right!r} ({end})",
                )
            if not right.startswith(text):
                self.simulation.violation(
                    "the oracle's tokens",
                    f"choice {choice} of {request_id} begins with {text!r} instead of {right!r}",
                )

    def called(self, call: Call, status: int, answer: Any) -> None:
        """A short request was answered."""
        if status >= 500 and status != 503:
            self.simulation.violation("no 500", f"{call.method} {call.path}: {answer}")

    def excuse(self, trouble: Trouble) -> None:
        """Something goes wrong, so that requests may fail."""
        self.excuses.append((self.world.now, trouble))

    # -- always

    def after_event(self) -> None:
        """Called after each event."""

    def at_rest(self) -> None:
        """No agent waits for anything."""

    def at_end(self) -> None:
        """The server has stopped."""


_running: list[Checks] = []


def install() -> None:
    """Look at what passes between front and workers."""
    send = WorkerLink.send

    def seen(link: WorkerLink, command: Any) -> bool:
        if _running and isinstance(command, SequenceRequest):
            _running[-1].requests.setdefault(command.request_id, command)
        return send(link, command)

    WorkerLink.send = seen  # type: ignore[method-assign]


_ = (Counter, Accepted, Finished, Rejected, TokensGenerated, Oracle)
