"""Metrics as Prometheus reads them."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from penstock.metrics import Counter, Gauge, Histogram, Metric, Metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _MetricsCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        return [_family(metric) for metric in self._metrics]


def expose(metrics: Metrics) -> bytes:
    """All metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_MetricsCollector(metrics))
    return generate_latest(registry)


def _family(metric: Metric) -> Family:
    if isinstance(metric, Histogram):
        bounds = [*map(str, metric.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(metric.counts), strict=True))
        return HistogramMetricFamily(metric.name, metric.help, buckets, metric.total)
    return _labelled(metric)


def _labelled(metric: Counter | Gauge) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    if metric.label is None:
        return kind(metric.name, metric.help, value=metric.values.get("", 0))
    family = kind(metric.name, metric.help, labels=[metric.label])
    for label_value, value in metric.values.items():
        family.add_metric([label_value], value)
    return family
