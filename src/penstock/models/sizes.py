"""The sizes of a model's weights, read off a build that allocates nothing (`layers.sizes`). No torch."""

from dataclasses import replace
from functools import lru_cache

from penstock.checkpoint.adapters.adaptable import Adaptable
from penstock.config.model_facts import DType, Matrix
from penstock.config.ranks import Ranks
from penstock.layers.attention import AttentionSpec
from penstock.layers.mixture import MixtureSpec
from penstock.layers.sizes import SizeRecorder, WeightSizes
from penstock.layers.sum import SumSpec
from penstock.models.decoder import Decoder
from penstock.models.spec import ModelSpec


def model_sizes(spec: ModelSpec, tp_size: int = 1) -> WeightSizes:
    """The weights of the model: those of one rank, if there are several."""
    # a start asks several times; of the scheme, which cannot be hashed, no shape depends
    return _recorded(replace(spec, quantization=None), tp_size)


@lru_cache(maxsize=4)
def _recorded(spec: ModelSpec, tp_size: int) -> WeightSizes:
    recorder = SizeRecorder(_largest(tp_size))
    if spec.encoder is None:
        Decoder(spec, 0, recorder)
    else:
        from penstock.models.encoder import Encoder  # here: a decoder has no need of it

        Encoder(spec, 0, recorder)
    return recorder.sizes


def head_sizes(target: ModelSpec, tp_size: int = 1) -> WeightSizes:
    """Like `model_sizes`, for the multi-token prediction head of `target`, whose embedding it shares."""
    from penstock.models.mtp import MTPHead  # here: few models have one

    recorder, mtp = SizeRecorder(_largest(tp_size)), target.mtp
    assert mtp is not None, "this model has no head"
    MTPHead(mtp, Decoder(mtp.as_model(target), 0, SizeRecorder()), 0, recorder)
    return recorder.sizes


def _largest(tp_size: int) -> Ranks:
    """The last rank, whose shard of rows that ranks cannot share evenly is the larger one."""
    return Ranks(tp_size - 1, tp_size)


def stored_matrices(spec: ModelSpec, sizes: WeightSizes) -> tuple[Matrix, ...]:
    """The matrices of a build, in the formats in which the model's checkpoint stores them."""
    return tuple(
        Matrix(name, rows, columns, spec.format_of(name), multiplied)
        for name, rows, columns, multiplied in sizes.matrices
    )


def idle_elements(spec: ModelSpec, tp_size: int = 1) -> int:
    """Elements of the matrices of a rank's experts that a token is not routed to."""
    idle = 0
    for part in (part for layer in spec.layers for part in layer.parts):
        for term in (summand.part for summand in part.summands) if isinstance(part, SumSpec) else (part,):
            if isinstance(term, MixtureSpec):
                expert = (2 + term.gated) * term.intermediate_size * term.expert_size
                idle += (term.routing.num_experts - term.routing.top_k) * expert
    return idle // tp_size


def adaptable(spec: ModelSpec, dtype: DType) -> Adaptable:
    """The linear layers of a model that LoRA adapters can target, with their sizes; it computes in `dtype`."""
    sizes = model_sizes(spec)
    matrices, embeddings = (
        {name: (rows, columns) for name, rows, columns, _ in found} for found in (sizes.adaptable, sizes.embeddings)
    )
    by_head, rotated = tuple(sizes.by_head), rotated_projections(spec)
    return Adaptable(matrices, embeddings, sizes.experts, spec.names.prefixes, dtype, by_head, rotated)


def rotated_projections(spec: ModelSpec) -> dict[str, int]:
    """The head size of queries and keys, by the names of their projections."""
    mixers = ((layer.name, layer.mixer.part) for layer in spec.layers if layer.mixer is not None)
    return {
        f"{layer}.{name}": mixer.head_dim
        for layer, mixer in mixers
        if isinstance(mixer, AttentionSpec) and len(mixer.names.qkv) > 1
        for name in mixer.names.qkv[:2]
    }


def adapted_rows(spec: ModelSpec, tp_size: int = 1) -> int:
    """Rows of the adaptable layers of a rank, summed over the distinct kinds of parts."""
    recorder = SizeRecorder(_largest(tp_size))
    for part in {part for layer in spec.layers for part in layer.parts}:
        part.build(recorder)
    return sum(matrix.rows for matrix in recorder.sizes.adaptable) + recorder.sizes.pair_rows
