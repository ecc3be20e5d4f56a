"""How fast the store is on this machine: `PYTHONPATH=src python -m tools.store_speed FOLDER`.

FOLDER is made and removed.

Reads come from the page cache: what is measured is the store, not the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.store.block import Block, StoredBlock, child_key, fingerprint_id, read_block, root_key
from holdfast.store.folder import (
    StoreFolder,
)
from holdfast.store.index import IndexSupervisor
from holdfast.store.maintenance import StoreLimits, choose_victims
from holdfast.store.store import BlockStore
from holdfast.worker.prefix.chain import (
    pack_tokens,
)

MODEL = "speed"
PARTS = 56  # keys and values of 28 layers
LIMITS = StoreLimits(volume_percent=100.0, spare_bytes=0, queue_bytes=8 << 30)


def chain(count: int, block_bytes: int, *, tokens: int = 256) -> list[StoredBlock]:
    """Blocks that share their (random) parts: what is in them does not matter, and memory is
    spared.
    """
    part = memoryview(os.urandom(block_bytes // PARTS))
    parts = tuple(part for _ in range(PARTS)) if block_bytes > PARTS else (part,)
    blocks: list[StoredBlock] = []
    parent, start = root_key(MODEL), 0
    for number in range(count):
        packed = pack_tokens(range(number, number + tokens))
        parent_tokens = tokens if number else 0
        key = child_key(parent, parent_tokens, packed, "kv")
        block = Block(
            key=key,
            parent_key=parent,
            parent_tokens=parent_tokens,
            kind="kv",
            start=start,
            packed_tokens=packed,
        )
        blocks.append(StoredBlock(block=block, meta=b"", parts=parts))
        parent, start = key, start + tokens
    return blocks


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def throughput(folder: Path, count: int) -> None:
    print("block MB | put us | durable MB/s | read MB/s one by one, 8 ahead, all kept")
    for block_bytes in (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23):
        shutil.rmtree(folder, ignore_errors=True)
        blocks = chain(count, block_bytes)
        total = sum(block.nbytes for block in blocks) / 1e6
        with BlockStore(folder, fingerprint=MODEL, limits=LIMITS) as store:
            store.flush()
            puts = [seconds_of(lambda block=block: store.put(block)) for block in blocks]  # type: ignore[misc]
            began = time.perf_counter() - sum(puts)
            store.flush()
            written = time.perf_counter() - began
            for block in blocks:
                store.read(block.key).result()
            single = seconds_of(
                lambda: [store.read(block.key).result() and None for block in blocks]  # noqa: B023
            )
            ahead = seconds_of(lambda: read_ahead(store, blocks, 8))  # noqa: B023
            kept = seconds_of(
                lambda: [read.result() for read in [store.read(block.key) for block in blocks]]  # noqa: B023
            )
        print(
            f"{block_bytes / 1e6:8.1f} | {statistics.median(puts) * 1e6:6.1f} | "
            f"{total / written:6.0f}"
            f" | {total / single:6.0f}, {total / ahead:6.0f}, {total / kept:6.0f}"
        )


def read_ahead(store: BlockStore, blocks: list[StoredBlock], ahead: int) -> None:
    """Read all blocks, always with some asked for, letting each go before the next is taken."""
    futures = [store.read(block.key) for block in blocks[:ahead]]
    for number in range(len(blocks)):
        futures.pop(0).result()
        if number + ahead < len(blocks):
            futures.append(store.read(blocks[number + ahead].key))


def small_blocks(folder: Path, count: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    blocks = chain(count, 1000)
    with BlockStore(
        folder,
        fingerprint=MODEL,
        limits=StoreLimits(volume_percent=100.0, spare_bytes=0, queue_blocks=count),
    ) as store:
        took = seconds_of(lambda: ([store.put(block) for block in blocks], store.flush(600)))
    print(f"{count} blocks of 1 KB: {took / count * 1e3:.2f} ms each")
    began = time.perf_counter()
    with BlockStore(folder, fingerprint=MODEL, limits=LIMITS) as store:
        made = time.perf_counter() - began
        listed = seconds_of(store.entries)
        again = seconds_of(store.entries)
        print(
            f"open: constructor {made * 1e3:.1f} ms, first entries() {listed * 1e3:.0f} ms, again "
            f"{again * 1e3:.0f} ms"
        )
    shutil.rmtree(folder / "index")
    with BlockStore(folder, fingerprint=MODEL, limits=LIMITS) as store:
        print(f"open without index: {seconds_of(store.entries) * 1e3:.0f} ms")
    supervisor = IndexSupervisor(StoreFolder(folder))
    entries = supervisor.use(lambda index: index.entries(0.0))
    print(
        "choose victims: "
        f"{seconds_of(lambda: choose_victims(entries, excess_bytes=count * 20)) * 1e3:.0f} ms"
    )
    supervisor.close()
    model = fingerprint_id(MODEL)
    path = StoreFolder(folder).block_path(blocks[0].key, model=model)
    small = seconds_of(lambda: [read_block(path, blocks[0].key, model=model) for _ in range(1000)])
    print(f"read a small block, no thread: {small * 1e3:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--small", type=int, default=10_000)
    wanted = parser.parse_args()
    try:
        throughput(wanted.folder, wanted.blocks)
        small_blocks(wanted.folder, wanted.small)
    finally:
        shutil.rmtree(wanted.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
