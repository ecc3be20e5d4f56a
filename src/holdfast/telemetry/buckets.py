"""Histograms as Prometheus wants them."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.messages.figures import Histogram


def cumulative(histogram: Histogram) -> Iterator[tuple[str, float]]:
    """The buckets: each bound as a text, with the number of observations up to it."""
    count = 0
    for bound, more in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += more
        yield ("+Inf" if bound == float("inf") else str(bound)), float(count)
