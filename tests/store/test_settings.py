from __future__ import annotations

from holdfast.config import StoreSettings
from holdfast.store.budget import StoreLimits
from holdfast.store.settings import store_limits


def test_what_is_left_open_is_limited_by_the_volume_alone() -> None:
    assert store_limits(StoreSettings()) == StoreLimits()


def test_what_is_asked_for_becomes_a_limit() -> None:
    assert store_limits(StoreSettings(disk_bytes=7, daily_write_bytes=3)) == StoreLimits(budget_bytes=7, daily_write_bytes=3)
