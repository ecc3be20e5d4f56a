"""What sessions and cached prefixes keep from eviction, within a quota. Device thread only."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.store.block import BlockKey
from holdfast.store.store import FOREVER
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.wire.sessions import PinState
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.sessions.registry import Session

MOST_PREFIXES = 512
# a prefix is kept only while its tenant pins at most 1/2 of the quota
TENANT_SHARE = 2


class SessionPins:
    """Which session pins what; blocks that several sessions share count once.

    The index is told when the first session pins a key and when the last one unpins it. The store
    is told about every session, because pins outlive this process.
    """

    def __init__(self, cache: PrefixCache, *, quota_bytes: Callable[[], int]) -> None:
        self._cache = cache
        self._quota_bytes = quota_bytes
        self._keys: dict[str, set[BlockKey]] = {}  # by the session's record name
        self._holders: Counter[BlockKey] = Counter()
        self._sizes: dict[BlockKey, int] = {}  # at the time of pinning
        self._pinned_bytes: Counter[str] = Counter()  # by tenant; tenants share no blocks
        self._over: set[str] = set()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all pins."""
        return self._pinned_bytes.total()

    @property
    def quota_bytes(self) -> int:
        """Bytes that pins may keep."""
        return self._quota_bytes()

    def pinned_bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's pins."""
        return self._pinned_bytes[tenant]

    def new_bytes(self, session: Session) -> int:
        """Bytes that pinning all of a session would add."""
        return self._new_bytes(_keys_of(session))

    def fits(self, session: Session) -> bool:
        """Whether all of a session can be pinned."""
        return self._fit(_keys_of(session))

    def sync(self, session: Session) -> None:
        """Pin exactly the blocks of a session, as far as the quota allows; none if it is unpinned."""
        name = session.record_name
        branches = session.branches if session.pinned else ()
        wanted = {key for branch in branches for key in branch.keys}
        self._unpin(session, self._keys.get(name, set()) - wanted)
        self._over.discard(name)
        for branch in branches:
            # Pins after a block that is gone, or that does not fit, would be useless.
            for key in self._cache.index.kept_part(branch).keys:
                if not self._pin(name, key, tenant=session.tenant):
                    self._over.add(name)
                    break
        self.renew(session)

    def renew(self, session: Session) -> None:
        """Tell the store how long to keep the end of each branch, and so everything before it."""
        name = session.record_name
        pinned = self._keys.get(name, set())
        ends: set[BlockKey] = set()
        for branch in session.branches:
            blocks = [block.key for block in branch.blocks if block.key in pinned]
            ends.update(blocks[-1:])
            ends.update(state.key for state in branch.states if state.key in pinned)
        if self._cache.store is not None and ends:
            until = FOREVER if session.expires_at is None else session.expires_at
            self._cache.store.pin(ends, holder=name, until=until)

    def drop(self, session: Session) -> None:
        """Unpin everything of a session that ends."""
        name = session.record_name
        self._unpin(session, set(self._keys.get(name, ())))
        self._over.discard(name)

    def state_of(self, session: Session) -> PinState:
        """Whether the session is kept."""
        if not session.pinned:
            return "none"
        return "over_quota" if session.record_name in self._over else "kept"

    def check_invariants(self) -> None:
        """Assert that all counts agree with the sessions' keys."""
        held = Counter(key for keys in self._keys.values() for key in keys)
        assert self._holders == held, "a key has other holders than the sessions that pin it"
        assert self._sizes.keys() == self._holders.keys(), "sizes of other keys"
        assert self.pinned_bytes == sum(self._sizes.values()), "the pinned bytes are miscounted"
        assert min(self._pinned_bytes.values(), default=0) >= 0, "a tenant pins less than nothing"
        assert all(self._keys.values()), "a session that pins nothing"

    def _fit(self, keys: Iterable[BlockKey]) -> bool:
        return self._new_bytes(keys) <= self._quota_bytes() - self.pinned_bytes

    def _new_bytes(self, keys: Iterable[BlockKey]) -> int:
        new = {key for key in keys if key not in self._holders}
        return sum(map(self._cache.index.size_of, new))

    def _pin(self, name: str, key: BlockKey, *, tenant: str) -> bool:
        """Pin a key for a session; False if that exceeds the quota."""
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
        name = session.record_name
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


