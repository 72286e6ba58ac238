"""A layer's cache: the keys and values of all tokens, or recurrent states."""

from typing import TypeAlias

from penstock.kernels.array_types import A
from penstock.kernels.attention import LayerCache
from penstock.kernels.recurrent.states import StateCache

AnyCache: TypeAlias = LayerCache[A] | StateCache[A]
