import pytest
import torch

from penstock.kernels.ops import make_ops
from penstock.layers.linear import Linear
from penstock.quantization.base import Unquantized, WeightFactory

WEIGHT = torch.arange(18.0).view(6, 3)


def layer(*, bias: bool = False, gated: bool = False) -> Linear:
    factory = WeightFactory(Unquantized(), make_ops(torch.device("cpu")), torch.float32, torch.device("cpu"))
    return Linear(3, (3, 3) if gated else (4, 2), factory, bias=bias, gated=gated)


def test_each_map_of_a_fused_layer_has_its_rows_under_its_own_name() -> None:
    named = layer(bias=True).parameters(("q", "k"))
    assert {name: part.shape for name, part in named.items()} == {
        "q.weight": (4, 3),
        "q.bias": (4,),
        "k.weight": (2, 3),
        "k.bias": (2,),
    }


@pytest.mark.parametrize("bias", [False, True])
def test_filling_the_parts_fills_the_fused_layer(bias: bool) -> None:
    fused = layer(bias=bias)
    named = fused.parameters(("q", "k"))
    named["k.weight"].load(0, WEIGHT[4:])
    named["q.weight"].load(2, WEIGHT[2:4])
    named["q.weight"].load(0, WEIGHT[:2])
    if bias:
        named["q.bias"].load(0, torch.tensor([1.0, 2, 3, 4]))
        named["k.bias"].load(0, torch.tensor([5.0, 6]))
    wanted = WEIGHT.sum(1) + (torch.arange(1.0, 7) if bias else 0)
    assert fused(torch.ones(1, 3)).tolist() == [wanted.tolist()]


def test_a_gated_layer_gives_half_its_rows() -> None:
    gated = layer(gated=True)
    for name, part in gated.parameters(("gate", "up")).items():
        part.load(0, WEIGHT[:3] if name == "gate.weight" else WEIGHT[3:])
    gate, up = WEIGHT.sum(1).view(2, 3)
    torch.testing.assert_close(gated(torch.ones(2, 3)), (gate * gate.sigmoid() * up).expand(2, 3))


def test_a_checkpoint_may_hold_the_maps_as_one() -> None:
    named = layer().parameters(("qk",))
    assert {name: part.shape for name, part in named.items()} == {"qk.weight": (6, 3)}


def test_the_number_of_names_must_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        layer().parameters(("q", "k", "v"))
