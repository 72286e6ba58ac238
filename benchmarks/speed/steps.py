"""What a step costs beside the model's arithmetic: scheduler, dispatch, sampling; and what waking up costs.

    python -m benchmarks.speed.steps MODEL        (bars: 1.0 ms at batch 1, 2.5 ms at batch 64)

Writes results/<machine>/steps.json.

MODEL is a small one (`/work/shared/peers/make_model.py tiny` writes it), whose arithmetic hardly counts at batch 1, and
at batch 64 is most of the step. The fixed cost is the step but for the time within native kernels: all Python and
dispatch. Greedy decodes at a context of about 100 tokens; medians over the steps. A step after idling waits for a
thread that sleeps, and for caches that others have used.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.report import report
from penstock import native
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor

BARS = {1: 1.0, 64: 2.5}
IDLE_SECONDS, WAKE_BAR = 0.1, 6.0


def clock_kernels() -> Callable[[], float]:
    """Time the calls of the native library from now on; returns what tells their seconds so far."""
    seconds = 0.0
    find = native.Library.function

    def function(library: native.Library, name: str, arguments: str, restype: Any = None) -> Callable[..., Any]:
        call = find(library, name, arguments, restype)

        def timed(*arguments: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            result = call(*arguments)
            seconds += time.perf_counter() - start
            return result

        return timed

    mock.patch.object(native.Library, "function", function).start()
    return lambda: seconds


def milliseconds(
    core: EngineCore, kernels: Callable[[], float], batch: int, steps: int = 120, idle: float = 0.0
) -> tuple[float, float]:
    """Median times of a decode step, each after `idle` seconds: the whole, and what is not within kernels."""
    input_processor = InputProcessor(None, core.info)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for index in range(batch):
        prompt = [index + 3] * 40
        core.add_request(input_processor.make_request(prompt, params, request_id=f"{batch} {index}", arrival=0.0))
    times, fixed = [], []
    while core.has_work:
        time.sleep(idle)
        before, start = kernels(), time.perf_counter()
        outputs = core.step()
        if len(outputs) == batch:
            times.append(time.perf_counter() - start)
            fixed.append(times[-1] - (kernels() - before))
    return statistics.median(times[5:]) * 1e3, statistics.median(fixed[5:]) * 1e3


def main(model: str) -> int:
    kernels = clock_kernels()
    options = EngineConfig.from_options(model=model, kv_cache_memory="64MiB", max_num_seqs=64, max_model_len=1024)
    core = build_engine(options)
    rows: dict[str, tuple[float, float | None]] = {}
    for batch, bar in BARS.items():
        milliseconds(core, kernels, batch)  # warm
        whole, fixed = milliseconds(core, kernels, batch)
        rows[f"the fixed cost of a step at batch {batch}, ms"] = fixed, bar
        rows[f"a step at batch {batch}, ms"] = whole, None
    rows["a step at batch 1 after idling, ms"] = milliseconds(core, kernels, 1, 40, IDLE_SECONDS)[0], WAKE_BAR
    core.close()
    return report("steps", rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
