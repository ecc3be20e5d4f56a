"""The old place of `FailingOnce`, until `tests/worker/prefix/test_live_tier.py` uses the new one."""

from tests.fakes.caching_worker import FailingOnce as FailingOnce
