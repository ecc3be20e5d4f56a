"""The sessions of a worker, by tenant and id, and the blocks that they pin. A session is a name for
the token chains of one agent or conversation. A chain whose tokens are cached is a *branch*; an
*alternative* is a branch that is unlikely to be continued. Pinned blocks are not evicted.

This module works without a clock: callers pass the time. `service` ends expired sessions; the store
expires its own copy of the pins.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.store.block import BlockKey
from holdfast.store.store import FOREVER
from holdfast.wire.sessions import PinState, Ttl
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.chain import Branch

MOST_BRANCHES = 8  # several, so that an agent's side conversations do not displace its main one
MOST_ALTERNATIVES = 128  # in addition; forgetting a session deletes their blocks too
_RECORD_FORMAT = 2


@dataclass(slots=True, kw_only=True)
class Session:
    """A session of a tenant. Times are seconds since the epoch."""

    session_id: str
    tenant: str
    created_at: float
    last_used_at: float
    ttl_seconds: float | None  # lifetime after the last use; None: it never expires
    pinned: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    forked_from: str = ""
    requests: int = 0
    # the most recently used first, then the alternatives, the latest last
    branches: tuple[Branch, ...] = ()
    # number of branches that are further choices of an answer (`n`) or were displaced by newer ones
    alternatives: int = 0

    @property
    def expires_at(self) -> float | None:
        """The time at which the session expires if it is not used again; None if it never does."""
        return None if self.ttl_seconds is None else self.last_used_at + self.ttl_seconds

    @property
    def record_name(self) -> str:
        """The name of the session's record in the store, derived from tenant and id."""
        named = f"{len(self.tenant)}/{self.tenant}/{self.session_id}"
        return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def use(self, branch: Branch, *, now: float) -> None:
        """Record that a request of the session has ended, and that its tokens are stored as
        `branch`.

        A branch that extends another branch replaces it; a branch that is the beginning of another
        one is not added.
        """
        self.requests += 1
        self.last_used_at = now
        if not branch.blocks:
            return
        main, alternatives = (
            [other for other in branches if not branch.extends(other)]
            for branches in self._main_and_alternatives()
        )
        longer = next((other for other in (*main, *alternatives) if other.extends(branch)), None)
        latest = longer or branch
        self._set_branches(
            [latest, *(other for other in main if other is not longer)],
            [other for other in alternatives if other is not longer],
        )

    def add_alternative(self, branch: Branch, *, now: float) -> None:
        """Record that a further choice of a request's answer has ended, as the last branch."""
        self.last_used_at = now
        if branch.blocks and not any(other.extends(branch) for other in self.branches):
            main, alternatives = self._main_and_alternatives()
            self._set_branches(main, (*alternatives, branch))

    def merge(self, newer: Session) -> None:
        """Merge what requests did under the same name before this record could be read."""
        self.requests += newer.requests
        self.last_used_at = max(self.last_used_at, newer.last_used_at)
        self.pinned |= newer.pinned
        self.metadata |= newer.metadata
        main, alternatives = (
            [other for other in branches if not any(each.extends(other) for each in newer.branches)]
            for branches in self._main_and_alternatives()
        )
        newer_main, newer_alternatives = newer._main_and_alternatives()
        self._set_branches((*newer_main, *main), (*alternatives, *newer_alternatives))

    def _main_and_alternatives(self) -> tuple[tuple[Branch, ...], tuple[Branch, ...]]:
        """The branches without the alternatives, and the alternatives."""
        count = len(self.branches) - self.alternatives
        return self.branches[:count], self.branches[count:]

    def _set_branches(self, main: Sequence[Branch], alternatives: Sequence[Branch]) -> None:
        """Replace all branches, within their limits: the least recently used main ones become
        alternatives, and the oldest alternatives are dropped.
        """
        displaced = reversed(main[MOST_BRANCHES:])
        alternatives = (*alternatives, *displaced)[-MOST_ALTERNATIVES:]
        self.branches = (*main[:MOST_BRANCHES], *alternatives)
        self.alternatives = len(alternatives)


