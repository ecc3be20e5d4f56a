"""A process that puts blocks into a store and prints them, until it is killed or has put enough.

Started by tests.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from holdfast.store.block import StoredBlock
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, make_block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--part-bytes", type=int, default=30_000)
    parser.add_argument("--budget-bytes", type=int, default=1 << 40)
    wanted = parser.parse_args()
    limits = StoreLimits(budget_bytes=wanted.budget_bytes, volume_percent=100.0, spare_bytes=0)
    after: StoredBlock | None = None
    with BlockStore(wanted.folder, fingerprint=FINGERPRINT, limits=limits) as store:
        for number in range(wanted.first, wanted.first + wanted.count):
            after = make_block([number], after=after, part_bytes=(wanted.part_bytes,))
            store.put(after)
            tell("put", after.key)
            for key in store.changes().stored:
                tell("stored", key)
            # written so far: the queue does not overflow
            store._mailbox.ask(lambda: None).result()
        assert store.flush()
        store.check_invariants()
    os.write(1, b"done\n")


def tell(what: str, key: bytes) -> None:
    os.write(1, f"{what} {key.hex()} {time.monotonic()}\n".encode())


if __name__ == "__main__":
    main()
