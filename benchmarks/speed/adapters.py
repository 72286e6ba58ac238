"""What adapters cost: decodes at batch 16, with 8 adapters of rank 16 on every linear map, and with none.

    python -m benchmarks.speed.adapters MODEL [--steps 60] [--rank 16] [--adapters 8]

Writes results/<machine>/adapters.json. Three engines of one process take turns, a decode step each: one that has no
room for adapters, one that holds them all and whose requests choose none, and one whose requests all have one. Each
step is compared with the first engine's beside it; the figures are the medians of these ratios. Greedy, at a context of
about 60 tokens. Bars: at most 25 % of the tokens a second with adapters; where no request has one, none (within 2 %).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import report
from penstock.api.request import Adapter
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.adapters.adaptable import Adaptable
from penstock.checkpoint.adapters.folder import read_adapter
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.models.registry import read_spec
from penstock.models.sizes import adaptable

BATCH = 16
COST_BAR, UNUSED_BAR = 25.0, 2.0


def write_adapter(folder: Path, model: Adaptable, rank: int, seed: int) -> Path:
    """An adapter with small random weights for every linear map, as PEFT writes it."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in model.matrices.items():
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = 0.02 * torch.randn(shape, generator=random)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Decoding:
    """An engine with a whole batch of sequences, one step after another."""

    def __init__(self, core: EngineCore, adapters: list[Adapter | None], steps: int) -> None:
        """Request i has adapter i, in turn."""
        self._core = core
        input_processor = InputProcessor(None, core.info)
        params = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True)
        for index in range(BATCH):
            adapter = adapters[index % len(adapters)]
            prompt = [index + 3] * 40
            core.add_request(
                input_processor.make_request(prompt, params, request_id=f"{index}", arrival=0.0, adapter=adapter)
            )
        while len(core.step()) < BATCH:  # adapters are loaded, prompts computed
            pass

    def step(self) -> float:
        """Its seconds."""
        start = time.perf_counter()
        outputs = self._core.step()
        assert len(outputs) == BATCH
        return time.perf_counter() - start


def engine(model: str, **options: Any) -> EngineCore:
    common: dict[str, Any] = {"kv_cache_memory": "256MiB", "max_num_seqs": BATCH, "max_model_len": 256}
    return build_engine(EngineConfig.from_options(model=model, **common, **options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of the engine")
    given = parser.parse_args()
    takes = adaptable(read_spec(open_checkpoint(given.model)), "float32")
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_adapter(Path(folder, f"a{seed}"), takes, given.rank, seed) for seed in range(given.adapters)]
        adapters = [read_adapter(path.name, str(path), takes).adapter for path in paths]
        listed = ",".join(f"{path.name}={path}" for path in paths)
        cores = [engine(given.model, threads=given.threads, adapter=some) for some in (None, listed, listed)]
        chosen: list[list[Adapter | None]] = [[None], [None], [*adapters]]
        decoding = [Decoding(core, some, given.steps) for core, some in zip(cores, chosen, strict=True)]
        times = [[run.step() for run in decoding] for _ in range(given.steps)][5:]
        for core in cores:
            core.close()
    idle, lost = (100 * (1 - 1 / statistics.median(step[place] / step[0] for step in times)) for place in (1, 2))
    what = f"{given.adapters} adapters of rank {given.rank}"
    rows: dict[str, tuple[float, float | None]] = {
        f"{Path(given.model).name}: a step at batch {BATCH} without adapters, ms": (
            1e3 * statistics.median(step[0] for step in times),
            None,
        ),
        f"tokens a second that {what} cost, %": (lost, COST_BAR),
        f"tokens a second that {what} cost where no request has one, %": (idle, UNUSED_BAR),
    }
    return report("adapters", rows)


if __name__ == "__main__":
    sys.exit(main())
