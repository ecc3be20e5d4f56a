"""The old name of `CachingWorker`, until `tests/worker/prefix/test_live_tier.py` uses the new one."""

from __future__ import annotations

from tests.fakes.caching_worker import CachingWorker
from tests.fakes.caching_worker import make_blocks_small as make_blocks_small


class SteppedWorker(CachingWorker):
    @property
    def worker(self) -> CachingWorker:
        return self
