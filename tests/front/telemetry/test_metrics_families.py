from __future__ import annotations

from holdfast.front.telemetry.metrics import cumulative
from holdfast.wire.events import Histogram


def test_buckets_are_cumulative_and_the_last_is_unbounded() -> None:
    histogram = Histogram(bounds=(0.5, 1.0), counts=(3, 0, 2), total=9.0)
    assert list(cumulative(histogram)) == [("0.5", 3.0), ("1.0", 3.0), ("+Inf", 5.0)]
