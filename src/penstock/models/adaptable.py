"""The linear layers of a model that LoRA adapters can target: those of mixers and MLPs. No torch."""

from collections.abc import Iterator

from penstock.checkpoint.adapters.folder import Adaptable
from penstock.config.model_facts import DType
from penstock.layers.attention_spec import AttentionSpec
from penstock.layers.gated_delta_net_spec import GatedDeltaNetSpec
from penstock.layers.latent_spec import LatentAttentionSpec
from penstock.layers.mamba2_spec import Mamba2Spec
from penstock.layers.mixture_spec import MixtureSpec
from penstock.layers.mlp_spec import GatedMLPSpec, PlainMLPSpec
from penstock.layers.short_conv_spec import ShortConvSpec
from penstock.layers.spec import MatrixSize, PartSpec
from penstock.layers.sum_spec import SumSpec
from penstock.models.spec import ModelSpec


def adaptable(spec: ModelSpec, dtype: DType) -> Adaptable:
    """The adaptable linear layers of a model that computes in `dtype`, with their sizes."""
    matrices = {
        f"{layer.name}.{name}": (rows, columns)
        for layer in spec.layers
        for part in layer.parts
        for name, rows, columns in _of_part(part)
    }
    return Adaptable(matrices, spec.names.prefixes, dtype)


def adapted_rows(spec: ModelSpec) -> int:
    """Rows of the adaptable layers, summed over the distinct kinds of parts."""
    parts = {part for layer in spec.layers for part in layer.parts}
    return sum(size.rows for part in parts for size in _of_part(part))


def _of_part(part: PartSpec) -> Iterator[MatrixSize]:
    if isinstance(part, MixtureSpec):
        if part.shared is not None:
            yield from _of_part(part.shared)
    elif isinstance(part, SumSpec):
        for summand in part.summands:
            yield from _of_part(summand.part)
    elif isinstance(part, LatentAttentionSpec):  # without `kv_b_proj`, which is absorbed here
        yield from (size for size in part.matrices() if size.name != part.names.heads)
    elif isinstance(part, GatedDeltaNetSpec):
        if not part.in_turn:  # the heads of GGUF files, which are in another order than an adapter's
            yield from part.matrices()
    elif isinstance(part, (AttentionSpec, GatedMLPSpec, Mamba2Spec, PlainMLPSpec, ShortConvSpec)):
        yield from part.matrices()
