"""What torch computes while a test runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NO_WORK = frozenset(
    "alias as_strided detach empty expand select slice squeeze t transpose unbind unsqueeze view _unsafe_view".split()
)
"""Operations that allocate memory without content, or view memory."""
NO_WORK_IN_PLACE = frozenset("contiguous lift_fresh resolve_conj resolve_neg to".split())
"""Operations that do nothing where they return their argument."""


class TorchOps(TorchDispatchMode):
    """Notes the operations by which torch computes or copies, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name not in NO_WORK and not (name in NO_WORK_IN_PLACE and result.data_ptr() == args[0].data_ptr()):
            self.names.append(name)
        return result


def computed_by_torch(run: Callable[[], object]) -> list[str]:
    """The operations by which torch computes or copies in `run`."""
    with TorchOps() as noted:
        run()
    return noted.names
