"""The tables of positions are computed page by page, as steps need them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.tables import make_ops
from penstock.layers.attention import AttentionSpec
from penstock.layers.rope import RopeConfig
from penstock.layers.rotary import PAGE, Rotary
from penstock.layers.spec import NormSpec
from penstock.models.decoder import PositionTables
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer
from penstock.quantization.base import Unquantized, WeightFactory

CPU = torch.device("cpu")
FACTORY = WeightFactory(Unquantized(), make_ops(CPU), torch.float32, CPU)
ROPE = RopeConfig(dim=8, theta=1e6)
ATTENTION = AttentionSpec(hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, rope=ROPE)
LAYER = LayerSpec("model.layers.0", SubLayer(ATTENTION, NormSpec("input_layernorm", 16, 1e-6)), None)
OTHER = replace(ROPE, theta=1e4)
SPEC = ModelSpec(
    dtype="float32",
    vocab_size=10,
    hidden_size=16,
    max_position=100 * PAGE,
    layers=(LAYER, replace(LAYER, mixer=SubLayer(replace(ATTENTION, rope=OTHER), NormSpec("n", 16, 1e-6)))),
    final_norm=NormSpec("norm", 16, 1e-6),
    tie_embeddings=True,
)


def test_a_step_computes_the_pages_of_its_positions_once_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = Rotary.compute_page

    def recorded(self: Rotary, page: int) -> None:
        computed.append(page)
        compute(self, page)

    monkeypatch.setattr(Rotary, "compute_page", recorded)
    tables = PositionTables(SPEC, 100 * PAGE - 7, FACTORY)
    steps = ([0, 1, 97 * PAGE], [2, 97 * PAGE + 1], [PAGE - 1, PAGE], [100 * PAGE - 8])
    for positions in steps:
        tables.prepare(np.array(positions, np.int32))
    assert computed == [page for page in (0, 97, 1, 99) for _ in (ROPE, OTHER)]
    asked = torch.tensor([position for step in steps for position in step])
    whole = PositionTables(SPEC, 100 * PAGE - 7, FACTORY)
    whole.prepare(np.arange(100 * PAGE - 7))
    for rope in (ROPE, OTHER):
        assert torch.equal(tables.inputs(asked).angles[rope], whole.inputs(asked).angles[rope])
