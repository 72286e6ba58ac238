"""What a step costs beside the model's arithmetic: scheduler, dispatch, sampling; and what waking up costs.

    python benchmarks/steps.py MODEL        (bars: 1.0 ms at batch 1, 2.5 ms at batch 64; writes results/steps.json)

MODEL is so small that its arithmetic hardly counts at batch 1 (`/work/shared/peers/make_model.py tiny` writes one); at
batch 64 it does count, and is in the figure. Greedy decodes at a context of about 100 tokens; the median of the steps.
A step after idling waits for a thread that sleeps, and for caches that others have used.
"""

import statistics
import sys
import time

from penstock.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.intake import Intake
from penstock.sampling_params import SamplingParams
from report import report

BARS = {1: 1.0, 64: 2.5}
IDLE_SECONDS, WAKE_BAR = 0.1, 6.0


def milliseconds(core: EngineCore, batch: int, steps: int = 120, idle: float = 0.0) -> float:
    """Median time of a decode step, each after `idle` seconds."""
    intake = Intake(None, core.info)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for index in range(batch):
        prompt = [index + 3] * 40
        core.add(intake.accept(prompt, params, request_id=f"{batch} {index}", arrival=0.0))
    times = []
    while core.has_work:
        time.sleep(idle)
        start = time.perf_counter()
        outputs = core.step()
        if len(outputs) == batch:
            times.append(time.perf_counter() - start)
    return statistics.median(times[5:]) * 1e3


def main(model: str) -> int:
    options = EngineConfig.from_options(model=model, kv_cache_memory="64MiB", max_num_seqs=64, max_model_len=1024)
    core = EngineCore(options)
    for batch in BARS:
        milliseconds(core, batch)  # warm
    rows = {f"a step at batch {batch}, ms": (milliseconds(core, batch), bar) for batch, bar in BARS.items()}
    rows["a step at batch 1 after idling, ms"] = (milliseconds(core, 1, 40, IDLE_SECONDS), WAKE_BAR)
    core.close()
    return report("steps", rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
