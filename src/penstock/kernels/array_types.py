"""Type variables for the arrays of a table of operations: `Array` natively, torch's `Tensor` in the reference.

Where a class is named without its arrays, they are of any type.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import Self, TypeVar

    from penstock.native.array import AnyDtype

    class AbstractArray(Protocol):
        """What every array has, besides the operations of `Ops`."""

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> AnyDtype: ...

        @property
        def nbytes(self) -> int: ...

        def __len__(self) -> int: ...

        def __getitem__(self, rows: slice | int, /) -> Self: ...

        def view(self, *shape: int) -> Self: ...

    A = TypeVar("A", bound=AbstractArray, default=Any)
    A_co = TypeVar("A_co", bound=AbstractArray, default=Any, covariant=True)
    A_contra = TypeVar("A_contra", bound=AbstractArray, default=Any, contravariant=True)
else:  # bounds and defaults are for type checkers alone, and typing_extensions takes a while to import
    from typing import TypeVar

    A = TypeVar("A")
    A_co = TypeVar("A_co", covariant=True)
    A_contra = TypeVar("A_contra", contravariant=True)
