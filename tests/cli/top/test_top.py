import io

import pytest
from rich.console import Console

from penstock.cli import main
from penstock.cli.top.sample import Sample, Samples, quantile, rate, share
from penstock.cli.top.view import view_of
from penstock.errors import PenstockError

METRICS = """\
penstock_model_info{{model="tiny"}} 1
penstock_generation_tokens_total {tokens}
penstock_prefix_cache_queries_total {tokens}
penstock_prefix_cache_hits_total {hits}
penstock_num_requests_running 3
penstock_num_requests_waiting 2
penstock_kv_blocks{{state="held"}} 2
penstock_kv_blocks{{state="held",model="other"}} 1
penstock_kv_blocks{{state="free"}} 9
penstock_place_up{{place="0"}} 1
penstock_place_up{{place="1"}} 0
penstock_place_steps_total{{place="0"}} {tokens}
penstock_time_to_first_token_seconds_bucket{{le="0.1"}} {hits}
penstock_time_to_first_token_seconds_bucket{{le="0.2"}} {tokens}
penstock_time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}
"""


def sample(now: float, tokens: int, hits: int) -> Sample:
    return Sample.parse(METRICS.format(tokens=tokens, hits=hits), now)


def test_rates_shares_and_quantiles_are_of_what_came_between_two_samples() -> None:
    before, now = sample(10, 100, 50), sample(12, 300, 100)
    assert rate(before, now, "penstock_generation_tokens_total") == 100
    assert rate(now, before, "penstock_generation_tokens_total") == 0
    assert share(before, now, "penstock_prefix_cache_hits_total", "penstock_prefix_cache_queries_total") == 0.25
    assert share(now, now, "penstock_prefix_cache_hits_total", "penstock_prefix_cache_queries_total") is None
    median = quantile(before, now, "penstock_time_to_first_token_seconds", 0.5)
    assert median == pytest.approx(0.1 + 0.1 * 50 / 150)  # 50 of 200 are below 0.1 s, the others between 0.1 and 0.2
    assert quantile(now, now, "penstock_time_to_first_token_seconds", 0.5) is None


def test_the_view_has_the_load_and_each_engine() -> None:
    samples = Samples("http://h", None)
    samples._taken.extend([sample(10, 100, 50), sample(12, 300, 100)])
    samples.engines = [{"place": 0, "state": "draining", "pid": 77, "model": "/models/tiny"}]
    record = {"alias": None, "tenant": "ann", "prompt_tokens": 9, "num_generated": 0, "arrival": 5.0, "age": 4.0}
    samples.requests = [
        record | {"request_id": "r-1", "num_generated": 30, "first_token": 6.0, "replicas": [[5.5, 0]]},
        record | {"request_id": "r-2", "first_token": None, "replicas": [[5.5, 1]]},
        *(record | {"request_id": f"r-{number}", "first_token": None, "replicas": []} for number in range(3, 18)),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(view_of(samples, "no answer from http://h"))
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[:2] == ["tiny at http://h", "no answer from http://h"]
    assert lines[3].startswith("tokens/s 100.0 █")
    assert "requests 3 running, 2 waiting, 0 queued before the engines" in lines[5]
    assert "KV cache 25% █████░░░░░░░░░░░░░░░ prefix cache hits 25%" in lines
    assert "0 draining 0 0 0% 100.0 0 77 tiny" in lines
    assert "1 down 0 0 0% 0.0 0" in lines
    assert "r-1 answers 9 30 10.0 4.0 s 0 ann" in lines
    assert "r-2 prompt 9 0 4.0 s 1 ann" in lines
    assert "r-3 queued 9 0 4.0 s ann" in lines
    assert lines[-1] == "and 2 more"


def test_what_is_no_server_or_no_terminal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("127.0.0.1:1", "--once"): "no answer from 127.0.0.1:1",
        ("127.0.0.1:1",): "add --once",
        ("--once", "--interval", "0"): "--interval must be between",
    }.items():
        assert main(["top", *arguments]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(PenstockError, match="not in Prometheus' format"):
        Sample.parse("<html>", 0.0)
