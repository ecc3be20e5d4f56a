"""What pinned sessions keep from eviction, within a quota. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.session_messages import PinState
from holdfast.sessions.record import record_name
from holdfast.sessions.session import Session
from holdfast.store.keys import BlockKey
from holdfast.store.store import FOREVER
from holdfast.worker.memory import Memory


class SessionPins:
    """Pins of all sessions. What several of them stand on counts once."""

    def __init__(self, memory: Memory, *, quota_bytes: Callable[[], int]) -> None:
        self._memory, self._quota_bytes = memory, quota_bytes
        self._pinned: dict[str, set[BlockKey]] = {}  # by the session's record name
        self._holders: dict[BlockKey, int] = {}
        self._sizes: dict[BlockKey, int] = {}  # as they were when they were pinned
        self._over: set[str] = set()

    @property
    def pinned_bytes(self) -> int:
        """What all pins keep."""
        return sum(self._sizes.values())

    def fits(self, session: Session) -> bool:
        """Whether all of a session can be pinned."""
        return self._wanted_bytes(session.branches[0].keys if session.branches else ()) <= self._quota_bytes() - self.pinned_bytes

    def settle(self, session: Session) -> None:
        """Pin what the session stands on, as far as the quota goes, and nothing else; nothing when it is not pinned."""
        name = record_name(session)
        wanted: list[BlockKey] = []
        if session.pinned:
            wanted = list(dict.fromkeys(key for branch in session.branches for key in branch.keys))
        before = self._pinned.get(name, set())
        self._unpin(name, before - set(wanted))
        self._over.discard(name)
        room = self._quota_bytes() - self.pinned_bytes
        for key in wanted:
            if key in before:
                continue
            if self._memory.library.residence(key) is None:
                break  # gone, and what stands behind it with it
            size = self._wanted_bytes((key,))
            if size > room:
                self._over.add(name)
                break  # what stands behind it would be of no use without it
            room -= size
            self._pin(name, key)
        if self._memory.store is not None and (now := self._pinned.get(name)):
            until = FOREVER if session.expires_at is None else session.expires_at
            self._memory.store.pin(now, holder=name, until=until)

    def drop(self, session: Session) -> None:
        """A session ends: nothing is kept on its account."""
        name = record_name(session)
        self._unpin(name, self._pinned.get(name, set()))
        self._over.discard(name)

    def state_of(self, session: Session) -> PinState:
        """Whether the session is kept."""
        if not session.pinned:
            return PinState.NONE
        return PinState.OVER_QUOTA if record_name(session) in self._over else PinState.KEPT

    def _wanted_bytes(self, keys: Sequence[BlockKey]) -> int:
        return sum(self._memory.library.size_of(key) for key in keys if key not in self._holders)

    def _pin(self, name: str, key: BlockKey) -> None:
        self._pinned.setdefault(name, set()).add(key)
        self._holders[key] = self._holders.get(key, 0) + 1
        self._sizes.setdefault(key, self._memory.library.size_of(key))
        self._memory.library.pin((key,))

    def _unpin(self, name: str, keys: set[BlockKey]) -> None:
        if not keys:
            return
        self._memory.library.unpin(keys)
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._sizes[key]
        if self._memory.store is not None:
            self._memory.store.unpin(keys, holder=name)
        self._pinned[name] = self._pinned[name] - keys
        if not self._pinned[name]:
            del self._pinned[name]
