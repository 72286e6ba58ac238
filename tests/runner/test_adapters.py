"""The memory of loaded adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.checkpoint.adapters.folder import read_adapter
from penstock.models.sizes import adaptable
from penstock.runner.device_runner import DeviceRunner
from tests.support.adapters import CONFIG
from tests.support.checkpoints import write_random
from tests.support.families import LATENTS, SHAPE
from tests.support.stepping import settings_for

RANK, EXPERTS = 4, LATENTS["n_routed_experts"]
WIDTH, INNER = SHAPE["hidden_size"], LATENTS["moe_intermediate_size"]
HEADS = "model.layers.1.self_attn.kv_b_proj"
MIXTURE = "model.layers.1.mlp.experts"
KEYS_AND_VALUES = LATENTS["num_key_value_heads"] * (LATENTS["qk_nope_head_dim"] + LATENTS["v_head_dim"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "a", "b"),
    [
        (HEADS, (RANK, LATENTS["kv_lora_rank"]), (KEYS_AND_VALUES, RANK)),
        (MIXTURE, (RANK * EXPERTS, WIDTH), (2 * INNER, RANK * EXPERTS)),
        (MIXTURE, (RANK * EXPERTS, 2 * INNER), (WIDTH, RANK * EXPERTS)),
    ],
    ids=["heads", "gate and up of experts", "gate and up of experts, swapped"],
)
def test_a_loaded_adapter_takes_the_elements_of_its_file(
    module: str, a: tuple[int, int], b: tuple[int, int], tmp_path: Path
) -> None:
    write_random(tmp_path / "model", "DeepseekV3", **SHAPE | LATENTS, n_group=2, topk_group=1, first_k_dense_replace=1)
    folder = tmp_path / "adapter"
    folder.mkdir()
    parameters = {"target_modules": [HEADS], "target_parameters": ["1.mlp.experts.gate_up_proj"]}
    wanted = {"target_modules" if module == HEADS else "target_parameters"}
    config = CONFIG | {"r": RANK, "lora_alpha": 8} | {name: parameters[name] for name in wanted}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"base_model.model.{module}.lora_{part}.weight": shape for part, shape in (("A", a), ("B", b))}
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in tensors.items()}, folder / "adapter_model.safetensors"
    )
    runner = DeviceRunner(*settings_for(tmp_path / "model", adapter_memory="1MiB", dtype="float32"))
    adapter = read_adapter("a", str(folder), adaptable(runner._model.spec, "float32")).adapter
    runner.load_adapter(adapter)
    assert runner._adapters is not None
    maps = [one for _, of_table in runner._adapters._ready[adapter.digest] for one in of_table]
    held = {id(part): int(np.prod(part.shape)) for lora_map in maps for part in (lora_map.a, lora_map.b)}
    assert len(maps) > 2
    assert sum(held.values()) == adapter.num_elements == sum(int(np.prod(shape)) for shape in tensors.values())
