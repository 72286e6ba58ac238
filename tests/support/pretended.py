"""A device that every machine has: it computes in the host's memory and keeps to the rules of one that is apart.

Tensors on `pretended` hold what they would on the CPU, but an operation that mixes them with the host's fails, as it
does on a GPU: only a copy crosses over, and a host's single number may take part. What runs there and answers right
moves its tensors as it must. It shows nothing of a real device's kernels, arithmetic and memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_COPIES = {torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_}


class _There(Tensor):
    """A tensor on the device, whose values `held` has."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "_There":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        assert isinstance(made, _There)
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


_kernels = torch.library.Library("aten", "IMPL")  # for where torch itself moves an index, past every mode


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype, **_: Any) -> Tensor:
    return _There(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: _There, non_blocking: bool = False) -> Tensor:
    target.held.copy_(source)
    return target


class PretendedDevice(TorchDispatchMode):
    """Computes on the device for the thread that enters, and counts the operations there.

    The process knows the device from then on, so it should be one that runs nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(torch, NAME):
            _setup_privateuseone_for_python_backend(NAME)
            _kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
            _kernels.impl("_copy_from", _copy_from, "PrivateUse1")
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _compute(func, args, kwargs or {})
        self.count += any(isinstance(leaf, _There) for leaf in tree_leaves((args, kwargs, result)))
        return result


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, _There)}
    on_host = any(tensor.ndim > 0 for tensor in tensors if not isinstance(tensor, _There))
    asked = kwargs.get("device")
    there = bool(known) if asked is None else torch.device(asked).type == NAME
    if func.overloadpacket not in _COPIES and known and (on_host or not there):
        raise RuntimeError(f"{func}: tensors on the device and on the host")
    if asked is not None:
        kwargs = kwargs | {"device": "cpu"}
    held_args, held_kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, _There) else leaf, (args, kwargs))
    result = func(*held_args, **held_kwargs)
    if func.overloadpacket is torch.ops.aten.copy_:
        return args[0]

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else _There(leaf)

    return tree_map(wrap, result) if there else result
