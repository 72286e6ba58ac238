"""Metrics in the Prometheus format, under Penstock's names and, if configured, under vLLM's."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.engine.info import EngineInfo
from penstock.frontend.metrics import Counter, Gauge, Histogram, Metric, Metrics
from penstock.frontend.open_requests import AdapterUse

CONTENT_TYPE = CONTENT_TYPE_LATEST

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class PenstockNames(Collector):
    """Metrics under Penstock's names."""

    def __init__(self, metrics: Metrics, model: str | None = None) -> None:
        """
        Args:
            model: the label of each sample, if there are several models.
        """
        self._metrics = metrics
        self._labels = {} if model is None else {"model": model}

    def collect(self) -> Iterable[Family]:
        for metric in self._metrics:
            has_own = not isinstance(metric, Histogram) and metric.label == "model"
            yield _family(metric, metric.name, {} if has_own else self._labels)


class OneOf(Collector):
    """Collectors with the same metrics and different labels: one family for each name, as the format requires."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[PrometheusMetric]:
        found: dict[str, PrometheusMetric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return found.values()


class VllmNames(Collector):
    """Metrics under the corresponding names, labels and buckets of vLLM."""

    def __init__(
        self,
        metrics: Metrics,
        model_name: str,
        info: EngineInfo,
        adapter_use: AdapterUse,
    ) -> None:
        """
        Args:
            adapter_use: the adapters of open requests.
        """
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": "0"}
        self._info = info
        self._adapter_use = adapter_use

    def collect(self) -> Iterable[Family]:
        for metric in self._metrics:
            for name in metric.vllm:
                yield _family(metric, f"vllm:{name}", self._labels)
        info = self._info
        cache = {"engine": "0", "block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        yield _info_family("vllm:cache_config_info", "The KV cache; always 1.", cache, 1)
        if info.max_adapters:
            use = self._adapter_use
            adapters = {
                "max_lora": str(info.max_adapters),
                "waiting_lora_adapters": ",".join(use.waiting),
                "running_lora_adapters": ",".join(use.running),
            }
            help = "Adapters of open requests; the value is the time, in seconds since the epoch."
            yield _info_family("vllm:lora_requests_info", help, adapters, time.time())


_NOT_SUMMED = ("start_time_seconds", "max_fds")


class EngineProcesses(Collector):
    """Total CPU, memory and open files of all engine processes; the start time of the newest one."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids

    def collect(self) -> Iterable[Family]:
        found: dict[str, list[PrometheusMetric]] = {}
        for pid in self._pids():
            for family in ProcessCollector(namespace="penstock_engine", pid=partial(int, pid), registry=None).collect():
                found.setdefault(family.name, []).append(family)
        for name, families in found.items():
            values = [family.samples[0].value for family in families]
            first = families[0]
            kind = CounterMetricFamily if first.type == "counter" else GaugeMetricFamily
            yield kind(name, first.documentation, max(values) if name.endswith(_NOT_SUMMED) else sum(values))


def process_collectors(engine_pids: Callable[[], Sequence[int]]) -> list[Collector]:
    """CPU, memory and open files of this process and of the engine processes."""
    return [ProcessCollector(registry=None), EngineProcesses(engine_pids)]


def expose(*collectors: Collector) -> bytes:
    """All metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _family(metric: Metric, name: str, labels: Mapping[str, str]) -> Family:
    if isinstance(metric, Histogram):
        bounds = metric.vllm_bounds if name.startswith("vllm:") and metric.vllm_bounds else metric.bounds
        edges = [*map(floatToGoString, bounds), "+Inf"]
        histogram = HistogramMetricFamily(name, metric.help, labels=list(labels))
        buckets = list(zip(edges, metric.counts_up_to(bounds), strict=True))
        histogram.add_metric(list(labels.values()), buckets, metric.total)
        return histogram
    return _labelled(metric, name, labels)


def _info_family(name: str, help: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    """A gauge with its information in labels."""
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _labelled(metric: Counter | Gauge, name: str, labels: Mapping[str, str]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    own = [] if metric.label is None else [metric.label]
    family = kind(name, metric.help, labels=[*labels, *own])
    values = metric.values if own else {"": metric.values.get("", 0)}
    for value_of_label, value in values.items():
        family.add_metric([*labels.values(), *([value_of_label] if own else [])], value)
    return family
