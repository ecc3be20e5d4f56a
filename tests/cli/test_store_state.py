from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import RunningServer, write_server
from holdfast.store.store import BlockStore
from holdfast.worker.cpu.kernels import build
from tests.fakes.command_line import holdfast_here, only_line
from tests.fakes.stored_blocks import FINGERPRINT, make_chain


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In place of /var/tmp and /tmp."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    monkeypatch.setattr(build, "_TEMPORARY_FOLDERS", tuple(map(str, folders)))
    return folders


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, str]:
    """Create something of every kind; returns the variables that point to it."""
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store:
        for block in make_chain(3):
            store.put(block)
    caches, state, settings = (
        tmp_path / name / "holdfast" for name in ("cache", "state", "config")
    )
    for folder in (
        caches / "compiled" / "m",
        caches / "kernels",
        caches / "hashes",
        caches / "quality",
        state / "logs",
        state / "crashes",
        state / "performance",
        settings,
        caches / "run",
    ):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1000)
    (settings / "keys.json").write_text("{}")
    return {
        **{
            f"XDG_{name}_HOME": str(tmp_path / name.lower())
            for name in ("CACHE", "STATE", "CONFIG")
        },
        "HOLDFAST_STORE_FOLDER": str(tmp_path / "store"),
    }


def listed(folder: Path, variables: dict[str, str]) -> dict[str, dict[str, Any]]:
    done = holdfast_here("state", "ls", "--json", cwd=folder, variables=variables)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_all_state_is_listed_with_limits_and_cleared_if_unused(
    tmp_path: Path, kept: dict[str, str]
) -> None:
    found = listed(tmp_path, kept)
    assert list(found) == [
        "store",
        "responses",
        "answers",
        "images",
        "logs",
        "crashes",
        "performance",
        "compiled",
        "kernels",
        "hashes",
        "quality",
        "keys",
    ]
    assert all(each["bound"] for each in found.values())
    assert found["store"]["bytes"] > 3000
    folders = ("logs", "crashes", "performance", "compiled", "kernels", "hashes", "quality")
    assert {found[name]["bytes"] for name in folders} == {1000}
    assert found["keys"]["path"].endswith("config/holdfast/keys.json")

    with_a_server = claim(tmp_path / "cache" / "holdfast" / "run", prefix=CLAIM_PREFIX)
    server = RunningServer(
        pid=os.getpid(),
        url="http://127.0.0.1:1",
        port=1,
        started_at=0.0,
        version="0",
        store_folder=str(tmp_path / "store"),
        log_file="",
        certificate="",
    )
    write_server(server, with_a_server.folder)
    for name in ("store", "responses", "compiled"):
        refused = holdfast_here("state", "clear", name, "--yes", cwd=tmp_path, variables=kept)
        assert f"{name} is in use by the server at http://127.0.0.1:1" in only_line(refused.stderr)
    assert (
        holdfast_here("state", "clear", "logs", "--yes", cwd=tmp_path, variables=kept).returncode
        == 0
    )
    with_a_server.give_back()

    asked = holdfast_here("state", "clear", "--all", cwd=tmp_path, variables=kept, stdin="n\n")
    assert (asked.returncode, "Delete this?" in asked.stdout) == (1, True)
    assert listed(tmp_path, kept)["crashes"]["bytes"] == 1000
    assert (
        holdfast_here("state", "clear", "--all", "--yes", cwd=tmp_path, variables=kept).returncode
        == 0
    )
    left = listed(tmp_path, kept)
    # the marker, the lock, an empty index
    assert {name for name, each in left.items() if each["bytes"]} <= {"keys", "store"}
    assert not list((tmp_path / "store").rglob("*.block"))
    assert (tmp_path / "config" / "holdfast" / "keys.json").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["keys"], "keys are not deleted here: `holdfast keys rm NAME` removes one"),
        (["everything"], "there is no state called everything; there are: store, responses"),
        ([], "name what to delete, or --all"),
    ],
)
def test_an_invalid_clear_is_one_line(
    arguments: list[str], part: str, tmp_path: Path, kept: dict[str, str]
) -> None:
    refused = holdfast_here("state", "clear", *arguments, "--yes", cwd=tmp_path, variables=kept)
    assert refused.returncode == 2
    assert part in only_line(refused.stderr)


def test_before_the_first_server_state_is_empty_and_clearable(
    tmp_path: Path,
) -> None:
    variables = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CACHE", "STATE", "CONFIG")} | {
        "HOLDFAST_STORE_FOLDER": "auto"
    }
    found = listed(tmp_path, variables)
    assert {each["bytes"] for each in found.values()} == {0}
    assert found["store"]["bound"] == "a fifth of the volume"
    assert (
        holdfast_here(
            "state", "clear", "--all", "--yes", cwd=tmp_path, variables=variables
        ).returncode
        == 0
    )


def test_kernels_outside_the_cache_folder_are_listed_and_cleared(
    tmp_path: Path, kept: dict[str, str], temporary: list[Path]
) -> None:
    first, second, third = (each / f"holdfast-kernels-{os.getuid()}" for each in temporary)
    for folder in (first, second):
        folder.mkdir(mode=0o700, parents=True)
        (folder / "products-1.so").write_bytes(b"x" * 500)
    third.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    third.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    found = {each["path"]: each for each in listed(tmp_path, kept).values()}
    assert [found[str(folder)]["bytes"] for folder in (first, second)] == [500, 500]
    assert str(third) not in found, "a link, perhaps of somebody else"

    def clear(name: str) -> None:
        done = holdfast_here("state", "clear", name, "--yes", cwd=tmp_path, variables=kept)
        assert done.returncode == 0, done.stderr

    clear(found[str(first)]["name"])
    assert not first.exists()
    assert second.exists()
    clear("--all")
    assert not second.exists()
    assert (tmp_path / "elsewhere").exists()
