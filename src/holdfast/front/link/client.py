"""A model as the front sees it, whichever worker serves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from holdfast.front.link.event_stream import EventStream
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import ModelInfo, WorkerStatistics
from holdfast.wire.sessions import SessionAnswer, SessionCommand


class EngineClient(Protocol):
    """A model that is served, seen from an asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """What its worker knows of it."""
        ...

    def submit(self, request: SequenceRequest) -> EventStream:
        """Send one sequence.

        First event: Accepted or Rejected (and nothing after it); last event of an accepted one:
        Finished.

        The stream goes on when the worker dies and another one takes its place. Raises
        WorkerUnavailable when none ever will. Closing the stream early cancels the request.
        """
        ...

    async def statistics(self) -> WorkerStatistics:
        """The worker's counters of now, or the last ones known when it is busy with a long step."""
        ...

    async def ask_session(self, command: SessionCommand) -> SessionAnswer:
        """Have a session command carried out; another worker is asked once more when the first one
        dies meanwhile.

        A failed answer says so where the first may have done it. Raises WorkerUnavailable when no
        worker comes, or both die.
        """
        ...


LeaseOf: TypeAlias = Callable[[str, int], AbstractAsyncContextManager[EngineClient]]
"""A lease of a model, for so many sequences: its client, while the model is kept for that.

Entering it waits for the model.

Raises UnknownModel, WorkerUnavailable and QueueFull.
"""
