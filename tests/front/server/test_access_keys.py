from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.front.server.access import (
    hash_of,
    key_file_of,
    named_key,
    new_secret,
    read_keys,
    write_keys,
)


def a_key(name: str, secret: str = "secret", **options: object) -> object:
    return named_key(
        name,
        secret,
        **{"is_admin": False, "priority": "interactive", "max_requests": None, **options},
    )  # type: ignore[arg-type]


def test_keys_round_trip_and_only_hashes_are_written(tmp_path: Path) -> None:
    path, secret = tmp_path / "new" / "keys.json", new_secret()
    written = (
        a_key("alice", secret, is_admin=True),
        a_key("bob", "other", priority="batch", max_requests=3),
    )
    write_keys(path, written)  # type: ignore[arg-type]
    assert read_keys(path) == written
    assert secret not in path.read_text() and hash_of(secret.encode()) in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_are_unique_and_have_256_bits() -> None:
    made = {new_secret() for _ in range(50)}
    assert len(made) == 50 and all(len(secret) >= len("sk-holdfast-") + 43 for secret in made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_accessible_to_others_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, ())
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)


HASH = "0" * 64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a key file"),
        ("[]", "not a key file"),
        ("{}", "required field `keys`"),
        ('{"format": 1}', "required field `keys`"),
        ('{"keys": [{"name": "a"}]}', "sha256"),
        (
            '{"keys": [{"name": "a", "sha256": "00"}]}',
            r"matching regex .* at `\$\.keys\[0\]\.sha256`",
        ),
        (f'{{"keys": [{{"name": "a/b", "sha256": "{HASH}"}}]}}', r"at `\$\.keys\[0\]\.name`"),
        (f'{{"keys": [{{"name": "a", "sha256": "{HASH}", "max_requests": 0}}]}}', ">= 1"),
        (f'{{"keys": [{{"name": "a", "sha256": "{HASH}", "priority": "urgent"}}]}}', "priority"),
        (f'{{"keys": [{{"name": "a", "sha256": "{HASH}", "admin": true}}]}}', "admin"),
        (
            f'{{"keys": [{{"name": "a", "sha256": "{HASH}"}}, {{"name": "b", "sha256": "{HASH}"}}]}}',
            "two keys with the same sha256",
        ),
        (
            f'{{"keys": [{{"name": "a", "sha256": "{HASH}"}}, {{"name": "a", "sha256": "{"1" * 64}"}}]}}',
            "two keys with the same name",
        ),
        ('{"format": 2, "keys": []}', r"2 - at `\$\.format`"),
    ],
)
def test_a_fault_in_a_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said) as error:
        read_keys(path)
    assert str(path) in str(error.value)


def test_a_configured_file_must_exist_but_the_default_may_not(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert key_file_of("auto", environ) is None
    assert key_file_of("off", environ) is None
    write_keys(tmp_path / "holdfast" / "keys.json", ())
    assert key_file_of("auto", environ) == tmp_path / "holdfast" / "keys.json"
    named = key_file_of(str(tmp_path / "none.json"), environ)
    assert named is not None
    with pytest.raises(ConfigError, match="holdfast keys add"):
        read_keys(named)


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a" * 65, "a/b"])
def test_an_invalid_key_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name"):
        a_key(name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_location_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_keys(tmp_path / "keys.json", ())
