"""Recurrent mixers, whose state has a fixed size: causal convolution, gated delta rule, state space scans.

states      the layers' states in a pool of blocks, with one layout for all versions
reference   the operations in plain torch
native      the operations by the native kernels

Each operation processes a sequence's tokens one by one, so that the boundary between two prompt chunks does not change
a bit. The state after a token is stored in the block that the block table has for this token:

    block table       7   7   3   3   9        block_size 4, this step computes the tokens 9 to 18
    tokens          0-3 4-7 8-11 .. 16-19
                             |            read from block 3 (that of token 8); tokens 9 to 15 update it;
                             |            from token 16 on block 9 is updated, and block 3 keeps its state

If the first token of a step is the first of its sequence, the initial state is zeros. A sequence with a branch
(`kernels.batch`) continues in the branch's block after some of its tokens, and the table's block keeps the state there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, Protocol

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.recurrent.states import StatePart

Activation = Literal["silu"] | None


@dataclass(frozen=True, slots=True)
class ConvColumns:
    """The first columns of a convolution's inputs in a projection; each has as many columns as channels."""

    values: int
    before: int | None = None
    """Factors on the values before the convolution; None: no factors."""
    after: int | None = None
    """Factors on the result; None: no factors."""


@dataclass(frozen=True, slots=True)
class ConvWeight(Generic[A]):
    """The weight of a causal depthwise convolution."""

    taps: A
    """[kernel, channels] float32; the last tap is that of the token itself."""
    bias: A | None
    """[channels] float32."""
    activation: Activation
    """Activation of the result, before the factors."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of a gated delta rule; each query and key head serves value_heads / key_heads value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    in_turn: bool = False
    """Whether value head i uses key head i % key_heads; otherwise adjacent value heads share a key head."""
    by_channel: bool = False
    """Whether the channels of a value head's keys have time steps of their own; otherwise the head has one."""


@dataclass(frozen=True, slots=True)
class Gates(Generic[A]):
    """The learned parameters of gates: of heads, or of what the operation names."""

    log_decay: A
    """[heads] float32: a head's decay is exp(-exp(log_decay) * time step)."""
    step_bias: A
    """[heads] float32, added to the projected time step before softplus."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """The heads of a state space scan; each group of inputs and outputs serves heads / groups adjacent heads."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    shortest_step: float
    """Lower limit of time steps."""
    longest_step: float


class CausalConv(Protocol[A]):
    def __call__(self, x: A, columns: ConvColumns, weight: ConvWeight[A], state: StatePart[A], batch: Batch) -> A:
        """A causal depthwise convolution over a token and its predecessors.

        Returns [num_tokens, channels]: after * activation(conv(before * values) + bias).

        Args:
            x: [num_tokens, any].
            state: [kernel - 1, channels], the values of the last tokens, oldest first.
        """
        ...


class GatedDeltaRule(Protocol[A]):
    def __call__(
        self,
        qkv: A,
        projected: A,
        first_gate: int,
        shape: DeltaShape,
        gates: Gates[A],
        state: StatePart[A],
        batch: Batch,
    ) -> A:
        """Linear attention with a gated delta rule (Yang et al., 2024, arXiv:2412.06464).

        For each head, with q and k normalized to unit length:

            S = exp(-exp(log_decay) * softplus(step + step_bias)) * S
            S = S + k (v - S^T k)^T * sigmoid(rate)
            o = S^T q / sqrt(key_dim)

        With `by_channel` each row of S has a time step and so a decay of its own (Kimi Team, 2025, arXiv:2510.26692).

        Returns [num_tokens, value_heads * value_dim].

        Args:
            qkv: [num_tokens, any], beginning with queries and keys (key_heads * key_dim columns each) and values
                (value_heads * value_dim).
            projected: [num_tokens, any], with rates and then time steps (`value_heads` columns each) from column
                `first_gate` on; `by_channel`: value_heads * key_dim time steps.
            gates: with `by_channel`, `step_bias` is [value_heads * key_dim].
            state: the matrix states S of `value_heads` heads, key_dim x value_dim each.
        """
        ...


class StateSpaceScan(Protocol[A]):
    def __call__(
        self,
        xbc: A,
        projected: A,
        first_step: int,
        shape: ScanShape,
        gates: Gates[A],
        skip: A,
        state: StatePart[A],
        batch: Batch,
    ) -> A:
        """The selective state space scan of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060).

        For each head:

            t = softplus(step + step_bias), clamped to the limits
            S = exp(-exp(log_decay) * t) * S + B (t * x)^T
            y = S^T C + skip * x

        Returns [num_tokens, heads * head_dim].

        Args:
            xbc: [num_tokens, any], beginning with values x (heads * head_dim columns), inputs B and outputs C (groups *
                state_size columns each).
            projected: [num_tokens, any], with one time step per head from column `first_step` on.
            skip: [heads] float32.
            state: the matrix states S of `heads` heads, state_size x head_dim each.
        """
        ...


class SelectiveScan(Protocol[A]):
    def __call__(
        self,
        x: A,
        steps: A,
        projected: A,
        first_input: int,
        gates: Gates[A],
        skip: A,
        state: StatePart[A],
        batch: Batch,
    ) -> A:
        """The selective scan of Mamba (Gu and Dao, 2023, arXiv:2312.00752).

        For each channel, with a vector S:

            t = softplus(step + step_bias)
            S = exp(-exp(log_decay) * t) * S + B (t * x)
            y = S^T C + skip * x

        Returns [num_tokens, channels].

        Args:
            x, steps: [num_tokens, any], beginning with values and with time steps (`channels` columns).
            projected: [num_tokens, any], with inputs B and outputs C (state_size columns each) from column
                `first_input` on.
            gates: `log_decay` is [channels, state_size], `step_bias` [channels].
            skip: [channels] float32.
            state: one matrix state, state_size x channels.
        """
        ...


class GatedRMSNorm(Protocol[A]):
    def __call__(
        self,
        x: A,
        gate: A,
        first_gate: int,
        weight: A,
        eps: float,
        group: int,
        *,
        gate_first: bool,
    ) -> A:
        """The RMS norm of each group of `group` columns, with a gate.

        Returns norm(x * silu(gate)) * weight with `gate_first`, else norm(x) * weight * silu(gate).

        Args:
            x: [num_tokens, columns], may be overwritten.
            gate: [num_tokens, any], with the gate from column `first_gate` on.
            weight: [columns], or [group] for all groups.
        """
        ...
