"""Paths that people write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.files import expanded, store_folder
from holdfast.front.server.access import key_file_of


def test_homes_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert expanded("~/keys.json") == expanded(Path("~/keys.json")) == tmp_path / "keys.json"
    assert expanded("./~nobody-at-all/x") == tmp_path / "~nobody-at-all/x"


def test_no_folder_is_created_for_an_unknown_user() -> None:
    for path in ("~nobody-at-all", "~nobody-at-all/keys.json"):
        with pytest.raises(ConfigError, match="~nobody-at-all has no home folder"):
            key_file_of(path, {})


def test_on_a_mac_the_store_is_outside_purgeable_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/holdfast/store")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store_folder({}) == tmp_path / "Library/Application Support/holdfast/store"
    assert store_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/holdfast/store")
    monkeypatch.setattr(sys, "platform", "linux")
    assert store_folder({}) == tmp_path / ".cache/holdfast/store"
