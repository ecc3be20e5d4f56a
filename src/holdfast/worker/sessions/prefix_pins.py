"""Beginnings of prompts that clients want kept for a while, such as what stands before a
`cache_control` of Anthropic's.

Each is a pinned session without a name, in the one table of pins. No timer runs: now and then it is
looked whose time is over. They are hints, so they give way: to sessions that are pinned, to younger
ones, and to those of other tenants.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.sessions.pins import SessionPins
from holdfast.worker.sessions.record import Session

MOST_PREFIXES = 512
# all that one tenant pins may be this part of the quota, before a beginning more is kept for it
TENANT_SHARE = 2


class PrefixPins:
    """The beginnings that are kept, each by the block in which it ends. Device thread only."""

    def __init__(self, index: PrefixIndex, pins: SessionPins) -> None:
        self._index, self._pins = index, pins
        # other workers on the same store have pins of their own
        self._worker = secrets.token_hex(8)
        self._kept: dict[BlockKey, Session] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, keys: Sequence[BlockKey], *, now: float) -> None:
        """A request has begun from these blocks: the time of all beginnings that end among them
        begins anew.
        """
        for key in keys if self._kept else ():
            if (pin := self._kept.get(key)) is not None:
                pin.last_used_at = now
                self._pins.renew(pin)

    def keep(
        self, wanted: Sequence[PinnedPrefix], *, tenant: str, chain: bytes | bytearray, now: float
    ) -> None:
        """Keep beginnings of a chain, shorter ones first.

        Those that do not fit are left out, with all behind them.
        """
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
        """Let go of those whose time is over."""
        for pin in [pin for pin in self._kept.values() if _ends_at(pin) <= now]:
            self._drop(pin)

    def give_way(self) -> bool:
        """Let go of the one whose time is over first; whether there was one."""
        first = min(self._kept.values(), key=_ends_at, default=None)
        if first is not None:
            self._drop(first)
        return first is not None

    def _pin(
        self, wanted: PinnedPrefix, *, tenant: str, chain: bytes | bytearray, now: float
    ) -> Session | None:
        """The pin to be; None where nothing is stored.

        One that ends in a block that is pinned already goes on from that one.
        """
        branch = self._index.branch(chain[: wanted.tokens * TOKEN_BYTES], tenant=tenant)
        if not branch.blocks:
            return None
        end, seconds = branch.blocks[-1].key, wanted.seconds
        known = self._kept.get(end)
        if known is not None:
            seconds = max(seconds, known.ttl_seconds or 0)
            branch = branch if branch.extends(known.branches[0]) else known.branches[0]
        return Session(
            # no session of a client has a slash in its id
            session_id=f"{self._worker}/{end.hex()}",
            tenant=tenant,
            created_at=now,
            last_used_at=now,
            ttl_seconds=seconds,
            pinned=True,
            branches=(branch,),
        )

    def _make_room(self, pin: Session, *, spared: Sequence[Session]) -> bool:
        """Whether a beginning can be pinned, after others have given way: of its tenant if that has
        its share, else of any.
        """
        quota_bytes, share_bytes = self._pins.quota_bytes, self._pins.quota_bytes // TENANT_SHARE
        if sum(map(self._index.size_of, pin.branches[0].keys)) > share_bytes:
            return False
        while True:
            new_bytes = self._pins.new_bytes(pin)
            has_share = self._pins.pinned_bytes_of(pin.tenant) + new_bytes > share_bytes
            if (
                not has_share
                and self._pins.pinned_bytes + new_bytes <= quota_bytes
                and len(self._kept) < MOST_PREFIXES
            ):
                return True
            others = [
                each
                for each in self._kept.values()
                if each not in spared and _end_of(each) != _end_of(pin)
            ]
            victims = [each for each in others if not has_share or each.tenant == pin.tenant]
            if not victims:
                return False
            self._drop(min(victims, key=_ends_at))

    def _drop_covered(self, kept: Sequence[Session]) -> None:
        """What is kept as long, and farther, by a new one: an earlier turn of the conversation,
        mostly.
        """
        last = kept[-1]
        for key in last.branches[0].keys:
            pin = self._kept.get(key)
            if pin is not None and pin not in kept and _ends_at(pin) <= _ends_at(last):
                self._drop(pin)

    def _drop(self, pin: Session) -> None:
        del self._kept[_end_of(pin)]
        self._pins.drop(pin)


def _end_of(pin: Session) -> BlockKey:
    return pin.branches[0].blocks[-1].key


def _ends_at(pin: Session) -> float:
    assert pin.expires_at is not None
    return pin.expires_at
