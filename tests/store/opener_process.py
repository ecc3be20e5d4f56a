"""A process that opens and closes a store again and again, from a given moment on, and says what went wrong. Started by tests."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from holdfast.store.store import BlockStore
from tests.store.chains import FINGERPRINT, make_block


def main() -> None:
    folder, number, begin_at, rounds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    time.sleep(max(0.0, begin_at - time.time()))
    for turn in range(rounds):
        block = make_block([number, turn], part_bytes=(100,))
        with BlockStore(folder, fingerprint=FINGERPRINT) as store:
            store.put(block)
            assert store.flush(), "not everything was written"
            statistics = store.statistics()
            assert statistics.mode == "writing", statistics.mode
            assert statistics.outages == 0, "the store had an outage"


main()
