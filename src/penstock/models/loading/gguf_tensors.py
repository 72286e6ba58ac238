"""Parameters that GGUF files store in another form: which tensors they are computed from, and how.

A_log                   ssm_a [heads, 1]             -exp(A_log); Mamba: [channels, state_size]
D, norm.weight          ssm_d [heads, 1], ssm_norm [groups, size]
conv1d.weight           ssm_conv1d [channels, taps]
norms by 1 + weight     1 + weight
kv_b_proj (MLA)         attn_k_b [heads, rank, key_dim] and attn_v_b [heads, value_dim, rank]
dt_bias, sinks, ..      under other names
alpha_p, alpha_n        metadata of all layers (xIELU)
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.config import SCORE_HEAD
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.names import stream_map
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.latent import LatentAttentionSpec
from penstock.models.spec import ModelSpec

Floats = NDArray[np.float32]

_NAMED_OTHERWISE = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "sinks": "attn_sinks.weight",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "pre_ff_layernorm.weight": "ffn_norm",  # of Falcon-H1, whose files name it so
    "correct_output_scale": "altup_correct_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""Tensor names within a block, by the last component of a parameter's name."""
_WITHOUT_SUFFIX = {"expert_bias": "{}exp_probs_b"}
"""Other names of such tensors, as of Hunyuan 3."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_XIELU = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(alpha_[pn])")


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A parameter that is computed from tensors of the file."""

    stored: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    make: Callable[..., Floats]
    """Computes the parameter from the stored tensors, in floating point."""


def made_tensors(
    spec: ModelSpec, parameters: Iterable[str], named: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> dict[str, MadeTensor]:
    """The model's parameters that the file stores in another form.

    Args:
        named: the file's name of each parameter, without `.weight` and `.bias`.
    """
    offsets, found = dict(_offsets(spec)), dict(_head_maps(spec, tensors))
    for name in parameters:
        stem, _, leaf = name.rpartition(".")
        if name == SCORE_HEAD:
            found[name] = MadeTensor((tensors[name],), tensors[name].shape, np.asarray)
            continue
        if (of_stream := stream_map(stem)) is not None and (stacked := tensors.get(of_stream[0])) is not None:
            found[name] = MadeTensor((stacked,), stacked.shape[1:], itemgetter(of_stream[1]))
            continue
        end = leaf if leaf in _NAMED_OTHERWISE else ".".join(name.split(".")[-2:])
        stored = _block_of(name) + _NAMED_OTHERWISE[end] if end in _NAMED_OTHERWISE else f"{named.get(stem)}.{leaf}"
        info = tensors.get(stored) or tensors.get(_WITHOUT_SUFFIX.get(end, "").format(_block_of(name)))
        if info is None:
            continue
        if end in _NAMED_OTHERWISE:
            is_matrix = leaf == "A_log" and len(info.shape) == 2 and info.shape[1] > 1
            shape = info.shape if is_matrix else (info.size,)
            if leaf == "A_log" and stem.endswith(".self_attn"):  # Kimi Linear's
                shape = (1, 1, info.size, 1)
            made = _log_of_negative if leaf == "A_log" else np.asarray
            found[name] = MadeTensor((info,), shape, _in_shape(made, shape))
        elif name in offsets:
            found[name] = MadeTensor((info,), info.shape, _less(offsets[name]))
        elif leaf == "weight" and stem.endswith((".conv1d", ".conv.conv", "_conv1d")):
            shape = (info.size // info.shape[-1], 1, info.shape[-1])
            found[name] = MadeTensor((info,), shape, _in_shape(np.asarray, shape))
        elif stem.endswith(".norm") and len(info.shape) == 2:
            found[name] = _flat(info, np.ravel)
    return found


def xielu_tensors(file: GGUFFile, parameters: Iterable[str]) -> dict[str, MadeTensor]:
    """The activations' parameters that files hold as metadata (Apertus)."""
    found = {}
    for name in parameters:
        kind = _XIELU.fullmatch(name)
        if kind is None:
            continue
        values = file.metadata.numbers(f"xielu.{kind[2]}", "fd") or ()
        if int(kind[1]) >= len(values):
            raise CheckpointError(f"{file.path} lacks xielu.{kind[2]} of layer {kind[1]}")
        found[name] = MadeTensor((), (1,), _constant(values[int(kind[1])]))
    return found


def _constant(value: float) -> Callable[[], Floats]:
    return lambda: np.array([value], np.float32)


def _block_of(name: str) -> str:
    layer = _LAYER.search(name)
    return "" if layer is None else f"blk.{layer[1]}."


def _in_shape(make: Callable[[Floats], Floats], shape: tuple[int, ...]) -> Callable[[Floats], Floats]:
    return lambda stored: make(stored).reshape(shape)


def _flat(info: TensorInfo, make: Callable[[Floats], Floats]) -> MadeTensor:
    return MadeTensor((info,), (info.size,), make)


def _log_of_negative(decay: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):  # infinite and NaN, as for the checkpoint's own parameter
        return np.log(-decay.astype(np.float64)).astype(np.float32)  # the same with every version of numpy


def _less(offset: float) -> Callable[[Floats], Floats]:
    return lambda weight: weight - np.float32(offset)


def _offsets(spec: ModelSpec) -> Iterator[tuple[str, float]]:
    """The norms whose parameters exclude an offset that the file's tensors include: (parameter name, offset)."""
    whole = [spec.final_norm]
    if spec.mtp is not None:
        whole += [spec.mtp.embedding_norm, spec.mtp.hidden_norm, spec.mtp.norm]
    norms = [(f"{norm.name}.weight", norm.offset) for norm in whole]
    for layer in spec.layers:
        branches = [branch for branch in (layer.mixer, layer.feed_forward) if branch is not None]
        norms += [(f"{layer.name}.{norm.name}.weight", norm.offset) for branch in branches for norm in branch.norms]
        part = None if layer.mixer is None else layer.mixer.part
        if isinstance(part, AttentionSpec):
            names = (part.names.query_norm, part.names.key_norm)
            norms += [(f"{layer.name}.{name}.weight", part.qk_norm_offset) for name in names]
    return ((name, offset) for name, offset in norms if offset)


def _head_maps(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, MadeTensor]]:
    """The `kv_b_proj` parameters, if the file stores their key and value parts separately."""
    for layer in spec.layers:
        part = None if layer.mixer is None else layer.mixer.part
        if not isinstance(part, LatentAttentionSpec):
            continue
        name = f"{layer.name}.{part.names.heads}.weight"
        keys, values = (tensors.get(f"{_block_of(name)}attn_{kind}_b.weight") for kind in "kv")
        if keys is not None and values is not None:
            _check_shape(keys, (part.num_heads, part.rank, part.key_dim))
            _check_shape(values, (part.num_heads, part.value_dim, part.rank))
            shape = (part.num_heads * (part.key_dim + part.value_dim), part.rank)
            yield name, MadeTensor((keys, values), shape, _joined_heads)


def _check_shape(info: TensorInfo, needed: tuple[int, ...]) -> None:
    if info.shape != needed:
        raise CheckpointError(
            f"{info.name} in {info.file} has the shape {list(info.shape)}; the model's config requires {list(needed)}"
        )


def _joined_heads(keys: Floats, values: Floats) -> Floats:
    """[heads, rank, key_dim] and [heads, value_dim, rank] -> [heads * (key_dim + value_dim), rank]."""
    return np.concatenate((keys.swapaxes(1, 2), values), 1).reshape(-1, values.shape[2])
