"""Session commands on their way to the worker of the model whose sessions they are about."""

from __future__ import annotations

from holdfast.errors import SessionRefused
from holdfast.link.client import ClientOf
from holdfast.messages.sessions import SessionCommand, SessionInfo


class SessionDesk:
    """The sessions of all models. Loop's thread."""

    def __init__(self, client_of: ClientOf) -> None:
        self._client_of = client_of

    async def carry_out(self, model: str, command: SessionCommand) -> tuple[SessionInfo, ...]:
        """Have a command carried out; returns the session that it was about, or all.

        Raises SessionRefused, UnknownModel, QueueFull, and WorkerUnavailable when the worker is not there or dies meanwhile.
        """
        client = await self._client_of(model, 1)
        answer = await client.ask_session(command)
        if answer.failure is not None:
            raise SessionRefused(answer.failure, answer.message)
        return answer.sessions
