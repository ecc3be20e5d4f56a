from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import BlockKey
from holdfast.worker.prefix.tiers import RamTier
from tests.fakes.payloads import Weight


def evict(tier: RamTier) -> BlockKey | None:
    """Evict the first one."""
    key = tier.next_to_leave()
    if key is not None:
        tier.evict(key)
    return key


def test_payloads_are_counted_while_present() -> None:
    tier = RamTier(100)
    tier.put(b"a", Weight(30), parent=None)
    tier.put(b"b", Weight(50), parent=b"a")
    assert tier.get(b"b") == Weight(50)
    assert tier.get(b"c") is None
    assert (tier.fits(20), tier.fits(21)) == (True, False)
    tier.drop(b"a")
    assert (len(tier), tier.resident_bytes, tier.evicted) == (1, 50, 0)
    with pytest.raises(KeyError):
        tier.drop(b"a")
    tier.check_invariants()


def test_reading_a_payload_does_not_count_as_use() -> None:
    tier = RamTier(100)
    tier.put(b"a", Weight(1), parent=None)
    tier.put(b"b", Weight(1), parent=None)
    tier.get(b"a")
    assert evict(tier) == b"a"
    tier.put(b"a", Weight(1), parent=None)
    tier.touch([b"b"])
    assert evict(tier) == b"a"


def test_pinned_blocks_are_not_evicted() -> None:
    tier = RamTier(100)
    tier.put(b"a", Weight(1), parent=None)
    tier.put(b"b", Weight(1), parent=b"a")
    with tier.pinned([b"b"]):
        assert evict(tier) is None
        assert tier.held == 1
    assert (evict(tier), evict(tier), evict(tier)) == (b"b", b"a", None)
    assert tier.evicted == 2


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.integers(0, 100))
def test_the_budget_is_never_exceeded(weights: list[tuple[int, bool]], budget_bytes: int) -> None:
    tier = RamTier(budget_bytes)
    last: bytes | None = None
    for index, (nbytes, follows) in enumerate(weights):
        while not tier.fits(nbytes) and evict(tier) is not None:
            tier.check_invariants()
        if tier.fits(nbytes):
            tier.put(b"%d" % index, Weight(nbytes), parent=last if follows else None)
            last = b"%d" % index
        else:
            assert nbytes > budget_bytes
        tier.check_invariants()
