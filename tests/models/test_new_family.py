"""A new family takes one file: here it is, with an operation that no native kernel has, and it answers the same day.

Beside the file a family needs its line in `architectures.py`, which the fixture stands for.
"""

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.config.model_facts import ActivationSizes
from penstock.engine.build import build_engine
from penstock.kernels.tables import make_ops
from penstock.layers.linear import Linear
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import FeedForward
from penstock.models import registry
from penstock.models.families.llama import llama_parts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec
from penstock.runner.fingerprint import arithmetic
from penstock.runner.forward import KVCache
from tests.support.checkpoints import write_tiny_llama
from tests.support.needs import needs_native
from tests.support.stepping import Stepper, kept, settings_for

# ── the family's file ────────────────────────────────────────────────────────────────────────────────────────────────
#
# down(relu(up(x)) ** 2) in place of the gated MLP; the first layer has heads of another size and positions of its
# own, the second is a feed-forward part alone, the third only attends. Neither imports torch.

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class SquaredReluSpec:
    hidden_size: int
    intermediate_size: int

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(self.intermediate_size, self.intermediate_size, self.intermediate_size)

    @property
    def tp_divisor(self) -> int:
        return 1

    def shard(self, tp_size: int) -> "SquaredReluSpec":
        return self

    def build(self, factory: "WeightFactory") -> FeedForward:
        return SquaredReluMLP(self, factory)


class SquaredReluMLP:
    def __init__(self, spec: SquaredReluSpec, factory: "WeightFactory") -> None:
        self._up = Linear(("mlp.up_proj",), spec.hidden_size, (spec.intermediate_size,), factory, bias=False)
        self._down = Linear(("mlp.down_proj",), spec.intermediate_size, (spec.hidden_size,), factory, bias=False)

    def __call__(self, x: "Tensor", adapters: object = None) -> "Tensor":
        return self._down(self._up(x).relu().square())


def toy_spec(config: HFConfig) -> ModelSpec:
    dense = llama_parts(config)
    mlp = SquaredReluSpec(dense.mlp.hidden_size, dense.mlp.intermediate_size)
    wide = replace(dense.attention, num_heads=2, num_kv_heads=1, head_dim=32, rope=RopeConfig(dim=32, theta=500.0))
    narrow = replace(dense.attention, num_kv_heads=1)
    first, second, third = (dense.layer(index, mixer, mlp) for index, mixer in enumerate((wide, wide, narrow)))
    return replace(dense.model, layers=(first, replace(second, mixer=None), replace(third, feed_forward=None)))


# ── its tests ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the family, which is registered."""
    monkeypatch.setitem(registry.ARCHITECTURES, "ToyForCausalLM", toy_spec)
    folder = write_tiny_llama(tmp_path, num_hidden_layers=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ToyForCausalLM"]}))
    weights = load_file(folder / "model.safetensors")
    absent = re.compile(r".*(gate_proj|layers\.1\.(self_attn|input_)|layers\.2\.(mlp|post_)).*")
    present = {name: tensor for name, tensor in weights.items() if not absent.match(name)}
    for name in ("k_proj", "v_proj"):
        present[f"model.layers.2.self_attn.{name}.weight"] = present[f"model.layers.2.self_attn.{name}.weight"][:16]
    save_file(present, folder / "model.safetensors")
    return folder


def test_it_generates_what_its_model_computes_token_by_token(toy: Path) -> None:
    prompt = [5, 17, 300, 42, 8]
    expected = list(prompt)
    for _ in range(6):
        expected.append(int(Stepper(toy, 1).step({0: expected})[0][-1].argmax()))
    with LLM(str(toy), kv_cache_memory="2MiB", threads=1) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert output.outputs[0].token_ids == expected[len(prompt) :]


@needs_native
def test_memory_is_planned_for_the_reference_which_computes_it(toy: Path) -> None:
    config = EngineConfig.from_options(model=str(toy), quantization="int4", kv_cache_memory="2MiB", threads=1)
    machine = Machine("cpu", cores=1, memory=2**30, native=True)
    native, reference = (build_engine(config, machine=one) for one in (machine, replace(machine, native=False)))
    assert native.info.memory_plan == reference.info.memory_plan
    checkpoint, settings = settings_for(toy)
    assert arithmetic(checkpoint, settings) != arithmetic(checkpoint, replace(settings, gap="relu"))


def test_layers_of_one_group_keep_what_each_of_them_needs(toy: Path) -> None:
    checkpoint, settings = settings_for(toy, kv_cache_memory=10 * (32 + 16) * 2 * 4 * 4)
    assert settings.memory.num_blocks == 10
    assert [group.layers for group in settings.memory.groups] == [(0, 2)]
    cache = KVCache.of_model(registry.read_spec(checkpoint), settings, make_ops("cpu"))
    assert sum(layer.nbytes for layer in kept(cache)) == settings.memory.kv_cache
    assert cache.layers[1] is None


@pytest.mark.parametrize("block_size", [4, 5], ids=["native layout", "the reference's layout"])
def test_logits_do_not_depend_on_how_a_text_is_cut(toy: Path, block_size: int) -> None:
    text = [(7 * place) % 300 for place in range(40)]
    (whole,) = Stepper(toy, 1, block_size=block_size).step({0: text}).values()
    stepper = Stepper(toy, 1, block_size=block_size)
    pieces = [stepper.step({0: text[first:last]})[0] for first, last in ((0, 17), (17, 18), (18, 37), (37, 40))]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=0)


@needs_native
def test_the_log_says_once_that_the_reference_computes_it_and_why(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.kernels.tables"), LLM(str(toy), kv_cache_memory="2MiB"):
        pass
    assert [record.getMessage() for record in caplog.records if record.name == "penstock.kernels.tables"] == [
        "reference kernels, which are slower: there is no native kernel for relu"
    ]
