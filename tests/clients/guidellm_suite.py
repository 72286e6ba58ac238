"""guidellm: its profiles run to the end, and no request errs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from common import KEY, URL

GUIDELLM = Path(sys.executable).with_name("guidellm")
STREAMS = 512


def benchmarks(folder, profile, seconds):
    """Run a profile; of each of its benchmarks, how its requests ended."""
    report = folder / "report.json"
    command = [
        str(GUIDELLM),
        "run",
        *("--backend", f"kind=openai_http,target={URL},api_key={KEY}"),
        *("--profile", profile),
        *("--constraint", f"kind=max_duration,seconds={seconds}"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['PENSTOCK_TOKENIZER']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
    ]
    subprocess.run(command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    return [benchmark["metrics"]["request_totals"] for benchmark in json.loads(report.read_text())["benchmarks"]]


def test_sweep(tmp_path):
    ended = benchmarks(tmp_path, "kind=sweep,sweep_size=4,max_concurrency=64", 10)
    assert len(ended) == 4
    assert all(one["successful"] > 0 and one["errored"] == 0 for one in ended), ended


def test_throughput(tmp_path):
    (ended,) = benchmarks(tmp_path, f"kind=throughput,max_concurrency={STREAMS}", 60)
    assert ended["successful"] > 0
    assert ended["errored"] == 0, ended
