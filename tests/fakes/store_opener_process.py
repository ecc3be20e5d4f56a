"""A process that opens and closes a store repeatedly, once told to, and prints errors. For tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, make_block


def main() -> None:
    folder, number, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.write(1, b"ready\n")
    sys.stdin.readline()  # until all others are ready, too
    for turn in range(rounds):
        block = make_block([number, turn], part_bytes=(100,))
        with BlockStore(folder, fingerprint=FINGERPRINT) as store:
            store.put(block)
            assert store.flush(), "not everything was written"
            statistics = store.statistics()
            assert statistics.mode == "writing", statistics.mode
            assert statistics.outages == 0, "the store had an outage"


main()
