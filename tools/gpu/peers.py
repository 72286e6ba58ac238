"""Section 4: what others reach with the same random 8B model on the same machine."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.gpu.parts import Facts, Place, UnavailableError
from tools.gpu.prepare import install
from tools.gpu.shapes import ANSWER, PROMPT, batches_for, decode_row, shape_for
from tools.gpu.timing import attempted


def need(place: Place, peer: str) -> None:
    """Make a peer importable: installed, or from its wheels."""
    if find_spec(peer) is not None:
        return
    if place.wheels is None or not (place.wheels / f"peer-{peer}").is_dir():
        raise UnavailableError(
            f"{peer} is not installed, and its wheels were not downloaded: --prepare FOLDER --peers {peer}"
        )
    site = tempfile.mkdtemp(prefix=f"gpu-day-{peer}-")
    outcome = install(place.wheels / f"peer-{peer}", Path(site))
    if outcome["status"] != "ok":
        raise UnavailableError(outcome["reason"])
    sys.path.insert(0, site)


def timed(generate: Callable[[int], object], batch: int, shape: dict[str, Any]) -> dict[str, Any]:
    """A step's time: an answer of ANSWER tokens takes so much longer than one of a single token.

    Args:
        generate: (num_tokens) generates, and waits for the tokens.
    """
    generate(2)
    seconds = {}
    for num_tokens in (1, ANSWER):
        start = time.perf_counter()
        generate(num_tokens)
        seconds[num_tokens] = time.perf_counter() - start
    step = max(seconds[ANSWER] - seconds[1], 1e-9) / (ANSWER - 1)
    return {**decode_row(shape, batch, step), "prompt tokens/s": batch * PROMPT / seconds[1]}


def prompts_of(batch: int) -> list[list[int]]:
    return [[(index + place) % 300 for place in range(PROMPT)] for index in range(batch)]


def transformers(place: Place) -> Iterator[Facts]:
    need(place, "transformers")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers import __version__ as version

    shape, rows = shape_for(is_gpu=place.is_gpu), []
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(place.device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    yield {"version": version, "attention": model.config._attn_implementation}
    for batch in batches_for(is_gpu=place.is_gpu):
        ids = torch.tensor(prompts_of(batch), device=place.device)

        def generate(num_tokens: int, ids: torch.Tensor = ids) -> list[Any]:
            with torch.inference_mode():
                lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
                made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
            return list(made.tolist())

        rows.append(attempted({"sequences": batch}, partial(timed, generate, batch, shape)))
        yield {f"steps after prompts of {PROMPT} tokens": rows}


def vllm(place: Place) -> Iterator[Facts]:
    need(place, "vllm")
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    shape, rows = shape_for(is_gpu=True), []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        began = time.perf_counter()
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
        )
        yield {"version": version, "engine built in s": time.perf_counter() - began}
        for batch in batches_for(is_gpu=True):

            def generate(num_tokens: int, batch: int = batch) -> object:
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
                prompts = [{"prompt_token_ids": ids} for ids in prompts_of(batch)]
                return engine.generate(prompts, params, use_tqdm=False)

            rows.append(attempted({"sequences": batch}, partial(timed, generate, batch, shape)))
            yield {f"steps after prompts of {PROMPT} tokens": rows}
