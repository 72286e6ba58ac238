import pytest
import torch

from penstock.layers.linear import Linear


def layer(bias: bool) -> Linear:
    made = Linear(3, (4, 2), bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    made.weight.copy_(torch.arange(18.0).view(6, 3))
    if made.bias is not None:
        made.bias.copy_(torch.arange(6.0))
    return made


def test_each_map_of_a_fused_layer_is_a_view_under_its_own_name() -> None:
    named = layer(bias=True).parameters(("q", "k"))
    assert list(named) == ["q.weight", "k.weight", "q.bias", "k.bias"]
    assert named["k.weight"].tolist() == [[12, 13, 14], [15, 16, 17]]
    assert named["k.bias"].tolist() == [4, 5]


def test_filling_a_part_fills_the_fused_layer() -> None:
    fused = layer(bias=False)
    fused.parameters(("q", "k"))["k.weight"].zero_()
    assert fused(torch.ones(1, 3)).tolist() == [[3, 12, 21, 30, 0, 0]]


def test_a_checkpoint_may_hold_the_maps_as_one() -> None:
    named = layer(bias=False).parameters(("qk",))
    assert {name: tuple(part.shape) for name, part in named.items()} == {"qk.weight": (6, 3)}


def test_the_number_of_names_must_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        layer(bias=False).parameters(("q", "k", "v"))
