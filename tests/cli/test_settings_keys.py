from __future__ import annotations

import re
from pathlib import Path

import click.testing
import pytest

from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import RunningServer, write_server
from holdfast.front.server.access import hash_of, read_keys
from tests.fakes.command_line import invoked


def keys(folder: Path, *arguments: str) -> click.testing.Result:
    return invoked(["keys", *arguments, "--file", str(folder / "keys.json")])


def test_a_key_is_printed_once_and_alone(tmp_path: Path) -> None:
    added = keys(tmp_path, "add", "alice", "--admin", "--max-requests", "4")
    assert added.exit_code == 0
    secret = added.stdout.strip()
    assert secret.startswith("sk-") and "\n" not in secret
    (alice,) = read_keys(tmp_path / "keys.json")
    assert (alice.name, alice.sha256, alice.is_admin, alice.max_requests) == (
        "alice",
        hash_of(secret.encode()),
        True,
        4,
    )
    assert keys(tmp_path, "ls").stdout.startswith("alice  admin, interactive, at most 4 requests")
    assert secret not in keys(tmp_path, "ls").stdout


def test_a_rotated_key_is_new_and_keeps_its_permissions(tmp_path: Path) -> None:
    keys(tmp_path, "add", "alice", "--priority", "batch")
    (before,) = read_keys(tmp_path / "keys.json")
    rotated = keys(tmp_path, "rotate", "alice")
    (after,) = read_keys(tmp_path / "keys.json")
    assert after.sha256 == hash_of(rotated.stdout.strip().encode()) != before.sha256
    assert (after.name, after.priority) == ("alice", "batch")


def test_after_the_last_key_is_removed_clients_still_need_one(tmp_path: Path) -> None:
    keys(tmp_path, "add", "alice")
    removed = keys(tmp_path, "rm", "alice")
    assert removed.exit_code == 0 and "delete" in removed.stdout
    assert read_keys(tmp_path / "keys.json") == ()


def test_applying_a_change_names_the_running_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder = tmp_path / "cache" / "holdfast" / "run"
    run_folder.mkdir(parents=True)
    claimed = claim(run_folder, prefix=CLAIM_PREFIX)
    server = RunningServer(
        pid=4242,
        url="http://127.0.0.1:8321",
        port=8321,
        started_at=0.0,
        version="0",
        store_folder="",
        log_file="",
        certificate="",
    )
    write_server(server, claimed.folder)
    try:
        assert re.search(r"`kill -HUP (\d+ )*4242( \d+)*`", keys(tmp_path, "add", "alice").stderr)
        assert re.search(r"`kill -HUP (\d+ )*4242( \d+)*`", keys(tmp_path, "rm", "alice").stdout)
    finally:
        claimed.give_back()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "alice"), "already"),
        (("add", "a b"), "is not a valid name"),
        (("add", "bob", "--priority", "urgent"), "'interactive', 'batch'"),
        (("add", "bob", "--max-requests", "0"), "at least 1"),
        (("rm", "bob"), "there are: alice"),
        (("rotate", "bob"), "there are: alice"),
    ],
)
def test_an_impossible_change_is_reported_and_changes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    keys(tmp_path, "add", "alice")
    before = (tmp_path / "keys.json").read_bytes()
    refused = keys(tmp_path, *arguments)
    assert refused.exit_code == 2 and said in refused.stderr
    assert (tmp_path / "keys.json").read_bytes() == before
