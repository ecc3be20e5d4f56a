from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.front.server.access import KeyRing, named_key, write_keys


def written(path: Path, *names: str, admin: str = "") -> None:
    keys = (
        named_key(
            each, f"{each}'s", is_admin=each == admin, priority="interactive", max_requests=None
        )
        for each in names
    )
    write_keys(path, tuple(keys))


def test_keys_are_found_and_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    written(path, "alice", "bob")
    ring = KeyRing(str(path))
    alice = ring.find(b"alice's")
    assert alice is not None and alice.name == "alice" and ring.find(b"alice") is None
    written(path, "bob", "carol", admin="carol")
    assert ring.find(b"alice's") is alice and not ring.names_an_admin  # until told to
    assert ring.reload() == f"2 API keys in {path}: bob, carol"
    assert (
        ring.find(b"alice's") is None and ring.find(b"carol's") is not None and ring.names_an_admin
    )


@pytest.mark.parametrize("damage", ["gone", "broken", "emptied", "open"])
def test_a_broken_file_changes_nothing_and_never_opens_the_server(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "holdfast" / "keys.json"
    written(path, "alice")
    ring = KeyRing("auto", {"XDG_CONFIG_HOME": str(tmp_path)})
    if damage == "gone":
        path.unlink()
    elif damage == "broken":
        path.write_text("{")
    elif damage == "emptied":
        path.write_text("{}")
    else:
        path.chmod(0o644)
    with pytest.raises(ConfigError, match="the API keys are not reloaded"):
        ring.reload()
    assert ring.is_needed and ring.find(b"alice's") is not None


def test_a_new_file_takes_effect_at_the_next_reload(tmp_path: Path) -> None:
    ring = KeyRing("auto", {"XDG_CONFIG_HOME": str(tmp_path)})
    assert not ring.is_needed and ring.reload() == "no API key file"
    written(tmp_path / "holdfast" / "keys.json", "alice")
    assert not ring.is_needed
    ring.reload()
    assert ring.is_needed


def test_an_empty_key_file_rejects_everybody(tmp_path: Path) -> None:
    written(tmp_path / "keys.json")
    assert KeyRing(str(tmp_path / "keys.json")).is_needed
