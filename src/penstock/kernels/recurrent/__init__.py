"""Mixers whose memory of a text is a state of fixed size: causal convolution, gated delta rule, state space scan.

states      the layers' states in a pool of blocks, of one layout for all versions
reference   the operations in plain torch
native      by the native kernels

Each walks a sequence's tokens one after another, so that the border between two chunks of a prompt changes no bit. A
sequence's state is in the block that its block table names for the token it was computed with:

    block table       7   7   3   3   9        block_size 4, this step computes the tokens 9 to 18
    tokens          0-3 4-7 8-11 .. 16-19
                             |            read from block 3 (that of token 8); 9 to 15 go on in it;
                             |            at token 16 the table names another: it goes on in 9, and 3 stays as it was

Where the first token of a step is the first of its sequence the state before it is zeros. A sequence with a branch
(`kernels.batch`) goes on in that block after some of its tokens, and the table's keeps the state after these.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.recurrent.states import StatePart

Activation = Literal["silu"] | None


@dataclass(frozen=True, slots=True)
class ConvColumns:
    """The first columns of what a convolution takes from a projection: as many channels each."""

    values: int
    before: int | None = None
    """Of factors on the values, before they are convolved; None: there are none."""
    after: int | None = None
    """Of factors on the result, likewise."""


@dataclass(frozen=True, slots=True)
class ConvWeight:
    """A convolution of each channel over its last few tokens."""

    taps: Tensor
    """[kernel, channels] float32, that of the token itself last."""
    bias: Tensor | None
    """[channels] float32."""
    activation: Activation
    """On the result, before the factors."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a gated delta rule; each head of queries and keys serves as many heads of values."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    in_turn: bool = False
    """Heads of values take those of keys in turn; else neighbours have the same."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What a head's gates are computed from, beside its columns of a projection."""

    log_decay: Tensor
    """[heads] float32: the decay of a head is the exponential of -exp(log_decay) times its time step."""
    step_bias: Tensor
    """[heads] float32, on what the time step is the softplus of."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Heads of a state space scan; each group of inputs and outputs serves as many neighbouring heads."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    shortest_step: float
    """Time steps are at least so long."""
    longest_step: float


class CausalConv(Protocol):
    def __call__(self, x: Tensor, columns: ConvColumns, weight: ConvWeight, state: StatePart, batch: Batch) -> Tensor:
        """Convolve each channel over a token and the ones before it.

        `x` [num_tokens, any]; `state` [kernel - 1, channels]: the values of the last tokens, oldest first. Returns
        [num_tokens, channels]: `after * activation(sum of taps * (before * values) + bias)`.
        """
        ...


class GatedDeltaRule(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        projected: Tensor,
        first_gate: int,
        shape: DeltaShape,
        gates: Gates,
        state: StatePart,
        batch: Batch,
    ) -> Tensor:
        """Linear attention whose memory corrects itself (Yang et al., 2024, arXiv:2412.06464).

        The first columns of `qkv` [num_tokens, any] are queries and keys, key_heads * key_dim of each, and values,
        value_heads * value_dim. `projected` [num_tokens, any] has from the column `first_gate` on the rates and then
        the time steps, `value_heads` of each. `state` is a matrix state of `value_heads`, key_dim x value_dim. Of each
        head, with q and k of unit length:

            S = exp(-exp(log_decay) * softplus(step + step_bias)) * S
            S = S + k (v - S^T k)^T * sigmoid(rate)
            o = S^T q / sqrt(key_dim)

        Returns [num_tokens, value_heads * value_dim].
        """
        ...


class StateSpaceScan(Protocol):
    def __call__(
        self,
        xbc: Tensor,
        projected: Tensor,
        first_step: int,
        shape: ScanShape,
        gates: Gates,
        skip: Tensor,
        state: StatePart,
        batch: Batch,
    ) -> Tensor:
        """A state space model whose coefficients depend on the input: Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060).

        The first columns of `xbc` [num_tokens, any] are values, heads * head_dim, and inputs B and outputs C, groups *
        state_size of each. `projected` [num_tokens, any] has from the column `first_step` on the time steps, one a
        head. `skip` [heads] float32. `state` is a matrix state of `heads`, state_size x head_dim. Of each head:

            t = softplus(step + step_bias), within the limits
            S = exp(-exp(log_decay) * t) * S + B (t * x)^T
            y = S^T C + skip * x

        Returns [num_tokens, heads * head_dim].
        """
        ...


class GatedRMSNorm(Protocol):
    def __call__(
        self, x: Tensor, gate: Tensor, first_gate: int, weight: Tensor, eps: float, group: int, *, gate_first: bool
    ) -> Tensor:
        """RMS normalisation of each `group` of neighbouring columns, with a gate.

        `x` [num_tokens, columns] is given up; `gate` [num_tokens, any], from the column `first_gate` on; `weight`
        [columns], or [group] for all groups. With `gate_first` norm(x * silu(gate)) * weight, else
        norm(x) * weight * silu(gate).
        """
        ...
