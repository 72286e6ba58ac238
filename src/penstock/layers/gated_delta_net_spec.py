"""The spec of the gated delta net of Qwen3-Next and Qwen3.5: plain data, no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from penstock.config.model_facts import StateSpec, Working
from penstock.config.state_layout import matrix_state
from penstock.layers.spec import MatrixSize, Mixer, stacked

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """Linear attention with a gated delta rule over convolved queries, keys and values.

    See `MixerSpec` for the methods. The default names are Qwen3.5's.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: each head of queries and keys serves as many value heads."""
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution in tokens."""
    norm_eps: float
    prefix: str = "linear_attn"
    """Prefix of its tensor names, within the layer."""
    together: Literal["none", "rates", "all"] = "none"
    """Projections that the checkpoint fuses and groups by key head. all: queries, keys, values and gates in one matrix,
    rates and time steps in another; rates: only the second of these; none: one matrix for queries, keys and values, and
    one each for gates, rates and time steps."""
    in_turn: bool = False
    """Whether value head i uses key head i % key_heads; otherwise adjacent value heads share a key head."""

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def inputs(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The names and rows of the matrices that project the hidden states."""
        qkv, values, heads = self.qkv_size, self.value_size, self.value_heads
        if self.together == "all":
            return self._within("in_proj_qkvz", "in_proj_ba"), (qkv + values, 2 * heads)
        if self.together == "rates":
            return self._within("in_proj_qkv", "in_proj_z", "in_proj_ba"), (qkv, values, 2 * heads)
        return self._within("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (qkv, values, heads, heads)

    @property
    def output(self) -> str:
        return f"{self.prefix}.out_proj"

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        memory = matrix_state(self.value_heads, self.key_dim, self.value_dim)
        return StateSpec(((self.kernel - 1, self.qkv_size), memory))

    @property
    def working(self) -> Working:
        projected = sum(self.inputs[1])
        native = projected + self.qkv_size + self.value_size
        return Working(native, 8 * native, self.value_size)

    @property
    def num_other_parameters(self) -> int:
        return self.kernel * self.qkv_size + 2 * self.value_heads + self.value_dim

    @property
    def divided_by(self) -> int:
        return 1 if self.in_turn else math.gcd(self.key_heads, self.value_heads)

    def share(self, ranks: int) -> "GatedDeltaNetSpec":
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def matrices(self) -> Iterator[MatrixSize]:
        yield from stacked(*self.inputs, self.hidden_size)
        yield MatrixSize(self.output, self.hidden_size, self.value_size)

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.gated_delta_net import GatedDeltaNet  # not above: specs are read before torch

        return GatedDeltaNet(self, factory)

    def _within(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in names)
