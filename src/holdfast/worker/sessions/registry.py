"""The sessions of one model by tenant and id: who is there, who has ended.

Pure; the time comes from the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.wire.sessions import Ttl
from holdfast.worker.sessions.record import Session


class SessionRegistry:
    """All sessions. At most `most` of them: before one more is opened, the caller ends the
    `victims`.
    """

    def __init__(self, *, most: int, ttl_seconds: float | None) -> None:
        """`ttl_seconds`: of sessions that say nothing of it."""
        self._most, self._ttl_seconds = most, ttl_seconds
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def put(self, session: Session) -> None:
        """Take in a session as it is: one that an earlier process has left, or an imported one."""
        self._sessions[session.tenant, session.session_id] = session

    def open(
        self,
        session_id: str,
        *,
        tenant: str,
        now: float,
        ttl_seconds: Ttl = msgspec.UNSET,
        pinned: bool = False,
        metadata: Mapping[str, str] | msgspec.UnsetType = msgspec.UNSET,
    ) -> Session:
        """A new session. Raises SessionRefused when the tenant has one of that id."""
        self.refuse_taken(session_id, tenant=tenant)
        session = Session(
            session_id=session_id,
            tenant=tenant,
            created_at=now,
            last_used_at=now,
            ttl_seconds=self._ttl_seconds if ttl_seconds is msgspec.UNSET else ttl_seconds,
            pinned=pinned,
            metadata=dict(metadata or {}),
        )
        self.put(session)
        return session

    def find(self, session_id: str, *, tenant: str) -> Session | None:
        """The tenant's session of that id, if there is one."""
        return self._sessions.get((tenant, session_id))

    def refuse_taken(self, session_id: str, *, tenant: str) -> None:
        """Raise SessionRefused when the tenant has a session of that id."""
        if (tenant, session_id) in self._sessions:
            raise SessionRefused(
                SessionFailure.EXISTS, f"there is a session {session_id!r} already"
            )

    def get(self, session_id: str, *, tenant: str) -> Session:
        """The tenant's session of that id. Raises SessionRefused."""
        session = self.find(session_id, tenant=tenant)
        if session is None:
            raise SessionRefused(SessionFailure.NOT_FOUND, f"there is no session {session_id!r}")
        return session

    def of(self, tenant: str) -> list[Session]:
        """A tenant's sessions, the last used first."""
        found = [session for session in self._sessions.values() if session.tenant == tenant]
        return sorted(found, key=lambda session: session.last_used_at, reverse=True)

    def close(self, session: Session) -> None:
        """A session ends."""
        del self._sessions[session.tenant, session.session_id]

    def expired(self, now: float) -> list[Session]:
        """Sessions whose time is over; the caller closes them."""
        return [
            session
            for session in self._sessions.values()
            if (at := session.expires_at) is not None and at <= now
        ]

    def victims(
        self, tenant: str, *, sessions: int = 1, but: Session | None = None
    ) -> list[Session]:
        """Who has to end before a tenant can open so many more: sessions that are not pinned, of
        that tenant before others'.

        Raises SessionRefused when too few of them can be ended.
        """
        excess = len(self._sessions) + sessions - self._most
        if excess <= 0:
            return []
        loose = [
            session
            for session in self._sessions.values()
            if not session.pinned and session is not but
        ]
        if len(loose) < excess and sessions:
            raise SessionRefused(
                SessionFailure.TOO_MANY,
                f"there are {len(self._sessions)} sessions, all pinned: close or unpin one",
            )
        return sorted(loose, key=lambda session: (session.tenant != tenant, session.last_used_at))[
            :excess
        ]
