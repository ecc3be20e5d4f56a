"""The library's sessions: the command that a call becomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import asdict

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.library.llm import Sessions
from holdfast.wire.sessions import SESSION_OPERATIONS, OperationName, SessionAnswer, SessionCommand
from tests.fakes.scripted_gateway import SESSION


class AnsweringClient:
    """A stand-in for the worker: records the commands, and answers with one session or a failure."""

    def __init__(self, failure: SessionFailure | None = None) -> None:
        self.asked: list[SessionCommand] = []
        self.failure = failure

    def call(self, command: SessionCommand) -> SessionAnswer:
        self.asked.append(command)
        if self.failure is not None:
            return SessionAnswer(call_id=command.call_id, failure=self.failure, message="because")
        return SessionAnswer(call_id=command.call_id, sessions=(SESSION,))


CALLS: dict[OperationName, Callable[[Sessions], object]] = {
    "list": lambda sessions: sessions.list(),
    "open": lambda sessions: sessions.open("a", ttl_seconds=None, pinned=True, metadata={"k": "v"}),
    "import": lambda sessions: sessions.import_from("/file", "a"),
    "export": lambda sessions: sessions.export_to("/file", "a"),
    "get": lambda sessions: sessions.get("a"),
    "update": lambda sessions: sessions.update(
        "a", ttl_seconds=None, pinned=True, metadata={"k": "v"}
    ),
    "fork": lambda sessions: sessions.fork("a", "b", ttl_seconds=None, pinned=True),
    "close": lambda sessions: sessions.close("a", forget=True),
}


@pytest.mark.parametrize("name", SESSION_OPERATIONS)
def test_every_operation_has_a_method_with_all_its_parameters(name: OperationName) -> None:
    client = AnsweringClient()
    CALLS[name](Sessions(client, tenant="t"))  # type: ignore[arg-type]
    (command,) = client.asked
    bare = asdict(SessionCommand(operation=name, tenant="t", call_id=command.call_id))
    given = {field for field, value in asdict(command).items() if value != bare[field]}
    assert given == set(SESSION_OPERATIONS[name].takes) - {
        "limit"
    }  # the library lists all sessions


def test_an_update_changes_only_what_is_given() -> None:
    client = AnsweringClient()
    Sessions(client, tenant="").update("a")  # type: ignore[arg-type]
    (command,) = client.asked
    assert command == SessionCommand(
        operation="update", tenant="", session_id="a", call_id=command.call_id
    )


def test_a_refusal_is_raised_with_its_reason() -> None:
    with pytest.raises(SessionRefused, match="because") as caught:
        Sessions(AnsweringClient(SessionFailure.EXISTS), tenant="").open("a")  # type: ignore[arg-type]
    assert caught.value.failure is SessionFailure.EXISTS
