"""The library's sessions: named branches of what a model in this process keeps."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import SessionRefused
from holdfast.link.in_process import InProcessClient
from holdfast.messages.sessions import (
    CloseSession,
    ExportSession,
    ForkSession,
    GetSession,
    ImportSession,
    ListSessions,
    OpenSession,
    SessionCommand,
    SessionInfo,
    UpdateSession,
)

LEAVE = msgspec.UNSET  # says that a value stays as it is, or as the settings have it


class Sessions:
    """The sessions of one tenant. Any thread may call any method; each blocks until it is done.

    All raise SessionRefused, whose `failure` tells why, and WorkerUnavailable when the model is closed.
    """

    def __init__(self, client: InProcessClient, *, tenant: str) -> None:
        self._client, self._tenant = client, tenant

    def list(self) -> tuple[SessionInfo, ...]:
        """All sessions, the last used first."""
        return self._ask(ListSessions(call_id=_call_id(), tenant=self._tenant))

    def get(self, session_id: str) -> SessionInfo:
        """One session."""
        return self._one(GetSession(call_id=_call_id(), tenant=self._tenant, session_id=session_id))

    def open(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionInfo:
        """Begin a session. ttl_seconds: how long it lives after its last use; None: until it is closed."""
        return self._one(
            OpenSession(
                call_id=_call_id(),
                tenant=self._tenant,
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=dict(metadata or {}),
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
        return self._one(
            UpdateSession(
                call_id=_call_id(),
                tenant=self._tenant,
                session_id=session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
                metadata=metadata if metadata is msgspec.UNSET else dict(metadata),
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
        """Begin a session where another one is; both go on from there, and share what they have in common."""
        return self._one(
            ForkSession(
                call_id=_call_id(),
                tenant=self._tenant,
                session_id=session_id,
                new_session_id=new_session_id,
                ttl_seconds=ttl_seconds,
                pinned=pinned,
            )
        )

    def close(self, session_id: str, *, forget: bool = False) -> SessionInfo:
        """End a session; forget: delete what it has read, as far as nobody else stands on it. Returns it as it was."""
        return self._one(CloseSession(call_id=_call_id(), tenant=self._tenant, session_id=session_id, forget=forget))

    def export_to(self, path: str | Path, session_id: str) -> SessionInfo:
        """Write a session with everything that is kept of it into a file."""
        command = ExportSession(call_id=_call_id(), tenant=self._tenant, session_id=session_id, path=str(Path(path).absolute()))
        return self._one(command)

    def import_from(self, path: str | Path, session_id: str = "") -> SessionInfo:
        """Take in a session from a file, under its own name or another one. Same model, weights, tokenizer and codec only."""
        command = ImportSession(call_id=_call_id(), tenant=self._tenant, path=str(Path(path).absolute()), session_id=session_id)
        return self._one(command)

    def _one(self, command: SessionCommand) -> SessionInfo:
        (info,) = self._ask(command)
        return info

    def _ask(self, command: SessionCommand) -> tuple[SessionInfo, ...]:
        answer = self._client.ask_session(command)
        if answer.failure is not None:
            raise SessionRefused(answer.failure, answer.message)
        return answer.sessions


def _call_id() -> str:
    return uuid.uuid4().hex
