"""`penstock simulate`, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.simulate import parse_list
from penstock.errors import ConfigError
from penstock.simulator.cost_file import CostFile
from tests.simulator.fleets import COSTS, make_settings

CHATS = ["--chats-per-second", "1", "--seconds", "10"]


@pytest.fixture
def costs(tmp_path: Path) -> list[str]:
    path = tmp_path / "costs.json"
    CostFile(COSTS, make_settings(), 0.02, 100).write(path)
    return ["--costs", str(path)]


def test_a_simulation_loads_no_torch(costs: list[str]) -> None:
    code = f"import sys; from penstock.cli import main; code = main({['simulate', *costs, *CHATS]!r}); "
    run = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(code + 3 * ('torch' in sys.modules))"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "1 chats a second for 10 s" in run.stdout
    assert "ttft p90" in run.stdout


def test_a_plot_without_matplotlib_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", "--plot", str(tmp_path / "x.svg"), "--costs", "/nowhere"]) == 2
    assert "pip install '.[plots]'" in capsys.readouterr().err


def test_a_sweep_names_the_fewest_engines(costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["--engines", "1-2,4", "--router", "prefix,round-robin", "--max-num-batched-tokens", "64,256"]
    told = ["--objective", "p90 ttft <= 60s", "--price", "2", "--json", str(tmp_path / "out.json")]
    assert main(["simulate", *costs, *CHATS, *lists, *told, "--fail", "3:1"]) == 0
    printed = capsys.readouterr()
    assert "p90 ttft <= 60s: 1 engine with the" in printed.out
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["simulations"]) == 12
    assert content["simulations"][content["best"]]["engines"] == 1
    assert all(simulation["cost"] > 0 for simulation in content["simulations"])


def test_an_objective_that_nothing_meets_is_an_exit_code(costs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *costs, *CHATS, "--objective", "p50 ttft <= 0.001ms"]) == 1
    assert "no fleet meets p50 ttft <= 1e-06s" in capsys.readouterr().out


def test_a_trace_is_replayed_and_json_goes_to_standard_output(
    costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 1000 * second, "input_length": 600, "output_length": 4, "hash_ids": [1, 10 + second]}
        for second in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["simulate", str(trace), *costs, "--speed", "2", "--requests", "5", "--json", "-"]) == 0
    printed = capsys.readouterr()
    (simulation,) = json.loads(printed.out)["simulations"]
    assert simulation["answered"] == 5
    assert simulation["hit_rate"] == pytest.approx(4 * 512 / (5 * 600))
    assert "5 requests of trace.jsonl" in printed.err


def test_hardware_needs_no_more_of_a_model_than_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    others = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    known = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **others, **known, "rope_theta": 500000.0}))
    told = {}
    for name in ("h100-sxm", "l4"):
        hardware = ["--hardware", name, "--model", str(tmp_path), "--max-num-batched-tokens", "2048"]
        assert main(["simulate", *hardware, *CHATS, "--json", "-"]) == 0
        (told[name],) = json.loads(capsys.readouterr().out)["simulations"]
    assert 0.005 < told["h100-sxm"]["itl"]["p50"] < 0.012  # 16 GB at 80 % of 3.35 TB/s
    assert told["l4"]["itl"]["p50"] > 5 * told["h100-sxm"]["itl"]["p50"]
    assert main(["simulate", "--hardware", "list"]) == 0
    assert "3,350 GB/s" in capsys.readouterr().out


def test_a_calibration_writes_a_file_that_is_simulated_with(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "tiny.json")
    engine = ["--kv-cache-memory", "8MiB", "--threads", "1", "--max-num-seqs", "4"]
    seconds = ["--calibrate-seconds", "0.5"]
    assert main(["simulate", "--calibrate", str(tiny_llama), "--costs", path, *seconds, *engine]) == 0
    assert "median error" in capsys.readouterr().out
    assert main(["simulate", "--costs", path, *CHATS, "--system-tokens", "20"]) == 0
    assert " 4 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the costs of steps"),
        (["--hardware", "abacus", "--model", "x"], "unknown hardware 'abacus'"),
        (["--hardware", "l4"], "--hardware needs --model"),
        (["--calibrate", "demo"], "--costs"),
        (["COSTS", "--policy", "fcfs"], "leave out policy"),
        (["COSTS", "--engines", "0"], "engines"),
        (["COSTS", "--engines", "two"], "engines must be numbers"),
        (["COSTS", "--router", "best"], "router must be one of"),
        (["COSTS", "--fail", "soon"], "SECONDS:ENGINE"),
        (["COSTS", "--fail", "1:7"], "no engine 7"),
        (["COSTS", "--objective", "fast"], "objective"),
        (["COSTS", "--turns", "0"], "turns"),
        *(
            (["COSTS", f"--{name}", value], f"{name.replace('-', '_')} must be")
            for name in (
                "seconds",
                "burstiness",
                "chats-per-second",
                "think-seconds",
                "turns",
                "spread",
                "price",
                "restart-seconds",
                "calibrate-seconds",
            )
            for value in ("nan", "inf")
        ),
        (["COSTS", "--burstiness", "1e6"], "burstiness must be at most 100"),
        (["COSTS", "--question-tokens", str(10**400)], "question_tokens must be at most 1,000,000,000"),
        (["COSTS", "--system-tokens", "9000"], "system_tokens (9000) leaves no room for a question in max_context"),
        (["COSTS", "--fail", f"{10**400}:0"], "SECONDS:ENGINE"),
        (["COSTS", "--speed", "2"], "speed is for a trace, and there is none"),
        (["COSTS", "--requests", "2"], "requests is for a trace, and there is none"),
        (["COSTS", "--devices", "2"], "devices has no effect without --hardware"),
        (["COSTS", "none.jsonl", "--speed", "inf"], "speed must be a finite number above 0"),
        (["COSTS", "none.jsonl", "--speed", "nan"], "speed must be a finite number above 0"),
        (["COSTS", "--jobs", "0"], "jobs must be at least 1, not 0"),
        (["COSTS", "--price", "-1"], "price must be at least 0, not -1"),
        (["COSTS", "--restart-seconds", "-1"], "restart_seconds must be at least 0, not -1"),
        (["COSTS", "--requests", "0"], "requests must be at least 1, not 0"),
        (["COSTS", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--calibrate", "demo", "--costs", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--calibrate", "demo", "--costs", "x.json", "--calibrate-seconds", "0"], "calibrate_seconds must be above 0"),
        (["COSTS", "--max-queued", "-1"], "max_queued"),
        (["COSTS", "none.jsonl"], "cannot be read"),
        (["COSTS", "none.jsonl", "--turns", "3"], "leave out turns"),
    ],
)
def test_mistakes_are_told(
    costs: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for argument in arguments for part in (costs if argument == "COSTS" else [argument])]
    assert main(["simulate", *given]) == 2
    assert message in capsys.readouterr().err


def test_lists_hold_numbers_and_ranges() -> None:
    assert parse_list("engines", "1,3-5, 9") == [1, 3, 4, 5, 9]
    assert parse_list("engines", None) == []
    for text in ("", "1,,2", "5-3", "0", "1-", "-2"):
        with pytest.raises(ConfigError, match="engines"):
            parse_list("engines", text)
