"""Calls of the Python API that the gate's mypy checks: it takes the first three, and finds the mistake in each other.

A mistake that it no longer finds leaves an unused `type: ignore`, which is an error.
"""

from penstock import LLM, AsyncLLM, SamplingParams


def right() -> None:
    llm = LLM("folder", max_num_seqs=8, dtype="bfloat16", kv_cache_memory="8GiB", seed=None)
    AsyncLLM("folder", threads=2)
    text: str = llm.generate(["hello"], SamplingParams(max_tokens=3), progress=True)[0].outputs[0].text
    print(text)


def wrong() -> None:
    LLM("folder", max_num_sequences=8)  # type: ignore[call-arg]
    LLM("folder", dtype="float64")  # type: ignore[arg-type]
    LLM("folder", threads="many")  # type: ignore[arg-type]
    AsyncLLM("folder", maximum=8)  # type: ignore[call-arg]
    LLM("folder").generate("hello", temperature=0.5)  # type: ignore[call-arg]
