"""What a layer keeps of the texts: keys and values of all their tokens, or states."""

from typing import TypeAlias

from penstock.kernels.attention import LayerCache
from penstock.kernels.recurrent.states import StateCache

AnyCache: TypeAlias = LayerCache | StateCache
