"""Which maps' activations keep 15 bits: those of the last feed-forward, and of an output projection of 8 bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.weight_formats import ACTIVATION_GROUP, COARSE_GROUP, FORMATS, WeightFormat
from penstock.kernels.linear.weight import Weight
from penstock.models.decoder import Decoder
from penstock.quantization.base import WeightFactory
from tests.support.checkpoints import write_random
from tests.support.families import SHAPE
from tests.support.stepping import Stepper


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64})],
)
@pytest.mark.parametrize(("quantization", "precise_head"), [("int8", True), ("int4", False)])
def test_the_last_feed_forward_and_an_output_projection_of_8_bits_or_more_are_precise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    quantization: str,
    precise_head: bool,
) -> None:
    precise: dict[str, bool] = {}
    new_weight = WeightFactory._new_weight

    def noting(self: WeightFactory, maps: Any, columns: int, format: WeightFormat, **options: Any) -> Weight:
        precise.update((rows.name, self._is_precise(format)) for rows in maps)
        return new_weight(self, maps, columns, format, **options)

    monkeypatch.setattr(WeightFactory, "_new_weight", noting)
    shape = SHAPE | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
    write_random(tmp_path, family, **(shape | changes))
    logits = Stepper(tmp_path, 1, quantization=quantization).step({0: [1, 2, 3]})[0]
    assert torch.isfinite(logits).all()
    assert {name for name, is_precise in precise.items() if is_precise} == {
        name for name in precise if name.startswith("model.layers.1.mlp.") or (name == "lm_head" and precise_head)
    }
    assert any(name.startswith("model.layers.0.mlp.") for name in precise)


def test_an_output_projection_of_few_bits_scales_activations_by_smaller_groups_than_the_layers(tmp_path: Path) -> None:
    write_random(tmp_path, "Llama", **(SHAPE | {"tie_word_embeddings": False}))
    model = Stepper(tmp_path, 1, quantization="int4").model
    assert isinstance(model, Decoder)
    assert FORMATS["int5"].x_group == COARSE_GROUP
    assert model.output.weight.format == replace(FORMATS["int5"], x_group=ACTIVATION_GROUP)
