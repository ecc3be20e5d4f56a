from __future__ import annotations

import pytest

from holdfast.wire.events import CacheOutcome, Divergence
from holdfast.worker.prefix.chain import ChainBlock, Cursor, Root
from holdfast.worker.prefix.lookup import Lookup, ReusePlan, Shortfall
from holdfast.worker.prefix.tiers import EvictionOrder


def lookup(shortfall: Shortfall, *, order: EvictionOrder | None = None) -> Lookup:
    """Eight cached tokens: three in RAM, five on disk."""
    blocks = (ChainBlock(b"a", 3, 3), ChainBlock(b"b", 4, 7), ChainBlock(b"c", 1, 8))
    plan = ReusePlan(
        cursor=Cursor(Root(b"root")),
        blocks=blocks,
        shortfall=shortfall,
        to_read=(b"b", b"c"),
    )
    hold = (order or EvictionOrder()).pinned(plan.keys)
    return Lookup(chain=b"", root=plan.cursor.root, plan=plan, hold=hold, asked_at=10.0)


@pytest.mark.parametrize(
    "shortfall",
    [
        Shortfall(CacheOutcome.COMPLETE),
        Shortfall(CacheOutcome.EVICTED, 4),
        Shortfall(
            CacheOutcome.NO_BOUNDARY,
            3,
            Divergence(position=11, stored_token_id=1, prompt_token_id=2),
        ),
    ],
)
def test_a_report_has_tokens_by_tier_and_the_reason(shortfall: Shortfall) -> None:
    report = lookup(shortfall).report(lookup_seconds=0.25, waited_seconds=0.0, restore_seconds=0.5)
    assert (report.outcome, report.unused_tokens) == (shortfall.outcome, shortfall.unused_tokens)
    assert report.divergence == shortfall.divergence
    assert (report.ram_tokens, report.disk_tokens, report.cached_tokens) == (3, 5, 8)
    assert (report.lookup_seconds, report.restore_seconds, report.waited_for_another) == (
        0.25,
        0.5,
        False,
    )


def test_a_request_that_waited_for_its_twin_reports_it() -> None:
    report = lookup(Shortfall(CacheOutcome.COMPLETE)).report(
        lookup_seconds=0.0, waited_seconds=1.5, restore_seconds=0.0
    )
    assert (report.waited_for_another, report.waited_seconds) == (True, 1.5)


def test_the_fetch_time_is_zero_until_complete() -> None:
    found = lookup(Shortfall(CacheOutcome.COMPLETE))
    assert found.fetch_seconds == 0.0
    found.fetched_at = 12.0
    assert found.fetch_seconds == 2.0


def test_a_lookups_blocks_may_be_evicted_after_its_release() -> None:
    order = EvictionOrder()
    order.add(b"a", parent=None)
    found = lookup(Shortfall(CacheOutcome.COMPLETE), order=order)
    assert order.next_to_leave() is None
    found.release()
    found.release()
    assert order.next_to_leave() == b"a"
