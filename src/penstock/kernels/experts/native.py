"""Routing (`csrc/route.cpp`) and experts (`csrc/experts.cpp`) by the native kernels."""

import ctypes
from collections.abc import Sequence

from penstock.config.feed_forward import Activation, Routing
from penstock.kernels.experts import Experts
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.native import PackedWeight, activation_code
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora import ExpertUpdates, LoraTable
from penstock.kernels.lora.native import NativeLora
from penstock.kernels.ranks import Alone, Collective
from penstock.kernels.ranks.native import SharedMemoryCollective
from penstock.native import Library, address, dtype_code
from penstock.native.array import Array, dtype_name, dtype_of
from penstock.native.program import call, empty_rows
from penstock.native.structs import ExpertsArgs, RouteArgs

_SCORES = ("softmax", "softmax_of_top", "sigmoid", "sparsemixer")
"""Score functions, in the order of the enumerators in ops.h."""


class PackedExperts:
    """See `penstock.kernels.experts.Experts` for the methods."""

    def __init__(
        self,
        library: Library,
        gate_up: Sequence[LinearMap[Array]],
        down: Sequence[Weight[Array]],
        gate_up_bias: Array | None,
        down_bias: Array | None,
        collective: SharedMemoryCollective | Alone,
    ) -> None:
        self._library, self._collective = library, collective
        self._weights, self._biases = (*gate_up, *down), (gate_up_bias, down_bias)
        self._rows, self._size = down[0].rows, len(down)
        self._activation = _activation_of(gate_up[0])
        gates, ups = zip(*map(_gate_and_up, gate_up), strict=True)
        self._tables = [None if not any(gates) else _handles(gates), _handles(ups), _handles(down)]
        # The kernel reads the format of the first expert for all, unless they differ.
        self._is_mixed = not (_alike(gate_up) and _alike(down))

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights)

    def mix(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        shared: Array | None,
        shared_gate: Array | None,
        *,
        scale_x: bool = False,
        updates: ExpertUpdates[Array] | None = None,
    ) -> Array:
        assert x.is_contiguous()
        shared_place = None
        if shared is not None:
            assert shared.dtype == x.dtype
            assert shared.stride(1) == 1
            own = self._collective.ranks.own(shared.shape[1])
            # The kernel adds the shared expert's result to this rank's columns alone.
            assert len(own) == self._rows
            shared_place = shared.data_ptr() + own.start * shared.dtype.itemsize
        out = empty_rows(x, (self._rows,), x.dtype)
        arguments = ExpertsArgs(
            **dict(zip(("gate", "gate_up", "down"), map(_address, self._tables), strict=True)),
            gate_up_bias=address(self._biases[0]),
            down_bias=address(self._biases[1]),
            experts=self._size,
            top_k=ids.shape[1],
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            x=x.data_ptr(),
            shared=shared_place,
            shared_stride=0 if shared is None else shared.stride(0),
            shared_gate=address(shared_gate),
            y=out.data_ptr(),
            dtype=dtype_code(x.dtype),
            activation=activation_code(self._activation),
            ranks=self._collective.handle if isinstance(self._collective, SharedMemoryCollective) else None,
            scale_x=scale_x,
            mixed=self._is_mixed,
        )
        if updates is not None:
            arguments.adapters = updates.rows.handle
            arguments.gate_up_slots, arguments.down_slots = map(_slots_of, (updates.gate_up, updates.down))
        call(self._library, x, arguments)
        return out


def _slots_of(tables: Sequence[LoraTable[Array]]) -> int:
    """The address of the library's structs of the experts' tables, which they share."""
    (first, *_) = tables
    assert isinstance(first, NativeLora)
    return first.slots.handle


def _activation_of(gate_up: LinearMap[Array]) -> Activation | None:
    if isinstance(gate_up, JoinedWeight):
        return gate_up.gate
    assert isinstance(gate_up, PackedWeight)
    return gate_up.activation


