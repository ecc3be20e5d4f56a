"""Families of metrics out of figures: each a table of models, taken from the field of its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.wire.figures import Histogram

# name of the field, which ends the metric's, and what it says
Table: TypeAlias = Iterable[tuple[str, str]]
Label = TypeVar("Label", bound=str)


def plain(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    table: Table,
    figures: Mapping[str, object],
) -> Iterator[Metric]:
    """A gauge or a counter for each field of the table. `figures`: by model id."""
    for name, documentation in table:
        family = kind(prefix + name, documentation, labels=["model"])
        for model, numbers in figures.items():
            family.add_metric([model], getattr(numbers, name))
        yield family


def labelled(
    name: str, documentation: str, label: str, counts: Mapping[str, Mapping[Label, float]]
) -> Metric:
    """A counter with a label beside the model. `counts`: model id → value of the label → count."""
    counter = CounterMetricFamily(name, documentation, labels=["model", label])
    for model, by_value in counts.items():
        for value, count in sorted(by_value.items()):
            counter.add_metric([model, value], count)
    return counter


def histograms(prefix: str, table: Table, figures: Mapping[str, object]) -> Iterator[Metric]:
    """A histogram for each field of the table, of the models that have one."""
    for name, documentation in table:
        family = HistogramMetricFamily(prefix + name, documentation, labels=["model"])
        for model, numbers in figures.items():
            histogram: Histogram | None = getattr(numbers, name)
            if histogram is not None:
                family.add_metric([model], list(cumulative(histogram)), sum_value=histogram.total)
        yield family


def cumulative(histogram: Histogram) -> Iterator[tuple[str, float]]:
    """The buckets: each bound as a text, with the number of observations up to it."""
    for bound, count in zip(
        (*histogram.bounds, float("inf")), accumulate(histogram.counts), strict=True
    ):
        yield ("+Inf" if bound == float("inf") else str(bound)), float(count)
