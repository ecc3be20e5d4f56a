"""Session commands on their way to the worker of the model whose sessions they are about."""

from __future__ import annotations

from holdfast.errors import SessionRefused
from holdfast.front.link.client import LeaseOf
from holdfast.wire.sessions import SessionAnswer, SessionCommand, SessionInfo


async def carry_out(
    lease_of: LeaseOf, model: str, command: SessionCommand
) -> tuple[SessionInfo, ...]:
    """Have a command carried out; returns the session that it was about, or all. Loop's thread.

    Raises SessionRefused, UnknownModel, QueueFull, and WorkerUnavailable when no worker comes, or
    dies of it twice.
    """
    async with lease_of(model, 1) as client:
        return sessions_of(await client.ask_session(command))


def sessions_of(answer: SessionAnswer) -> tuple[SessionInfo, ...]:
    """The sessions in an answer. Raises SessionRefused when it says why there are none."""
    if answer.failure is not None:
        raise SessionRefused(answer.failure, answer.message)
    return answer.sessions
