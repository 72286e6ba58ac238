"""Counting, and what the counts look like to Prometheus and in the documentation."""

from pathlib import Path

from penstock.frontend.metrics import Counter, Gauge, Histogram, Metrics, describe
from penstock.server.exposition import PenstockNames, expose


def test_a_histogram_counts_a_value_at_a_bound_below_it():
    histogram = Histogram("h", "", bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts_up_to((1.0, 2.0)) == [2, 4, 5]
    assert histogram.total == 14.0


def test_counters_grow_and_gauges_are_set_by_label():
    counter, gauge = Counter("c", "", "reason"), Gauge("g", "")
    counter.add(2, "stop")
    counter.add(1, "stop")
    gauge.set(5)
    gauge.set(4)
    assert (counter.values, gauge.values) == ({"stop": 3}, {"": 4})


def test_metrics_are_exposed_as_prometheus_reads_them():
    metrics = Metrics()
    metrics.running.set(3)
    metrics.prompt_tokens.add(7)
    metrics.success.add(1, "stop")
    metrics.time_to_first_token.observe(0.02)
    metrics.time_to_first_token.observe(5000)
    lines = expose(PenstockNames(metrics)).decode().splitlines()
    for line in (
        "# TYPE penstock_num_requests_running gauge",
        "penstock_num_requests_running 3.0",
        "penstock_prompt_tokens_total 7.0",
        'penstock_request_success_total{finished_reason="stop"} 1.0',
        'penstock_time_to_first_token_seconds_bucket{le="0.01"} 0.0',
        'penstock_time_to_first_token_seconds_bucket{le="0.025"} 1.0',
        'penstock_time_to_first_token_seconds_bucket{le="2560.0"} 1.0',
        'penstock_time_to_first_token_seconds_bucket{le="+Inf"} 2.0',
        "penstock_time_to_first_token_seconds_count 2.0",
        "penstock_time_to_first_token_seconds_sum 5000.02",
    ):
        assert line in lines


def test_every_metric_has_a_name_in_the_style_of_the_field_and_a_meaning():
    names = [metric.name for metric in Metrics()]
    assert len(set(names)) == len(names)
    for metric in Metrics():
        assert metric.name.startswith("penstock_")
        assert metric.help.endswith(".")


def test_the_documentation_is_what_the_code_says():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == describe(Metrics()) + "\n"


def test_a_histogram_with_other_bounds_for_vllm_counts_exactly_at_both():
    histogram = Histogram("h", "", bounds=(1.0, 3.0), vllm=("h",), vllm_bounds=(2.0, 3.0, 4.0))
    for value in (0.5, 1.5, 2.5, 3.5, 9.0):
        histogram.observe(value)
    assert histogram.counts_up_to(histogram.bounds) == [1, 3, 5]
    assert histogram.counts_up_to(histogram.vllm_bounds) == [2, 3, 4, 5]
