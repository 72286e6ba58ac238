import numpy as np
import pytest
import torch

from penstock.config.recipes import RECIPES
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.weight import Weight
from penstock.kernels.tables import make_ops
from penstock.layers.linear import Linear
from penstock.quantization.base import Method, Unquantized, WeightFactory
from penstock.quantization.rounding import Rounding
from penstock.quantization.rows import Parameter

CPU = torch.device("cpu")
WEIGHT = np.arange(18, dtype=np.float32).reshape(6, 3)
SUMS = torch.from_numpy(WEIGHT.sum(1))


def layer(
    names: tuple[str, ...], *, bias: bool = False, gated: bool = False, method: Method | None = None
) -> tuple[Linear, dict[str, Parameter]]:
    """A layer, and what fills it."""
    factory = WeightFactory(method or Unquantized(), make_ops(CPU), torch.float32, CPU)
    made = Linear(names, 3, (3, 3) if gated else (4, 2), factory.at("layer"), bias=bias, gated=gated)
    return made, factory.parameters


def test_each_map_of_a_fused_layer_has_its_rows_under_its_own_name() -> None:
    _, named = layer(("q", "k"), bias=True)
    assert {name: part.shape for name, part in named.items()} == {
        "layer.q.weight": (4, 3),
        "layer.q.bias": (4,),
        "layer.k.weight": (2, 3),
        "layer.k.bias": (2,),
    }


@pytest.mark.parametrize("bias", [False, True])
def test_filling_the_parts_fills_the_fused_layer(bias: bool) -> None:
    fused, named = layer(("q", "k"), bias=bias)
    named["layer.k.weight"].load(0, WEIGHT[4:])
    named["layer.q.weight"].load(2, WEIGHT[2:4])
    named["layer.q.weight"].load(0, WEIGHT[:2])
    if bias:
        named["layer.q.bias"].load(0, np.array([1.0, 2, 3, 4]))
        named["layer.k.bias"].load(0, np.array([5.0, 6]))
    wanted = SUMS + (torch.arange(1.0, 7) if bias else 0)
    assert fused(torch.ones(1, 3)).tolist() == [wanted.tolist()]


class Mixed(Unquantized):
    """Keeps what is called k, v or up in 8 bits."""

    def format_of(self, name: str) -> WeightFormat:
        return FORMATS["int8"] if name in ("layer.k", "layer.v", "layer.up") else FLOAT

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        if weight.format is FLOAT:
            return super().parameters(weight, name, first, count)
        return Rounding(RECIPES["int8"], make_ops(CPU)).parameters(weight, name, first, count)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_gated_layer_gives_half_its_rows(mixed: bool) -> None:
    gated, named = layer(("gate", "up"), gated=True, method=Mixed() if mixed else None)
    for name, part in named.items():
        part.load(0, WEIGHT[:3] if name == "layer.gate.weight" else WEIGHT[3:])
    gate, up = SUMS.view(2, 3)
    wanted = (gate * gate.sigmoid() * up).expand(2, 3)
    torch.testing.assert_close(gated(torch.ones(2, 3)), wanted, rtol=0.02 if mixed else 1e-5, atol=0.0)


def test_maps_in_different_formats_are_one_layer_all_the_same() -> None:
    joined, named = layer(("q", "k"), bias=True, method=Mixed())
    named["layer.q.weight"].load(0, WEIGHT[:4])
    named["layer.k.weight"].load(0, WEIGHT[4:])
    named["layer.q.bias"].load(0, np.array([1.0, 2, 3, 4]))
    named["layer.k.bias"].load(0, np.array([5.0, 6]))
    wanted = (SUMS + torch.arange(1.0, 7)).expand(5, 6)
    torch.testing.assert_close(joined(torch.ones(5, 3)), wanted, rtol=0.01, atol=0.0)


def test_neighbours_in_one_format_are_one_weight() -> None:
    factory = WeightFactory(Mixed(), make_ops(CPU), torch.float32, CPU)
    joined = factory.at("layer").linear(("q", "k", "v"), (2, 2, 2), 3)
    assert isinstance(joined, JoinedWeight)
    assert [part.rows for part in joined.parts] == [2, 4]
    for index, name in enumerate("qkv"):
        factory.parameters[f"layer.{name}.weight"].load(0, WEIGHT[2 * index : 2 * index + 2])
    made = joined.linear(torch.ones(5, 3), None, torch.float32)
    torch.testing.assert_close(made, SUMS.expand(5, 6), rtol=0.01, atol=0.0)


def test_a_checkpoint_may_hold_the_maps_as_one() -> None:
    _, named = layer(("qk",))
    assert {name: part.shape for name, part in named.items()} == {"layer.qk.weight": (6, 3)}


def test_the_number_of_names_must_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        layer(("q", "k", "v"))
