"""The spec of the Mamba 2 mixer: plain data, no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.model_facts import StateSpec, Working
from penstock.config.state_layout import matrix_state
from penstock.layers.spec import MatrixSize, Mixer

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A state space scan over convolved values, inputs and outputs (x, B, C). See `MixerSpec` for the methods."""

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    """Groups of inputs and outputs (B, C); each is shared by `heads / groups` adjacent heads."""
    state_size: int
    kernel: int
    """Width of the convolution in tokens."""
    norm_eps: float
    norm_groups: int
    """Number of column groups of the result that are normalized separately."""
    shortest_step: float = 0.0
    longest_step: float = float("inf")
    bias: bool = False
    """Whether the projections have biases."""
    conv_bias: bool = True
    prefix: str = "mamba"
    """Prefix of its tensor names, within the layer."""

    @property
    def inner_size(self) -> int:
        """Columns of the values, of the gate and of the result."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Columns that the convolution covers: values, inputs and outputs."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def projected_size(self) -> int:
        return self.inner_size + self.conv_size + self.heads

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        memory = matrix_state(self.heads, self.state_size, self.head_dim)
        return StateSpec(((self.kernel - 1, self.conv_size), memory))

    @property
    def working(self) -> Working:
        native = self.projected_size + self.conv_size + self.inner_size
        expanded = 2 * self.heads * self.state_size  # the reference expands inputs and outputs to all heads
        return Working(native, 8 * native + 2 * expanded, self.inner_size)

    @property
    def num_other_parameters(self) -> int:
        biases = self.bias * (self.projected_size + self.hidden_size) + self.conv_bias * self.conv_size
        return self.kernel * self.conv_size + 3 * self.heads + self.inner_size + biases

    @property
    def divided_by(self) -> int:
        return self.heads if self.groups == 1 else math.gcd(self.heads, self.groups)

    def share(self, ranks: int) -> "Mamba2Spec":
        return replace(self, heads=self.heads // ranks, groups=max(1, self.groups // ranks))

    def matrices(self) -> Iterator[MatrixSize]:
        yield MatrixSize(f"{self.prefix}.in_proj", self.projected_size, self.hidden_size)
        yield MatrixSize(f"{self.prefix}.out_proj", self.hidden_size, self.inner_size)

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.mamba2 import Mamba2  # not above: specs are read before torch

        return Mamba2(self, factory)
