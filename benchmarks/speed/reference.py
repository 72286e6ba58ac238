"""CPU time a token with one thread, to compare the reference kernels with the native ones.

    python -m benchmarks.speed.reference MODEL                            (a folder, a GGUF file, or `demo`)
    PENSTOCK_ISA=reference python -m benchmarks.speed.reference MODEL

CPU time, as other processes on the machine disturb it little.
"""

import sys
import time

from penstock import LLM, SamplingParams

PROMPT = 4
"""Tokens of the prompts whose answers are timed."""


def seconds(llm: LLM, streams: int, prompt: int, answer: int) -> float:
    """CPU seconds for this many streams, with prompts and answers of these lengths in tokens."""
    params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    begin = time.process_time()
    llm.generate([[5 + stream] * prompt for stream in range(streams)], params)
    return time.process_time() - begin


def decode(llm: LLM, streams: int, tokens: int) -> float:
    """CPU milliseconds a token of this many streams."""
    return 1e3 * (seconds(llm, streams, PROMPT, tokens + 2) - seconds(llm, streams, PROMPT, 2)) / tokens / streams


def main(model: str) -> None:
    with LLM(
        None if model == "demo" else model,
        kv_cache_memory="512MiB",
        max_model_len=512,
        threads=1,
        enable_prefix_caching=False,
    ) as llm:
        print(llm.memory_plan)
        seconds(llm, 1, PROMPT, 2)
        print(f"decode, 1 stream   {decode(llm, 1, 16):8.2f} ms/token")
        print(f"decode, 8 streams  {decode(llm, 8, 8):8.2f} ms/token")
        print(f"prompt of 256      {1e3 * seconds(llm, 1, 256, 1) / 256:8.2f} ms/token")


if __name__ == "__main__":
    main(sys.argv[1])
