"""A model on another device than the host's: no operation of its forward pass mixes the two.

The device is torch's `meta`, which every machine has: it computes shapes and no numbers. What the check says of it
holds for a GPU, as nothing asks which device it is, but only whether it is the CPU.
"""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.core.plan import SampleBatch, StepPlan
from penstock.models.decoder import Decoder
from penstock.models.registry import read_config
from penstock.quantization.base import Storage
from penstock.quantization.methods import make_method
from penstock.runner.inputs import build_inputs
from penstock.runner.kv_cache import KVCache
from tests.checkpoints import write_random
from tests.stepping import settings_for

META = torch.device("meta")
TRANSFERS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OneDevice(TorchDispatchMode):
    """Fails at an operation, other than a transfer, whose tensors lie on several devices; counts those on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        assert func in TRANSFERS or len(devices) <= 1, f"{func} mixes {devices}"
        self.count += "meta" in devices
        return func(*args, **(kwargs or {}))


def test_the_check_notices_a_mixture() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="mixes"):
        torch.empty(2, device=META).index_select(0, torch.tensor([0]))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["Qwen3", "Granite", "Mistral"])
def test_a_step_never_mixes_devices(tmp_path: Path, family: str, kv_cache_dtype: str, quantization: str | None) -> None:
    shape = {
        "vocab_size": 160,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    windowed = {"sliding_window": 5} if family == "Mistral" else {}
    write_random(tmp_path, family, **(shape | windowed))
    checkpoint, settings = settings_for(tmp_path, kv_cache_dtype=kv_cache_dtype, quantization=quantization)
    settings = replace(settings, device="meta")
    config = read_config(checkpoint)
    plan = StepPlan(
        query_lens=[3, 1, 1],
        starts=[0, 5, 9],
        token_ids=array("i", [1, 2, 3, 4, 5]),
        block_tables=[array("i", [0]), array("i", [1, 2]), array("i", [3, 4, 5])],
        block_copies=[(1, 2)],
        samples=SampleBatch(rows=[2, 4]),
    )
    with torch.inference_mode():
        method = make_method(settings.weight_kind, config.quantization)
        model = Decoder(config, settings.max_model_len, Storage(method, torch.bfloat16, META))
        cache = KVCache(config, settings)
        with OneDevice() as seen:
            cache.copy(plan.block_copies)
            inputs = build_inputs(plan, cache.block_size, 64, META, packed=cache.packed)
            logits = model.forward(inputs.token_ids, inputs.positions, inputs.batch, cache.layers, inputs.sampled_rows)
    assert logits.device == META
    assert logits.shape == (2, 160)
    assert seen.count > 50
