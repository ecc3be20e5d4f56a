"""The sessions of a worker that keeps nothing: there are none."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import SessionFailure
from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.sessions import SessionAnswer, SessionCommand


class NoSessions:
    """Answers every command with a refusal."""

    @property
    def is_busy(self) -> bool:
        """Never."""
        return False

    def carry_out(self, command: SessionCommand) -> SessionAnswer:
        """A refusal."""
        message = "this worker keeps nothing of what it reads, so there are no sessions"
        return SessionAnswer(call_id=command.call_id, failure=SessionFailure.OFF, message=message)

    def used(self, session_id: str, *, tenant: str, chain: bytes | bytearray) -> None:
        """Nothing was kept, so there is nothing to hold on to."""

    def keep_prefixes(
        self,
        wanted: Sequence[PinnedPrefix],
        *,
        tenant: str,
        chain: bytes | bytearray,
        began_from: Sequence[BlockKey],
    ) -> None:
        """Nothing was kept, so there is nothing to pin."""

    def tend(self) -> list[SessionAnswer]:
        """Nothing is due."""
        return []

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """There are no threads."""
