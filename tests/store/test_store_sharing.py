"""Several processes with one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.store.block import BadBlock, BlockMissing
from holdfast.store.inspect import clear_store, summarize_store
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from tests.fakes.store_writers import ENVIRONMENT, ROOT, start_writer
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, is_right, make_chain, unusable_files


def test_three_processes_fill_one_folder_completely(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    # two write the same chain, one another
    writers = [
        start_writer(folder, "--first", first, "--count", "60", "--part-bytes", "2000")
        for first in ("0", "0", "5000")
    ]
    outputs = [writer.communicate(timeout=180)[0] for writer in writers]
    assert all(output.endswith(b"done\n") for output in outputs)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        entries = store.entries()
        assert len(entries) == 120
        assert all(is_right(store.read(entry.block.key).result()) for entry in entries)
        assert store.statistics().bad_blocks == 0
        store.check_invariants()
    assert list((folder / "incoming").iterdir()) == []


def test_a_budget_holds_over_all_processes(tmp_path: Path) -> None:
    folder, budget = tmp_path / "s", 300_000
    words = ("--count", "50", "--part-bytes", "9000", "--budget-bytes", str(budget))
    writers = [start_writer(folder, "--first", first, *words) for first in ("0", "5000")]
    with BlockStore(folder, fingerprint=FINGERPRINT) as reader:
        while any(writer.poll() is None for writer in writers):
            for entry in reader.entries()[-5:]:
                try:
                    assert is_right(reader.read(entry.block.key).result())
                except BlockMissing:
                    continue  # evicted by a writer since it was listed
                except BadBlock as bad:
                    raise AssertionError(bad) from bad
        assert all(writer.communicate()[0].endswith(b"done\n") for writer in writers)
    summary = summarize_store(folder, limits=StoreLimits(budget_bytes=budget))
    assert 100_000 < summary.file_bytes <= budget
    assert unusable_files(folder) == {}


def test_one_store_lists_and_reads_what_another_writes(tmp_path: Path) -> None:
    chain = make_chain(4)
    with (
        BlockStore(tmp_path, fingerprint=FINGERPRINT) as first,
        BlockStore(tmp_path, fingerprint=FINGERPRINT) as second,
    ):
        for block in chain:
            first.put(block)
        first.flush()
        assert [entry.block.key for entry in second.entries()] == [block.key for block in chain]
        assert bytes_of(second.read(chain[3].key).result()) == chain[3]
        for block in chain:
            second.put(block)
        second.flush()
        assert second.statistics().written_bytes == 0
        second.remove([chain[3].key])
        second.flush()
        assert len(first.entries()) == 3


def test_many_threads_may_use_one_store(tmp_path: Path) -> None:
    with BlockStore(tmp_path, fingerprint=FINGERPRINT) as store, ThreadPoolExecutor(6) as pool:

        def work(number: int) -> None:
            chain = make_chain(10, first=number * 1000)
            for block in chain:
                store.put(block)
                store.touch([block.key])
                assert bytes_of(store.read(block.key).result()) == block
            store.flush()
            store.remove([chain[-1].key])
            store.statistics()

        list(pool.map(work, range(12)))
        store.flush()
        assert len(store.entries()) == 12 * 9
        store.check_invariants()


def test_a_command_may_clear_the_folder_beneath_a_store(tmp_path: Path) -> None:
    chain = make_chain(4)
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        for block in chain:
            store.put(block)
        store.flush()
        clear_store(tmp_path / "s")
        assert store.entries() == ()
        for block in chain:
            store.put(block)
        store.flush()
        assert len(store.entries()) == 4
        shutil.rmtree(tmp_path / "s" / "index")
        summarize_store(tmp_path / "s", limits=StoreLimits())
        assert len(store.entries()) == 4
        store.check_invariants()


def test_processes_opening_a_new_folder_concurrently_do_not_interfere(
    tmp_path: Path,
) -> None:
    folder, many, rounds = tmp_path / "s", 6, 8
    openers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.store_opener_process", str(folder), str(number), str(rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT,
        )
        for number in range(many)
    ]  # fmt: skip
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == b"ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write(b"go\n")
        opener.stdin.flush()
    said = [opener.communicate(timeout=240)[1].decode() for opener in openers]
    assert said == [""] * many
    assert [opener.returncode for opener in openers] == [0] * many
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        assert len(store.entries()) == many * rounds
        assert all(is_right(store.read(entry.block.key).result()) for entry in store.entries())
    assert list((folder / "incoming").iterdir()) == []
