"""Does vLLM read what `penstock quantize` wrote? Its first tokens and their log-probabilities beside Penstock's.

    python -m benchmarks.quality.vllm_reads CHECKPOINT

CHECKPOINT is quantized by the recipe w4a16 (vLLM has no CPU kernels for 8-bit weights in groups). vLLM's CPU build must
be set up by `../shared/peers/setup.sh vllm`. Both generate greedily in bfloat16; they round activations differently, so
near ties may differ. Exits with 1 if a common token's log-probability is off by more than 0.2.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock import LLM, SamplingParams

VLLM = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/penstock-peers")) / "vllm" / "bin" / "python"
PROMPTS = [[7, 99, 1234, 55, 2000 + index] for index in range(8)]
CODE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=8)
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1), use_tqdm=False)
    first = [output.outputs[0].logprobs[0] for output in outputs]
    print("RESULT", json.dumps([(token, entry.logprob) for entries in first for token, entry in entries.items()]))
"""
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
MOST_APART = 0.2


def of_vllm(model: str) -> list[tuple[int, float]]:
    """Of each prompt the next token and its log-probability."""
    command = [str(VLLM), "-c", CODE, model, json.dumps(PROMPTS)]
    done = subprocess.run(command, env={**os.environ, **QUIET}, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return [(token, logprob) for token, logprob in json.loads(line.removeprefix("RESULT "))]


def of_penstock(model: str) -> list[tuple[int, float]]:
    with LLM(model, dtype="bfloat16", max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))
    return [(entry.token_id, entry.logprob) for output in outputs for entry in output.outputs[0].logprobs or ()]


def main() -> int:
    theirs, ours = of_vllm(sys.argv[1]), of_penstock(sys.argv[1])
    common = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[0] == b[0]]
    apart = max((abs(a[1] - b[1]) for a, b in common), default=0.0)
    print(
        f"{len(common)} of {len(PROMPTS)} first tokens are equal; their log-probabilities differ by at most {apart:.3f}"
    )
    return int(len(common) <= len(PROMPTS) // 2 or apart > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
