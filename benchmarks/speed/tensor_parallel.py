"""Two ranks of one thread against one process of two threads, on the same cores.

    python -m benchmarks.speed.tensor_parallel [MODEL] [--ranks 2] [--rounds 5] [--batches 1 16] [--options
        quantization=int8]

MODEL: a folder; without it the built-in one. Greedy decodes at a context of about 100 tokens, and prompts of 512:
both engines are loaded, and run in turn; medians of rates, and of ratios by rounds. Answers are
compared, too. Bar: the ranks reach at least 0.9 of the single process at decoding, in each batch.

Writes results/<machine>/tensor_parallel.json. On a machine that others use, ranks wait for each other as threads do.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.report import save
from penstock import native
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor

BAR = 0.9
PROMPT, NUM_TOKENS = 512, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--options", nargs="*", default=[])
    args = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in args.options)
    single, divided = (
        build_engine(
            EngineConfig.from_options(
                model=args.model,
                tensor_parallel_size=size,
                threads=args.ranks,
                kv_cache_memory="512MiB",
                max_model_len=1024,
                enable_prefix_caching=False,
                **options,
            )
        )
        for size in (1, args.ranks)
    )
    try:
        rows = {f"decode at batch {batch}": _compare(single, divided, args.rounds, batch) for batch in args.batches}
        rows[f"a prompt of {PROMPT} tokens"] = _compare(single, divided, args.rounds, None)
    finally:
        divided.close()
        single.close()
    for name, (alone, ranks, ratio) in rows.items():
        print(f"{name:26} {alone:8.1f} tokens/s alone, {ranks:8.1f} with {args.ranks} ranks: {ratio:.2f}")
    found = {name: dict(zip(("alone", "ranks", "ratio"), row, strict=True)) for name, row in rows.items()}
    save("tensor_parallel", {"model": args.model or "demo", "options": args.options, "bar": BAR, **found})
    return int(any(row[2] < BAR for name, row in rows.items() if name.startswith("decode")))


def _compare(single: EngineCore, divided: EngineCore, rounds: int, batch: int | None) -> tuple[float, float, float]:
    """Median rates of the one and of the other, and the median of their ratios."""
    measure: Callable[[EngineCore], tuple[float, list[int]]] = _prompt if batch is None else lambda c: _decode(c, batch)

    def rate(core: EngineCore) -> tuple[float, list[int]]:
        native.set_num_threads(core.settings.threads)  # of the process, in which are the one and the other's first rank
        return measure(core)

    for core in (single, divided):
        rate(core)  # warm
    found = []
    for place in range(rounds):
        order = (single, divided) if place % 2 else (divided, single)
        rates = {id(core): rate(core) for core in order}
        (alone, wanted), (ranks, given) = rates[id(single)], rates[id(divided)]
        assert given == wanted, "the ranks' answers are others"
        found.append((alone, ranks, ranks / alone))
    alone, ranks, ratio = (statistics.median(column) for column in zip(*found, strict=True))
    return alone, ranks, ratio


def _decode(core: EngineCore, batch: int) -> tuple[float, list[int]]:
    """Tokens a second, by the median step; and the tokens."""
    _add(core, batch, 40, NUM_TOKENS)
    times, tokens = [], []
    while core.has_work:
        start = time.perf_counter()
        outputs = core.step()
        if len(outputs) == batch:
            times.append(time.perf_counter() - start)
        tokens += [token for output in outputs for token in output.token_ids]
    return batch / statistics.median(times[3:]), tokens


def _prompt(core: EngineCore) -> tuple[float, list[int]]:
    """Tokens a second of a prompt alone; and the first token of its answer."""
    _add(core, 1, PROMPT, 1)
    start, tokens = time.perf_counter(), []
    while core.has_work:
        tokens += [token for output in core.step() for token in output.token_ids]
    return PROMPT / (time.perf_counter() - start), tokens


def _add(core: EngineCore, count: int, prompt: int, num_tokens: int) -> None:
    processor = InputProcessor(None, core.info)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(count):
        ids = [(index + 3 * place) % 90 + 3 for place in range(prompt)]
        core.add_request(processor.make_request(ids, params, request_id=f"{index}", arrival=0.0))


if __name__ == "__main__":
    sys.exit(main())