class PrefixPins:
    """Prefixes that clients want kept for a while, as with Anthropic's `cache_control`.

    Each is a pinned session without a name, known by the block in which it ends. No timer runs:
    `expire` is called now and then. They are hints, so they make way for pinned sessions, for
    younger prefixes and for other tenants.
    """

    def __init__(self, index: PrefixIndex, pins: SessionPins) -> None:
        self._index = index
        self._pins = pins
        # other workers on the same store have their own pins
        self._worker = secrets.token_hex(8)
        self._kept: dict[BlockKey, Session] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, keys: Sequence[BlockKey], *, now: float) -> None:
        """A request has started from these blocks: renew the prefixes that end in them."""
        for key in keys if self._kept else ():
            if (pin := self._kept.get(key)) is not None:
                pin.last_used_at = now
                self._pins.renew(pin)

    def keep(
        self, wanted: Sequence[PinnedPrefix], *, tenant: str, chain: bytes | bytearray, now: float
    ) -> None:
        """Keep prefixes of a chain, shorter ones first, up to the first that does not fit."""
        kept: list[Session] = []
        for each in wanted:
            pin = self._pin(each, tenant=tenant, chain=chain, now=now)
            if pin is None or not self._make_room(pin, spared=kept):
                break
            self._kept[_end_of(pin)] = pin
            self._pins.sync(pin)
            kept.append(pin)
        if kept:
            self._drop_covered(kept)

    def expire(self, now: float) -> None:
        """Unpin the prefixes whose time is up."""
        for pin in [pin for pin in self._kept.values() if _ends_at(pin) <= now]:
            self._drop(pin)

    def give_way(self) -> bool:
        """Unpin the prefix that expires first; returns whether there was one."""
        first = min(self._kept.values(), key=_ends_at, default=None)
        if first is not None:
            self._drop(first)
        return first is not None

    def _pin(
        self, wanted: PinnedPrefix, *, tenant: str, chain: bytes | bytearray, now: float
    ) -> Session | None:
        """The new pin, merged with one that ends in the same block; None if nothing is stored."""
        branch = self._index.branch(chain[: wanted.tokens * TOKEN_BYTES], tenant=tenant)
        if not branch.blocks:
            return None
        end = branch.blocks[-1].key
        seconds = wanted.seconds
        known = self._kept.get(end)
        if known is not None:
            seconds = max(seconds, known.ttl_seconds or 0)
            branch = branch if branch.extends(known.branches[0]) else known.branches[0]
        return Session(
            # no client's session id contains a slash
            session_id=f"{self._worker}/{end.hex()}",
            tenant=tenant,
            created_at=now,
            last_used_at=now,
            ttl_seconds=seconds,
            pinned=True,
            branches=(branch,),
        )

    def _make_room(self, pin: Session, *, spared: Sequence[Session]) -> bool:
        """Unpin others until a prefix fits; of its tenant only, if that has used up its share."""
        quota_bytes = self._pins.quota_bytes
        share_bytes = quota_bytes // TENANT_SHARE
        if sum(map(self._index.size_of, pin.branches[0].keys)) > share_bytes:
            return False
        while True:
            new_bytes = self._pins.new_bytes(pin)
            has_share = self._pins.pinned_bytes_of(pin.tenant) + new_bytes > share_bytes
            fits = self._pins.pinned_bytes + new_bytes <= quota_bytes
            if fits and not has_share and len(self._kept) < MOST_PREFIXES:
                return True
            victims = [
                each
                for each in self._kept.values()
                if each not in spared
                and _end_of(each) != _end_of(pin)
                and (not has_share or each.tenant == pin.tenant)
            ]
            if not victims:
                return False
            self._drop(min(victims, key=_ends_at))

    def _drop_covered(self, kept: Sequence[Session]) -> None:
        """Unpin prefixes of a new one that lasts as long: earlier turns of the conversation."""
        last = kept[-1]
        for key in last.branches[0].keys:
            pin = self._kept.get(key)
            if pin is not None and pin not in kept and _ends_at(pin) <= _ends_at(last):
                self._drop(pin)

    def _drop(self, pin: Session) -> None:
        del self._kept[_end_of(pin)]
        self._pins.drop(pin)


def _keys_of(session: Session) -> Iterator[BlockKey]:
    return (key for branch in session.branches for key in branch.keys)


def _end_of(pin: Session) -> BlockKey:
    return pin.branches[0].blocks[-1].key


def _ends_at(pin: Session) -> float:
    assert pin.expires_at is not None
    return pin.expires_at
