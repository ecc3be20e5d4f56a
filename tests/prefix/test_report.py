from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.messages.events import CacheOutcome, Divergence
from holdfast.prefix.evicted import Evicted, EvictionCause
from holdfast.prefix.index import PrefixIndex
from holdfast.prefix.ram import Residence
from holdfast.prefix.report import figures_of, report_of
from holdfast.prefix.reuse import NewTokens, NoBoundary, NothingStored, PlannedPiece, ReusePlan, Shortfall
from holdfast.prefix.tree import Diverged


def plan(shortfall: Shortfall | None) -> ReusePlan:
    pieces = (
        PlannedPiece(b"a", start=0, tokens=5, offset=0, residence=Residence.DISK),
        PlannedPiece(b"b", start=5, tokens=2, offset=0, residence=Residence.BOTH),
        PlannedPiece(b"c", start=7, tokens=1, offset=0, residence=Residence.RAM),
    )
    return ReusePlan(tokens=8, pieces=pieces, state=None, shortfall=shortfall)


@pytest.mark.parametrize(
    ("shortfall", "outcome", "unused_tokens"),
    [
        (None, CacheOutcome.COMPLETE, 0),
        (NewTokens(8), CacheOutcome.NEW_TOKENS, 0),
        (NothingStored(), CacheOutcome.NOTHING_STORED, 0),
        (Diverged(8, 1, 2), CacheOutcome.DIVERGED, 0),
        (NoBoundary(matched=11, boundary=8), CacheOutcome.NO_BOUNDARY, 3),
        (Evicted(8, 4, EvictionCause.EVICTED), CacheOutcome.EVICTED, 4),
        (Evicted(8, 4, EvictionCause.UNREADABLE), CacheOutcome.UNREADABLE, 4),
        (Evicted(8, 4, EvictionCause.FORGOTTEN), CacheOutcome.FORGOTTEN, 4),
    ],
)
def test_each_shortfall_is_told_with_what_was_found(
    shortfall: Shortfall | None, outcome: CacheOutcome, unused_tokens: int
) -> None:
    report = report_of(plan(shortfall), lookup_seconds=0.25, waited_seconds=0.0, restore_seconds=0.5)
    assert (report.outcome, report.unused_tokens) == (outcome, unused_tokens)
    assert (report.ram_tokens, report.disk_tokens, report.cached_tokens) == (3, 5, 8)
    assert report.restore_seconds == 0.5


def test_a_divergence_is_told_with_both_tokens() -> None:
    report = report_of(plan(Diverged(8, expected=1, found=2)), lookup_seconds=0.0, waited_seconds=0.0, restore_seconds=0.0)
    assert report.divergence == Divergence(position=8, stored_token_id=1, prompt_token_id=2)


def test_a_divergence_behind_the_last_boundary_is_told_too() -> None:
    beyond = replace(plan(NoBoundary(matched=11, boundary=8)), diverged=Diverged(11, expected=1, found=2))
    report = report_of(beyond, lookup_seconds=0.0, waited_seconds=0.0, restore_seconds=0.0)
    assert report.outcome is CacheOutcome.NO_BOUNDARY
    assert report.divergence == Divergence(position=11, stored_token_id=1, prompt_token_id=2)


def test_without_a_store_there_are_no_figures_of_one() -> None:
    figures = figures_of(PrefixIndex(fingerprint="a model", ram_budget_bytes=7).statistics(), None)
    assert (figures.ram_budget_bytes, figures.ram_bytes, figures.kept_tokens, figures.store) == (7, 0, 0, None)
