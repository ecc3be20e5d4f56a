"""The library's sessions: named branches of what a model in this process keeps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from holdfast.front.prompt.session_commands import sessions_of
from holdfast.library.in_process import InProcessClient
from holdfast.wire.sessions import SessionCommand, SessionInfo

LEAVE = msgspec.UNSET  # says that a value stays as it is, or as the settings have it


class Sessions:
    """The sessions of one tenant. Any thread may call any method; each blocks until it is done.

    All raise SessionRefused, whose `failure` tells why, and WorkerUnavailable when the model is
    closed.
    """

    def __init__(self, client: InProcessClient, *, tenant: str) -> None:
        self._client, self._command = client, partial(SessionCommand, tenant=tenant)

    def list(self) -> tuple[SessionInfo, ...]:
        """All sessions, the last used first."""
        return self._ask(self._command(operation="list"))

    def get(self, session_id: str) -> SessionInfo:
        """One session."""
        return self._one(self._command(operation="get", session_id=session_id))

    def open(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionInfo:
        """Begin a session. ttl_seconds: how long it lives after its last use; None: until it is
        closed.
        """
        kept = dict(metadata or {})
        return self._one(
            self._command(
                operation="open",
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=kept,
            )
        )

    def update(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool | msgspec.UnsetType = LEAVE,
        metadata: Mapping[str, str] | msgspec.UnsetType = LEAVE,
    ) -> SessionInfo:
        """Change a session; what is not given stays."""
        kept = metadata if metadata is msgspec.UNSET else dict(metadata)
        return self._one(
            self._command(
                operation="update",
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=kept,
            )
        )

    def fork(
        self,
        session_id: str,
        new_session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
    ) -> SessionInfo:
        """Begin a session where another one is; both go on from there, and share what they have in
        common.
        """
        fork = self._command(operation="fork", session_id=session_id, new_session_id=new_session_id)
        return self._one(msgspec.structs.replace(fork, ttl_seconds=ttl_seconds, pinned=pinned))

    def close(self, session_id: str, *, forget: bool = False) -> SessionInfo:
        """End a session; forget: delete what it has read, as far as nobody else stands on it.

        Returns it as it was.
        """
        return self._one(self._command(operation="close", session_id=session_id, forget=forget))

    def export_to(self, path: str | Path, session_id: str) -> SessionInfo:
        """Write a session with everything that is kept of it into a file."""
        return self._one(
            self._command(
                operation="export", session_id=session_id, path=str(Path(path).absolute())
            )
        )

    def import_from(self, path: str | Path, session_id: str = "") -> SessionInfo:
        """Take in a session from a file, under its own name or another one.

        Same model, weights, tokenizer and codec only.
        """
        return self._one(
            self._command(
                operation="import", session_id=session_id, path=str(Path(path).absolute())
            )
        )

    def _one(self, command: SessionCommand) -> SessionInfo:
        (info,) = self._ask(command)
        return info

    def _ask(self, command: SessionCommand) -> tuple[SessionInfo, ...]:
        return sessions_of(self._client.ask_session(command))
