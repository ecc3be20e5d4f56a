from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.config import StoreSettings
from holdfast.store.folder import chosen_folder, library_folder


def test_a_server_stores_blocks_in_the_users_cache_by_default(
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
def test_each_system_has_its_cache_location(
    system: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert chosen_folder(StoreSettings(), {}) == str(Path.home() / place / "holdfast" / "store")


def test_a_library_stores_nothing_by_default(tmp_path: Path) -> None:
    assert library_folder(StoreSettings(), {}) == ""
    assert library_folder(StoreSettings(folder=str(tmp_path)), {}) == str(tmp_path)
