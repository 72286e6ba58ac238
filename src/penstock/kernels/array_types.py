"""Type variables for the arrays of a table of operations: `Array` natively, torch's `Tensor` in the reference.

Where a class is named without its arrays, they are of any type.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    A = TypeVar("A", default=Any)
    A_co = TypeVar("A_co", default=Any, covariant=True)
    A_contra = TypeVar("A_contra", default=Any, contravariant=True)
else:  # defaults are for type checkers alone, and typing_extensions takes a while to import
    from typing import TypeVar

    A = TypeVar("A")
    A_co = TypeVar("A_co", covariant=True)
    A_contra = TypeVar("A_contra", contravariant=True)