_decoder = msgspec.msgpack.Decoder(tuple[int, Session])


def encode_record(session: Session) -> bytes:
    """Encode a session for the store."""
    return msgspec.msgpack.encode((_RECORD_FORMAT, session))


def decode_record(data: bytes) -> Session:
    """Decode a session. Raises ValueError if the bytes are damaged or have another format."""
    try:
        version, session = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not a session: {error}") from error
    if version != _RECORD_FORMAT:
        raise ValueError(
            f"the session has format {version}, but this version reads format {_RECORD_FORMAT}"
        )
    return session


class SessionRegistry:
    """All sessions, at most `most`. Before opening another one, the caller ends the `victims`."""

    def __init__(self, *, most: int, ttl_seconds: float | None) -> None:
        """ttl_seconds: the default lifetime after the last use; None: sessions never expire."""
        self._most = most
        self._ttl_seconds = ttl_seconds
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def put(self, session: Session) -> None:
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
        return self._sessions.get((tenant, session_id))

    def refuse_taken(self, session_id: str, *, tenant: str) -> None:
        """Raise SessionRefused if the tenant has a session with this id."""
        if (tenant, session_id) in self._sessions:
            raise SessionRefused(
                SessionFailure.EXISTS, f"there is a session {session_id!r} already"
            )

    def get(self, session_id: str, *, tenant: str) -> Session:
        """The tenant's session with this id. Raises SessionRefused if there is none."""
        session = self.find(session_id, tenant=tenant)
        if session is None:
            raise SessionRefused(SessionFailure.NOT_FOUND, f"there is no session {session_id!r}")
        return session

    def of(self, tenant: str) -> list[Session]:
        """A tenant's sessions, the most recently used first."""
        sessions = [session for session in self._sessions.values() if session.tenant == tenant]
        return sorted(sessions, key=lambda session: session.last_used_at, reverse=True)

    def close(self, session: Session) -> None:
        del self._sessions[session.tenant, session.session_id]

    def expired(self, now: float) -> list[Session]:
        return [
            session
            for session in self._sessions.values()
            if (expires_at := session.expires_at) is not None and expires_at <= now
        ]

    def victims(
        self, tenant: str, *, sessions: int = 1, keep: Session | None = None
    ) -> list[Session]:
        """The sessions to end so that a tenant can open `sessions` more.

        Only unpinned sessions are returned, those of the same tenant first, and never `keep`.
        Raises SessionRefused if there are too few.
        """
        excess = len(self._sessions) + sessions - self._most
        if excess <= 0:
            return []
        unpinned = [
            session
            for session in self._sessions.values()
            if not session.pinned and session is not keep
        ]
        if len(unpinned) < excess and sessions:
            raise SessionRefused(
                SessionFailure.TOO_MANY,
                f"there are {len(self._sessions)} sessions, all pinned: close or unpin one",
            )
        unpinned.sort(key=lambda session: (session.tenant != tenant, session.last_used_at))
        return unpinned[:excess]


