"""The old place of `RunningAhead`, until `tests/worker/prefix/test_live_tier.py` uses the new one."""

from tests.fakes.caching_worker import RunningAhead as RunningAhead
