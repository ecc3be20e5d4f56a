"""Sessions: names for what an agent or a conversation has read; all of them by tenant and id.

Pure; the time comes from the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.wire.sessions import Ttl
from holdfast.worker.prefix.chain import Branch

MOST_BRANCHES = 8  # an agent's side conversations must not displace its main one
_RECORD_FORMAT = 2


@dataclass(slots=True, kw_only=True)
class Session:
    """A session of a tenant. Times are seconds since the epoch."""

    session_id: str
    tenant: str
    created_at: float
    last_used_at: float
    ttl_seconds: float | None  # since its last use; None: it never expires
    pinned: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    forked_from: str = ""
    requests: int = 0
    branches: tuple[Branch, ...] = ()  # the last used first

    @property
    def expires_at(self) -> float | None:
        """When it expires if it is not used again."""
        return None if self.ttl_seconds is None else self.last_used_at + self.ttl_seconds

    @property
    def record_name(self) -> str:
        """The name of its record in the store, which tenant and id determine."""
        named = f"{len(self.tenant)}/{self.tenant}/{self.session_id}"
        return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def use(self, branch: Branch, *, now: float) -> None:
        """A request of the session has ended, with its tokens stored as `branch`.

        A chain that extends another one replaces it; a chain that is the beginning of another one
        adds nothing.
        """
        self.requests += 1
        self.last_used_at = now
        if not branch.blocks:
            return
        others = [other for other in self.branches if not branch.extends(other)]
        longer = next((other for other in others if other.extends(branch)), None)
        if longer is not None:
            others.remove(longer)
        self.branches = (longer or branch, *others)[:MOST_BRANCHES]


_decoder = msgspec.msgpack.Decoder(tuple[int, Session])


def encode_record(session: Session) -> bytes:
    """A session as bytes, for the store."""
    return msgspec.msgpack.encode((_RECORD_FORMAT, session))


def decode_record(data: bytes) -> Session:
    """A session from its bytes. Raises ValueError if it is damaged or of another format."""
    try:
        version, session = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not a session: {error}") from error
    if version != _RECORD_FORMAT:
        raise ValueError(f"a session of format {version}, this version reads {_RECORD_FORMAT}")
    return session


class SessionRegistry:
    """All sessions, at most `most`: before another one is opened, the caller ends the `victims`."""

    def __init__(self, *, most: int, ttl_seconds: float | None) -> None:
        """ttl_seconds: the default."""
        self._most = most
        self._ttl_seconds = ttl_seconds
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def put(self, session: Session) -> None:
        """Add a session as it is, for example one of an earlier process."""
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
        """Add a new session. Raises SessionRefused if the id is taken."""
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
        """Raise SessionRefused if the tenant has a session of that id."""
        if (tenant, session_id) in self._sessions:
            raise SessionRefused(
                SessionFailure.EXISTS, f"there is a session {session_id!r} already"
            )

    def get(self, session_id: str, *, tenant: str) -> Session:
        """The tenant's session of that id. Raises SessionRefused if there is none."""
        session = self.find(session_id, tenant=tenant)
        if session is None:
            raise SessionRefused(SessionFailure.NOT_FOUND, f"there is no session {session_id!r}")
        return session

    def of(self, tenant: str) -> list[Session]:
        """A tenant's sessions, the last used first."""
        found = [session for session in self._sessions.values() if session.tenant == tenant]
        return sorted(found, key=lambda session: session.last_used_at, reverse=True)

    def close(self, session: Session) -> None:
        """Remove a session."""
        del self._sessions[session.tenant, session.session_id]

    def expired(self, now: float) -> list[Session]:
        """Sessions that have expired; the caller closes them."""
        return [
            session
            for session in self._sessions.values()
            if (at := session.expires_at) is not None and at <= now
        ]

    def victims(
        self, tenant: str, *, sessions: int = 1, spared: Session | None = None
    ) -> list[Session]:
        """The sessions to end before a tenant can open this many more.

        Unpinned ones, those of the same tenant first. Raises SessionRefused if there are too few.
        """
        excess = len(self._sessions) + sessions - self._most
        if excess <= 0:
            return []
        loose = [
            session
            for session in self._sessions.values()
            if not session.pinned and session is not spared
        ]
        if len(loose) < excess and sessions:
            raise SessionRefused(
                SessionFailure.TOO_MANY,
                f"there are {len(self._sessions)} sessions, all pinned: close or unpin one",
            )
        loose.sort(key=lambda session: (session.tenant != tenant, session.last_used_at))
        return loose[:excess]
