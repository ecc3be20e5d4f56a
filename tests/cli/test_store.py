"""`holdfast store …` on folders written by a store, sometimes while another one is still using
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from holdfast.files import CLAIM_PREFIX, claim
from holdfast.front.run.running_servers import RunningServer, write_server
from holdfast.store.block import BadBlock
from holdfast.store.store import BlockStore
from tests.fakes.command_line import invoked
from tests.fakes.stored_blocks import make_chain


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with five blocks of one model and two of another."""
    folder = tmp_path / "store"
    for fingerprint, length, served_as in (("model one", 5, "owner/one"), ("model two", 2, "")):
        with BlockStore(folder, fingerprint=fingerprint, served_as=served_as) as store:
            for block in make_chain(length, fingerprint=fingerprint):
                store.put(block)
    return folder


@pytest.fixture
def running(folder: Path) -> Iterator[BlockStore]:
    with BlockStore(folder, fingerprint="model one") as store:
        yield store


def run(*arguments: str, code: int = 0, stdin: str = "", **variables: str) -> click.testing.Result:
    result = invoked(["store", *arguments], env=dict(variables), input=stdin)
    assert result.exit_code == code, result.output
    return result


def shown(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def block_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size > 1000 and "index" not in path.name
    )


def damage_one(folder: Path) -> None:
    path = block_files(folder)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_ls_lists_the_largest_models_first(folder: Path, running: BlockStore) -> None:
    models = shown("ls", "--store", str(folder))
    assert [(model["blocks"], model["tokens"]) for model in models] == [(5, 20), (2, 8)]
    table = run("ls", "--store", str(folder)).stdout
    assert all(model["model"] in table for model in models)
    assert [model["served_as"] for model in models] == ["owner/one", ""]
    assert [line.split()[0] for line in table.splitlines() if line] == [
        str(folder),
        "model",
        "owner/one",
        "(unknown)",
    ]


def test_a_server_that_uses_another_store_is_named(folder: Path, tmp_path: Path) -> None:
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "cache" / "holdfast" / "run").mkdir(parents=True)
    running = claim(tmp_path / "cache" / "holdfast" / "run", prefix=CLAIM_PREFIX)
    server = RunningServer(
        pid=1,
        url="http://here",
        port=1,
        started_at=0.0,
        version="0",
        store_folder=str(tmp_path / "other"),
        log_file="",
        certificate="",
    )
    write_server(server, running.folder)
    named = f"the server at http://here uses another store; to see it: --store {tmp_path / 'other'}"
    for command in ("ls", "stat"):
        assert named in run(command, "--store", str(folder), **places).stderr
    write_server(msgspec.structs.replace(server, store_folder=str(folder)), running.folder)
    assert "http://here" not in run("ls", "--store", str(folder), **places).stderr
    running.give_back()


def test_a_renamed_model_is_listed_under_its_new_name(folder: Path) -> None:
    with BlockStore(folder, fingerprint="model one", served_as="new \x1b[31mname") as store:
        store.put(make_chain(6, fingerprint="model one")[5])
    assert shown("ls", "--store", str(folder))[0]["served_as"] == "new [31mname"


def test_one_block_is_singular(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with BlockStore(folder, fingerprint="model") as store:
        store.put(make_chain(1, fingerprint="model")[0])
    assert "1 block," in run("stat", "--store", str(folder)).stdout
    assert "Delete 1 block (" in run("clear", "--store", str(folder), stdin="y\n").stdout


def test_stat_shows_size_and_limit(folder: Path, running: BlockStore) -> None:
    summary = shown("stat", "--store", str(folder))
    assert summary["blocks"] == 7
    assert 7000 < summary["file_bytes"] < summary["allowed_bytes"]
    limited = json.loads(
        run("stat", "--store", str(folder), "--json", HOLDFAST_STORE_DISK_BYTES="9000").stdout
    )
    assert limited["allowed_bytes"] == 9000
    assert "7 blocks" in run("stat", "--store", str(folder)).stdout


def test_stat_counts_the_files_in_quarantine(folder: Path) -> None:
    damage_one(folder)
    failures = []
    for fingerprint in ("model one", "model two"):
        with BlockStore(folder, fingerprint=fingerprint) as store:
            reads = [store.read(entry.block.key) for entry in store.entries()]
            failures += [failure for read in reads if (failure := read.exception()) is not None]
            store.flush()
    assert [type(failure) for failure in failures] == [BadBlock]
    assert shown("stat", "--store", str(folder))["quarantined_files"] == 1
    assert "quarantine" in run("stat", "--store", str(folder)).stdout


def test_clear_deletes_nothing_without_a_yes(folder: Path) -> None:
    assert "7 blocks" in run("clear", "--store", str(folder), stdin="n\n", code=1).output
    run("clear", "--store", str(folder), stdin="", code=1)
    assert shown("stat", "--store", str(folder))["blocks"] == 7
    run("clear", "--store", str(folder), stdin="y\n")
    assert shown("ls", "--store", str(folder)) == []
    assert "nothing is cached" in run("ls", "--store", str(folder)).stdout


def test_clear_can_delete_a_single_model(folder: Path, running: BlockStore) -> None:
    larger, smaller = shown("ls", "--store", str(folder))
    assert (
        "deleted 5 blocks"
        in run("clear", "--store", str(folder), "--model", larger["model"], "--yes").stdout
    )
    assert [model["model"] for model in shown("ls", "--store", str(folder))] == [smaller["model"]]
    assert (
        "ls"
        in run("clear", "--store", str(folder), "--model", larger["model"], "--yes", code=2).stderr
    )


def test_clear_accepts_a_models_name_and_deletes_it(folder: Path) -> None:
    assert (
        "deleted 5 blocks"
        in run("clear", "--store", str(folder), "--model", "owner/one", "--yes").stdout
    )
    assert [model["blocks"] for model in shown("ls", "--store", str(folder))] == [2]
    assert list(folder.rglob("name")) == []


@pytest.mark.parametrize("command", ["ls", "stat", "clear"])
def test_a_missing_or_foreign_folder_is_reported(command: str, tmp_path: Path) -> None:
    assert "--store" in run(command, code=2).stderr
    assert "no store at" in run(command, "--store", str(tmp_path / "nowhere"), code=2).stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine", encoding="utf-8")
    assert len(run(command, "--store", str(foreign), code=2).stderr.splitlines()) == 1
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
