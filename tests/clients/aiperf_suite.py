"""AIPerf: each kind of endpoint that this server has, streamed; no request errs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import KEY, MODEL, URL

AIPERF = Path(sys.executable).with_name("aiperf")
REQUESTS = 64


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages", "huggingface-generate"])
def test_profile(tmp_path, kind):
    command = [
        *(str(AIPERF), "profile", "--model", MODEL, "--url", URL, "--api-key", KEY),
        *("--endpoint-type", kind, "--streaming", "--tokenizer", os.environ["PENSTOCK_TOKENIZER"]),
        *("--concurrency", "16", "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "24"),
        *(("--extra-inputs", "ignore_eos:true") if kind in ("chat", "completions") else ()),  # no empty answers
        *("--ui", "none", "--artifact-dir", str(tmp_path)),
    ]
    subprocess.run(command, check=True, timeout=300)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
