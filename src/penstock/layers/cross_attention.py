"""Attention of a decoder over the keys and values of an audio window, which its tower computes once (Whisper)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import AttentionOptions, RopeOptions
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec:
    """Attention over an audio window. See `MixerSpec` for the methods.

    It caches nothing of a sequence: the batch and the cache that it is given are those of windows (`AudioRunner`).
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    name: str
    """Prefix of its weights' names within the layer."""

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> None:
        return None

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(2 * self.hidden_size, 2 * self.hidden_size, self.hidden_size)

    @property
    def tp_divisor(self) -> int:
        return 1  # each rank would need the keys of its heads

    def shard(self, tp_size: int) -> CrossAttentionSpec:
        return self

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return CrossAttention(self, factory)


class CrossAttention(Generic[A]):
    """Projects to queries, and attends to all keys of each sequence's window. See `Mixer`."""

    def __init__(self, spec: CrossAttentionSpec, factory: WeightFactory[A]) -> None:
        hidden = spec.hidden_size
        self._query = Linear((f"{spec.name}.q_proj",), hidden, (hidden,), factory, bias=True)
        self.output = output_linear(f"{spec.name}.out_proj", hidden, hidden, factory, bias=True)
        self._options = AttentionOptions(spec.num_heads, spec.scale, bidirectional=True)

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert cache is not None
        assert not isinstance(cache, StateCache), "the cache of another kind of layer"
        return cache.attend(self._query(x, step.adapters), self._options, batch)


class CrossKeys(Generic[A]):
    """The keys and values of a `CrossAttention` layer, of the tower's output."""

    def __init__(self, spec: CrossAttentionSpec, factory: WeightFactory[A]) -> None:
        """
        Args:
            factory: below the layer's name.
        """
        hidden, names = spec.hidden_size, (f"{spec.name}.k_proj", f"{spec.name}.v_proj")
        self._linear = Linear(names, hidden, (hidden, hidden), factory, bias=(False, True), adaptable=False)

    def store(self, x: A, batch: Batch, cache: AnyCache[A]) -> None:
        """Write the keys and values of `x` [positions, hidden_size] to the cache; `batch` is the window's."""
        assert not isinstance(cache, StateCache)
        cache.rope_and_cache(self._linear(x), _NO_QUERIES, None, batch)


_NO_QUERIES = RopeOptions(0)
