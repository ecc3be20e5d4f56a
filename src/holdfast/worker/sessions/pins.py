"""What pinned sessions keep from eviction, within a quota. Device thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from holdfast.store.block import BlockKey
from holdfast.store.store import FOREVER
from holdfast.wire.sessions import PinState
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.sessions.record import Session, record_name


class SessionPins:
    """The one table of who pins what; what several sessions stand on counts once.

    The index is told of a key once, when the first session pins it and when the last one lets go;
    the store of each session's keys, since its pins outlive this process.
    """

    def __init__(self, cache: PrefixCache, *, quota_bytes: Callable[[], int]) -> None:
        self._cache, self._quota_bytes = cache, quota_bytes
        self._keys: dict[str, set[BlockKey]] = {}  # by the session's record name
        self._holders: Counter[BlockKey] = Counter()
        self._sizes: dict[BlockKey, int] = {}  # as they were when they were pinned
        self._pinned_bytes: Counter[str] = Counter()  # by tenant; no block is of two of them
        self._over: set[str] = set()

    @property
    def pinned_bytes(self) -> int:
        """What all pins keep."""
        return self._pinned_bytes.total()

    @property
    def quota_bytes(self) -> int:
        """How much they may keep."""
        return self._quota_bytes()

    def pinned_bytes_of(self, tenant: str) -> int:
        """What all pins of a tenant keep."""
        return self._pinned_bytes[tenant]

    def new_bytes(self, session: Session) -> int:
        """What all pins would keep beyond that if all of a session were pinned."""
        return self._new_bytes(_keys_of(session))

    def fits(self, session: Session) -> bool:
        """Whether all of a session can be pinned."""
        return self._fit(_keys_of(session))

    def sync(self, session: Session) -> None:
        """Pin what the session stands on, as far as the quota goes, and nothing else; nothing when
        it is not pinned.
        """
        name = record_name(session)
        branches = session.branches if session.pinned else ()
        self._unpin(
            session,
            self._keys.get(name, set()) - {key for branch in branches for key in branch.keys},
        )
        self._over.discard(name)
        for branch in branches:
            # What stands behind something that is gone, or that does not fit, would be of no use.
            for key in self._cache.index.kept_part(branch).keys:
                if not self._pin(name, key, tenant=session.tenant):
                    self._over.add(name)
                    break
        self.renew(session)

    def renew(self, session: Session) -> None:
        """Tell the store until when the session's pins hold: of the end of each branch, which keeps
        all that stands before it.
        """
        name = record_name(session)
        pinned = self._keys.get(name, set())
        branches = [
            [block.key for block in branch.blocks if block.key in pinned]
            for branch in session.branches
        ]
        ends = {keys[-1] for keys in branches if keys}
        ends |= {
            state.key
            for branch in session.branches
            for state in branch.states
            if state.key in pinned
        }
        if self._cache.store is not None and ends:
            self._cache.store.pin(
                ends,
                holder=name,
                until=FOREVER if session.expires_at is None else session.expires_at,
            )

    def drop(self, session: Session) -> None:
        """A session ends: nothing is kept on its account."""
        name = record_name(session)
        self._unpin(session, set(self._keys.get(name, ())))
        self._over.discard(name)

    def state_of(self, session: Session) -> PinState:
        """Whether the session is kept."""
        if not session.pinned:
            return "none"
        return "over_quota" if record_name(session) in self._over else "kept"

    def check_invariants(self) -> None:
        """Assert that the counts agree with who pins what."""
        held = Counter(key for keys in self._keys.values() for key in keys)
        assert self._holders == held, "a key has other holders than sessions that pin it"
        assert self._sizes.keys() == self._holders.keys(), "sizes of other keys"
        assert self.pinned_bytes == sum(self._sizes.values()), "other bytes than those of all pins"
        assert min(self._pinned_bytes.values(), default=0) >= 0, "a tenant pins less than nothing"
        assert all(self._keys.values()), "a session that pins nothing"

    def _fit(self, keys: Iterable[BlockKey]) -> bool:
        return self._new_bytes(keys) <= self._quota_bytes() - self.pinned_bytes

    def _new_bytes(self, keys: Iterable[BlockKey]) -> int:
        return sum(
            map(self._cache.index.size_of, {key for key in keys if key not in self._holders})
        )

    def _pin(self, name: str, key: BlockKey, *, tenant: str) -> bool:
        """Whether a session has a key pinned now; it has not when the quota is used up."""
        if key in self._keys.get(name, ()):
            return True
        if key not in self._holders and not self._fit((key,)):
            return False
        self._keys.setdefault(name, set()).add(key)
        self._holders[key] += 1
        if self._holders[key] == 1:
            self._sizes[key] = self._cache.index.size_of(key)
            self._pinned_bytes[tenant] += self._sizes[key]
            self._cache.index.pin((key,))
        return True

    def _unpin(self, session: Session, keys: set[BlockKey]) -> None:
        if not keys:
            return
        name = record_name(session)
        if self._cache.store is not None:
            self._cache.store.unpin(keys, holder=name)
        self._keys[name] -= keys
        if not self._keys[name]:
            del self._keys[name]
        self._holders.subtract(keys)
        gone = [key for key in keys if not self._holders[key]]
        self._cache.index.unpin(gone)
        for key in gone:
            del self._holders[key]
            self._pinned_bytes[session.tenant] -= self._sizes.pop(key)
        if not self._pinned_bytes[session.tenant]:
            del self._pinned_bytes[session.tenant]


def _keys_of(session: Session) -> Iterator[BlockKey]:
    return (key for branch in session.branches for key in branch.keys)
