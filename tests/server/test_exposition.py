"""`/metrics` of a real server: under our names, under vLLM's, and of its processes."""

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import memory_mib, running_server
from tests.support import fetch

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "gpu_prefix_cache_queries",
    "gpu_prefix_cache_hits",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
}
FIRST_TOKEN = (
    *("0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0"),
    *("7.5", "10.0", "20.0", "40.0", "80.0", "160.0", "640.0", "2560.0", "+Inf"),
)
INTER_TOKEN = (
    *("0.01", "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5", "0.75", "1.0", "2.5", "5.0", "7.5"),
    *("10.0", "20.0", "40.0", "80.0", "+Inf"),
)
REQUEST = (
    *("0.3", "0.5", "0.8", "1.0", "1.5", "2.0", "2.5", "5.0", "10.0", "15.0", "20.0", "30.0", "40.0", "50.0", "60.0"),
    *("120.0", "240.0", "480.0", "960.0", "1920.0", "7680.0", "+Inf"),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "time_per_output_token_seconds": INTER_TOKEN,
    "request_time_per_output_token_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_params_n": ("1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"),
}
TOKEN_HISTOGRAMS = {
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
}


@pytest.fixture(scope="module")
def vllm_named(tiny_llama):
    flags = ("--served-model-name", "tiny", "--threads", "1", "--metrics-names", "vllm")
    with running_server("--model", str(tiny_llama), *flags) as running:
        yield running


def families_of(server):
    """The families of `/metrics` by their names, as Prometheus reads them."""
    text = fetch.get(f"{server.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family, suffix="", **labels):
    (found,) = (
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )
    return found


def test_vllms_names_have_its_types_labels_and_buckets(vllm_named):
    answer = vllm_named.post("/v1/completions", prompt=[[5, 6, 7], [8]], n=2, max_tokens=8, ignore_eos=True)
    assert answer.status_code == 200
    found = families_of(vllm_named)
    ours = {name for name in found if name.startswith("penstock_")}
    vllms = {name.removeprefix("vllm:"): family for name, family in found.items() if name.startswith("vllm:")}
    assert set(vllms) == {*GAUGES, *COUNTERS, *HISTOGRAMS, *TOKEN_HISTOGRAMS, "request_success", "cache_config_info"}
    assert "penstock_num_requests_running" in ours, "ours are there as well"
    for name, family in vllms.items():
        kind = "gauge" if name in GAUGES else "counter" if name in COUNTERS else "histogram"
        if name not in ("request_success", "cache_config_info"):
            assert family.type == kind
            assert all((s.labels["model_name"], s.labels["engine"]) == ("tiny", "0") for s in family.samples)
        if name in HISTOGRAMS:
            edges = tuple(sample.labels["le"] for sample in family.samples if "le" in sample.labels)
            assert edges == HISTOGRAMS[name]


def test_vllms_names_count_what_ours_do(vllm_named):
    before = families_of(vllm_named)
    answer = vllm_named.post("/v1/completions", prompt=[[5, 6, 7], [8]], n=2, max_tokens=8, ignore_eos=True)
    assert answer.status_code == 200
    after = families_of(vllm_named)

    def grown(name, suffix="", **labels):
        return value(after[name], suffix, **labels) - value(before[name], suffix, **labels)

    assert grown("vllm:prompt_tokens", "_total") == grown("penstock_prompt_tokens", "_total") == 4
    assert grown("vllm:generation_tokens", "_total") == 32
    assert grown("vllm:request_success", "_total", finished_reason="length") == 4
    assert grown("vllm:e2e_request_latency_seconds", "_count") == 2
    assert grown("vllm:time_to_first_token_seconds", "_bucket", le="+Inf") == 2
    assert grown("vllm:request_prompt_tokens", "_sum") == 4
    assert grown("vllm:request_generation_tokens", "_sum") == 32
    assert grown("vllm:request_generation_tokens", "_count") == 4
    assert grown("vllm:request_max_num_generation_tokens", "_sum") == 16
    assert grown("vllm:request_params_n", "_sum") == 4
    assert grown("vllm:request_params_max_tokens", "_sum") == 16
    assert grown("vllm:request_time_per_output_token_seconds", "_count") == 4
    parts = [grown(f"vllm:request_{part}_time_seconds", "_sum") for part in ("prefill", "decode", "inference")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])
    assert parts[0] > 0
    assert parts[2] <= grown("vllm:e2e_request_latency_seconds", "_sum")
    assert value(after["vllm:kv_cache_usage_perc"]) == value(after["penstock_kv_cache_usage_ratio"]) == 0


def test_vllms_names_are_not_there_unless_they_are_asked_for(server):
    assert not any(name.startswith("vllm:") for name in families_of(server))


def test_the_served_model_is_named_so_that_a_dashboard_can_choose_servers_by_it(server):
    (sample,) = families_of(server)["penstock_model_info"].samples
    assert (sample.labels, sample.value) == ({"model": "tiny"}, 1)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are read from /proc")
def test_the_server_and_its_engine_tell_what_their_processes_use(server):
    found = families_of(server)
    for prefix, pid in (("process", server.process.pid), ("penstock_engine_process", server.engine_pid)):
        assert value(found[f"{prefix}_resident_memory_bytes"]) == pytest.approx(memory_mib(pid) * 2**20, rel=0.2)
        assert value(found[f"{prefix}_cpu_seconds"], "_total") > 0
        assert value(found[f"{prefix}_open_fds"]) > 3
        assert value(found[f"{prefix}_start_time_seconds"]) > 1e9
