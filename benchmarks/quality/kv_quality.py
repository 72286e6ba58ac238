"""What an int8 KV cache costs at long contexts: perplexity beside a cache of bfloat16, by the same weights.

    python -m benchmarks.quality.kv_quality MODEL [--lengths 4096 8192] [--windows 4] [--options "" quantization=int8]

The text is Python's own documentation (`pydoc_data.topics`, which comes with the interpreter), cut into windows of so
many tokens, each a prompt of its own. Rows go to results/<machine>/kv-quality.json.
"""

import argparse
import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from statistics import stdev
from typing import Any

from tokenizers import Tokenizer

from benchmarks.report import results_file, save
from penstock import LLM, SamplingParams


def windows(tokenizer: Path, length: int, count: int) -> list[list[int]]:
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    assert len(ids) >= length * count, f"the text has {len(ids)} tokens"
    return [ids[first : first + length] for first in range(0, length * count, length)]


def predictions(model: Path, prompts: list[list[int]], options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The log-probability of each token, and the likeliest ids."""
    context = max(map(len, prompts))
    with LLM(str(model), max_model_len=context, max_num_seqs=1, max_num_batched_tokens=1024, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate([prompt[:-1] for prompt in prompts], params)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry is not None]
    return [entry.logprob for entry in entries], [entry.top[0][0] for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--options", nargs="*", default=["", "quantization=int8", "quantization=int4"])
    args = parser.parse_args()
    file = results_file("kv-quality")
    rows = json.loads(file.read_text()) if file.exists() else {}
    for length in args.lengths:
        prompts = windows(args.model / "tokenizer.json", length, args.windows)
        for option in args.options:
            given = dict(pair.split("=") for pair in option.split(",") if pair)
            exact, likeliest = predictions(args.model, prompts, given | {"kv_cache_dtype": "bfloat16"})
            ours, chosen = predictions(args.model, prompts, given | {"kv_cache_dtype": "int8"})
            perplexity, with_int8 = (math.exp(-sum(values) / len(values)) for values in (exact, ours))
            differences = [a - b for a, b in zip(exact, ours, strict=True)]
            same = sum(a == b for a, b in zip(chosen, likeliest, strict=True)) / len(likeliest)
            row = {
                "perplexity": round(perplexity, 4),
                "with int8 cache": round(with_int8, 4),
                "moved %": round(100 * (with_int8 / perplexity - 1), 3),
                "standard error %": round(100 * stdev(differences) / math.sqrt(len(differences)), 3),
                "same token %": round(100 * same, 2),
                "tokens": len(exact),
            }
            rows[f"{length} {option or 'as stored'}"] = row
            print(f"{length:6} {option or 'as stored':24}", row, flush=True)
            save("kv-quality", rows)


if __name__ == "__main__":
    main()