class SessionPins:
    """The blocks that each session pins, and their size. Blocks that several sessions share count
    once.

    The index is told only when the first session pins a key and when the last one unpins it. The
    store is told about every session, because pins in the store outlive this process.
    """

    def __init__(self, cache: PrefixCache, *, quota_bytes: Callable[[], int]) -> None:
        self._cache = cache
        self._quota_bytes = quota_bytes
        self._keys: dict[str, set[BlockKey]] = {}  # by record name of the session
        self._holders: Counter[BlockKey] = Counter()  # how many sessions pin a key
        self._sizes: dict[BlockKey, int] = {}  # at the time of pinning
        self.pinned_bytes = 0  # of all pinned blocks
        self._over_quota: set[str] = set()  # record names of pinned sessions that do not fit

    def fits(self, session: Session) -> bool:
        """Whether the quota allows pinning all blocks of a session."""
        return self._fits_quota(_keys_of(session))

    def sync(self, session: Session) -> None:
        """Update the pins of a session: pin its blocks as far as the quota allows, and unpin all
        other blocks. If the session is not pinned, all of its blocks are unpinned.
        """
        name = session.record_name
        branches = session.branches if session.pinned else ()
        keys_to_pin = {key for branch in branches for key in branch.keys}
        self._unpin(session, self._keys.get(name, set()) - keys_to_pin)
        self._over_quota.discard(name)
        for branch in branches:
            # Blocks after a lost one, or one that does not fit in the quota, would be useless.
            for key in self._cache.index.kept_part(branch).keys:
                if not self._pin(name, key):
                    self._over_quota.add(name)
                    break
        self._pin_on_disk(session)

    def _pin_on_disk(self, session: Session) -> None:
        """Pin the session's branches in the store until the session expires. Pinning the last block of
        a branch also pins the blocks before it.
        """
        name = session.record_name
        pinned = self._keys.get(name, set())
        end_keys: set[BlockKey] = set()
        for branch in session.branches:
            blocks = [block.key for block in branch.blocks if block.key in pinned]
            end_keys.update(blocks[-1:])
            # the store does not know the blocks before a missing one
            end_keys.update(
                before
                for before, after in itertools.pairwise(blocks)
                if after in self._cache.index.missing
            )
            end_keys.update(state.key for state in branch.states if state.key in pinned)
        if self._cache.store is not None and end_keys:
            until = FOREVER if session.expires_at is None else session.expires_at
            self._cache.store.pin(end_keys, holder=name, until=until)

    def drop(self, session: Session) -> None:
        """Unpin all blocks of a session that ends."""
        name = session.record_name
        self._unpin(session, set(self._keys.get(name, ())))
        self._over_quota.discard(name)

    def state_of(self, session: Session) -> PinState:
        """Whether the session is pinned, within the quota, and complete."""
        if not session.pinned:
            return "none"
        if session.record_name in self._over_quota:
            return "over_quota"
        index = self._cache.index
        is_complete = all(
            index.kept_part(branch).keys == branch.keys for branch in session.branches
        )
        return "kept" if is_complete else "incomplete"

    def check_invariants(self) -> None:
        expected = Counter(key for keys in self._keys.values() for key in keys)
        assert self._holders == expected, "a key has other holders than the sessions that pin it"
        assert self._sizes.keys() == self._holders.keys(), "sizes of other keys"
        assert self.pinned_bytes == sum(self._sizes.values()), "the pinned bytes are miscounted"
        assert all(self._keys.values()), "a session that pins nothing"

    def _fits_quota(self, keys: Iterable[BlockKey]) -> bool:
        return self._new_bytes(keys) <= self._quota_bytes() - self.pinned_bytes

    def _new_bytes(self, keys: Iterable[BlockKey]) -> int:
        """The bytes of those of the given keys that no session pins yet."""
        new_keys = {key for key in keys if key not in self._holders}
        return sum(map(self._cache.index.size_of, new_keys))

    def _pin(self, name: str, key: BlockKey) -> bool:
        """Pin a key for a session; returns False if that would exceed the quota."""
        if key in self._keys.get(name, ()):
            return True
        if key not in self._holders and not self._fits_quota((key,)):
            return False
        self._keys.setdefault(name, set()).add(key)
        self._holders[key] += 1
        if self._holders[key] == 1:
            self._sizes[key] = self._cache.index.size_of(key)
            self.pinned_bytes += self._sizes[key]
            self._cache.index.pins.pin((key,))
        return True

    def _unpin(self, session: Session, keys: set[BlockKey]) -> None:
        """Release blocks that a session pins. Those that no other session pins may be evicted."""
        if not keys:
            return
        name = session.record_name
        if self._cache.store is not None:
            self._cache.store.unpin(keys, holder=name)
        self._keys[name] -= keys
        if not self._keys[name]:
            del self._keys[name]
        self._holders.subtract(keys)
        unpinned = [key for key in keys if not self._holders[key]]
        self._cache.index.pins.unpin(unpinned)
        for key in unpinned:
            del self._holders[key]
            self.pinned_bytes -= self._sizes.pop(key)


def _keys_of(session: Session) -> Iterator[BlockKey]:
    return (key for branch in session.branches for key in branch.keys)
