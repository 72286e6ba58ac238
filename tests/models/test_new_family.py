"""A new family takes one file: here it is, with an operation that no native kernel has, and it answers the same day.

Beside the file a family needs its line in `registry.ARCHITECTURES`, which the fixture stands for.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.models import registry
from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HFConfig
from penstock.models.llama import llama_config
from tests.checkpoints import write_tiny_llama
from tests.kernels.versions import needs_native
from tests.stepping import Stepper

# ── the family's file: down(relu(up(x)) ** 2) in place of the gated MLP. It imports no torch. ────────────────────────

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.layers.linear import Linear
    from penstock.models.model import FeedForward, Model
    from penstock.quantization.base import WeightFactory


class SquaredReluMLP:
    def __init__(self, up: "Linear", down: "Linear") -> None:
        self._up, self._down = up, down

    def __call__(self, x: "Tensor") -> "Tensor":
        return self._down(self._up(x).relu().square())


def toy_config(config: HFConfig) -> DecoderConfig:
    return replace(llama_config(config), build=build_toy)


def build_toy(config: DecoderConfig, max_positions: int, factory: "WeightFactory") -> "Model":
    from penstock.layers.linear import Linear
    from penstock.models.decoder import Decoder

    def new_mlp(config: DecoderConfig, factory: "WeightFactory") -> "FeedForward":
        hidden, inner = config.hidden_size, config.intermediate_size
        return SquaredReluMLP(
            Linear(("mlp.up_proj",), hidden, (inner,), factory, bias=False),
            Linear(("mlp.down_proj",), inner, (hidden,), factory, bias=False),
        )

    return Decoder(config, max_positions, factory, new_mlp)


# ── its tests ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the family, which is registered."""
    monkeypatch.setitem(registry.ARCHITECTURES, "ToyForCausalLM", toy_config)
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ToyForCausalLM"]}))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if "gate_proj" not in name}, folder / "model.safetensors"
    )
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
def test_the_log_says_once_that_it_is_not_recorded_and_why(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.runner.recorded"), LLM(str(toy), kv_cache_memory="2MiB"):
        pass
    assert [record.getMessage() for record in caplog.records if record.name == "penstock.runner.recorded"] == [
        "this model is run call by call, as there is no native kernel for relu"
    ]