def _gate_and_up(gate_up: LinearMap[Array]) -> tuple[LinearMap[Array] | None, LinearMap[Array]]:
    """The gate's weight, None if it is fused with that of `up`, and the other weight."""
    if not isinstance(gate_up, JoinedWeight):
        return None, gate_up
    gate, up = gate_up.parts
    return gate, up


def _alike(maps: Sequence[LinearMap[Array]]) -> bool:
    """Whether all experts have the same formats."""
    kept = set()
    for each in maps:
        parts = each.parts if isinstance(each, JoinedWeight) else (each,)
        kept.add(tuple(part.format for part in parts if isinstance(part, PackedWeight)))
    return len(kept) == 1


def _handles(weights: Sequence[LinearMap[Array] | None]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(weights))(*map(_handle, weights))


def _handle(weight: LinearMap[Array] | None) -> int | None:
    assert weight is None or isinstance(weight, PackedWeight)
    return None if weight is None else weight.handle


def _address(table: "ctypes.Array[ctypes.c_void_p] | None") -> int | None:
    return None if table is None else ctypes.addressof(table)


class _TensorExperts:
    """Experts of another table, over tensors in the memory of arrays. See `penstock.kernels.experts.Experts`."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    @property
    def nbytes(self) -> int:
        return self._experts.nbytes

    def mix(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        shared: Array | None,
        shared_gate: Array | None,
        *,
        scale_x: bool = False,
        updates: ExpertUpdates[Array] | None = None,
    ) -> Array:
        from penstock.kernels.arrays import array_of, tensor_of

        tensors = (
            None if array is None else tensor_of(array.numpy()) for array in (x, ids, weights, shared, shared_gate)
        )
        return Array(array_of(self._experts.mix(*tensors, scale_x=scale_x, updates=updates)))


def _experts_over_nodes(
    gate_up: list[LinearMap], down: list[Weight], biases: tuple[Array | None, Array | None], collective: Collective
) -> Experts[Array]:
    """Experts whose ranks torch connects: the reference's, with native weights, which take tensors, too."""
    from penstock.kernels.arrays import tensor_of
    from penstock.kernels.experts.reference import ReferenceExperts

    gate_up_bias, down_bias = (None if bias is None else tensor_of(bias.numpy()) for bias in biases)
    return _TensorExperts(ReferenceExperts(gate_up, down, gate_up_bias, down_bias, collective))


class MixtureKernels:
    """See `penstock.kernels.ops.Ops` for the methods."""

    def __init__(self, library: Library, collective: Collective[Array]) -> None:
        self._library, self._collective = library, collective

    def new_experts(
        self,
        gate_up: list[LinearMap[Array]],
        down: list[Weight[Array]],
        gate_up_bias: Array | None,
        down_bias: Array | None,
    ) -> Experts[Array]:
        if not isinstance(self._collective, SharedMemoryCollective | Alone):  # the kernel supports no other
            return _experts_over_nodes(gate_up, down, (gate_up_bias, down_bias), self._collective)
        return PackedExperts(self._library, gate_up, down, gate_up_bias, down_bias, self._collective)

    def route(
        self, logits: Array, routing: Routing, correction: Array | None, scales: Array | None = None
    ) -> tuple[Array, Array]:
        assert scales is None or routing.score != "sparsemixer"
        assert dtype_name(logits.dtype) == "float32"
        assert logits.is_contiguous()
        assert logits.shape[1] == routing.num_experts
        ids = empty_rows(logits, (routing.top_k,), dtype_of("int32"))
        weights = empty_rows(logits, (routing.top_k,), dtype_of("float32"))
        arguments = RouteArgs(
            logits=logits.data_ptr(),
            correction=address(correction),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            experts=routing.num_experts,
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            score=_SCORES.index(routing.score),
            group_tops=routing.group_tops,
            renormalize=routing.renormalize,
            epsilon=routing.epsilon,
            scaling=routing.scaling,
            jitter=routing.jitter,
            expert_scales=address(scales),
        )
        call(self._library, logits, arguments)
        return ids, weights
