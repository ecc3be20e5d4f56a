"""What pinned sessions keep from eviction, within a quota. Device thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.messages.sessions import PinState
from holdfast.prefix.branch import Branch
from holdfast.prefix.cache import PrefixCache
from holdfast.sessions.record import record_name
from holdfast.sessions.session import Session
from holdfast.store.block import BlockKey
from holdfast.store.store import FOREVER


class SessionPins:
    """Pins of all sessions. What several of them stand on counts once."""

    def __init__(self, memory: PrefixCache, *, quota_bytes: Callable[[], int]) -> None:
        self._memory, self._quota_bytes = memory, quota_bytes
        self._pinned: dict[str, set[BlockKey]] = {}  # by the session's record name
        self._holders: dict[BlockKey, int] = {}
        self._sizes: dict[BlockKey, int] = {}  # as they were when they were pinned
        self._pinned_bytes = 0
        self._over: set[str] = set()

    @property
    def pinned_bytes(self) -> int:
        """What all pins keep."""
        return self._pinned_bytes

    def fits(self, session: Session) -> bool:
        """Whether all of a session can be pinned."""
        return self._wanted_bytes(_keys(session)) <= self._quota_bytes() - self.pinned_bytes

    def settle(self, session: Session) -> None:
        """Pin what the session stands on, as far as the quota goes, and nothing else; nothing when it is not pinned."""
        name = record_name(session)
        branches = session.branches if session.pinned else ()
        before = self._pinned.get(name, set())
        self._unpin(name, before - {key for branch in branches for key in branch.keys})
        self._over.discard(name)
        for branch in branches:
            self._pin_branch(name, branch)
        if self._memory.store is not None and (now := self._pinned.get(name)):
            until = FOREVER if session.expires_at is None else session.expires_at
            self._memory.store.pin(now, holder=name, until=until)

    def _pin_branch(self, name: str, branch: Branch) -> None:
        """As far as it is there: what stands behind something that is gone, or that does not fit, would be of no use."""
        pinned = self._pinned.get(name, set())
        for key in self._memory.index.kept_part(branch).keys:
            if key in pinned:
                continue
            if self._wanted_bytes((key,)) > self._quota_bytes() - self.pinned_bytes:
                self._over.add(name)
                return
            self._pin(name, key)

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
        return sum(self._memory.index.size_of(key) for key in keys if key not in self._holders)

    def _pin(self, name: str, key: BlockKey) -> None:
        self._pinned.setdefault(name, set()).add(key)
        self._holders[key] = self._holders.get(key, 0) + 1
        if key not in self._sizes:
            self._sizes[key] = self._memory.index.size_of(key)
            self._pinned_bytes += self._sizes[key]
        self._memory.index.pin((key,))

    def _unpin(self, name: str, keys: set[BlockKey]) -> None:
        if not keys:
            return
        self._memory.index.unpin(keys)
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._pinned_bytes -= self._sizes.pop(key)
        if self._memory.store is not None:
            self._memory.store.unpin(keys, holder=name)
        self._pinned[name] = self._pinned[name] - keys
        if not self._pinned[name]:
            del self._pinned[name]


def _keys(session: Session) -> tuple[BlockKey, ...]:
    return tuple(dict.fromkeys(key for branch in session.branches for key in branch.keys))
