from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.config import StoreSettings
from holdfast.store.budget import DAILY_WRITE_BYTES, StoreLimits, store_limits
from holdfast.store.folder import chosen_folder, library_folder


def test_what_is_left_open_is_limited_by_the_volume_and_by_a_day() -> None:
    assert store_limits(StoreSettings()) == StoreLimits(daily_write_bytes=DAILY_WRITE_BYTES)


def test_what_is_asked_for_becomes_a_limit() -> None:
    assert store_limits(StoreSettings(disk_bytes=7, daily_write_bytes=3)) == StoreLimits(
        budget_bytes=7, daily_write_bytes=3
    )


def test_a_server_keeps_what_it_reads_among_the_callers_caches_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path)}
    assert chosen_folder(StoreSettings(), caches) == str(tmp_path / "holdfast" / "store")
    assert (
        chosen_folder(StoreSettings(folder="off"), caches)
        == chosen_folder(StoreSettings(folder=""), caches)
        == ""
    )
    assert chosen_folder(StoreSettings(folder=str(tmp_path)), {}) == str(tmp_path)


@pytest.mark.parametrize(
    ("system", "place"), [("darwin", "Library/Application Support"), ("linux", ".cache")]
)
def test_each_system_has_its_place_for_caches(
    system: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert chosen_folder(StoreSettings(), {}) == str(Path.home() / place / "holdfast" / "store")


def test_a_library_writes_nothing_unless_asked(tmp_path: Path) -> None:
    assert library_folder(StoreSettings(), {}) == ""
    assert library_folder(StoreSettings(folder=str(tmp_path)), {}) == str(tmp_path)
