"""Adapts a `ModelSpec` to GGUF files whose matrices differ from the family's own. No torch."""

from dataclasses import replace
from functools import partial
from itertools import count

from penstock.checkpoint.gguf.config import architecture_of
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.layers.attention import AttentionSpec
from penstock.layers.gated_delta_net import GatedDeltaNetSpec
from penstock.layers.mixture import MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.spec import LayerSpec, ModelSpec, MTPSpec


def as_stored(spec: ModelSpec, file: GGUFFile) -> ModelSpec:
    """The model's spec with the matrix layout of the file.

    Key projections of layers that share another layer's KV cache are skipped. Stacked experts are neither transposed
    nor interleaved; gate and up of Granite's MLP are separate, and of Jina's if the file has both; a delta net has the
    projections of Qwen3.5. The multi-token prediction head is the layer after the last one; the model itself skips its
    tensors.
    """
    name, architecture = architecture_of(file)
    layers_of_head = file.metadata.find(f"{name}.nextn_predict_layers", int) or 0
    after = range(spec.num_layers, spec.num_layers + layers_of_head)
    unused = tuple(
        rf"blk\.{index}\.attn_(k|v)(_norm)?\..*"
        for index, mixer in enumerate(spec.mixers)
        if isinstance(mixer, AttentionSpec) and mixer.shared is not None
    )
    mtp_tensors = tuple(rf"blk\.{index}\..*" for index in after)
    # of Granite with sliding windows, files have gate and up of the shared expert together, as folders do
    options = {
        "in_turn": architecture.keys_in_turn,
        "is_apart": "blk.0.ffn_gate.weight" in file.tensors,
        "shared_apart": name != "granite_swa",
    }
    layers = [_layer(layer, **options) for layer in spec.layers]
    return replace(
        spec,
        layers=tuple(layers if architecture.interleaved_rope else map(partial(_with_fused_qkv, file), count(), layers)),
        mtp=None if spec.mtp is None else _mtp_head(spec.mtp, f"model.layers.{spec.num_layers}"),
        names=replace(spec.names, ignored=(*spec.names.ignored, *mtp_tensors, *unused)),
    )


def xielu_size(file: GGUFFile) -> int:
    """Number of parameters of activations that the file holds as metadata (Apertus)."""
    return sum(len(file.metadata.numbers(f"xielu.{kind}", "fd") or ()) for kind in ("alpha_p", "alpha_n"))


def _mtp_head(head: MTPSpec, name: str) -> MTPSpec:
    """The head with DeepSeek's names: it is stored as one more layer of the model."""
    return replace(
        head,
        layer=replace(_layer(head.layer, in_turn=False), name=name),
        embedding_norm=replace(head.embedding_norm, name=f"{name}.enorm"),
        hidden_norm=replace(head.hidden_norm, name=f"{name}.hnorm"),
        projection=f"{name}.eh_proj",
        norm=replace(head.norm, name=f"{name}.shared_head.norm"),
    )


def _with_fused_qkv(file: GGUFFile, index: int, layer: LayerSpec) -> LayerSpec:
    """The layer with one matrix of queries, keys and values, where the file has it so."""
    part = None if layer.mixer is None else layer.mixer.part
    if not isinstance(part, AttentionSpec) or len(part.qkv_names) < 3:
        return layer
    if f"blk.{index}.attn_qkv.weight" not in file.tensors:
        return layer
    assert layer.mixer is not None
    names = replace(part.names, qkv=("self_attn.qkv_proj",))
    return replace(layer, mixer=replace(layer.mixer, part=replace(part, names=names)))


def _layer(layer: LayerSpec, *, in_turn: bool, is_apart: bool = False, shared_apart: bool = True) -> LayerSpec:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if mixer is not None and isinstance(mixer.part, GatedDeltaNetSpec):
        part = mixer.part if mixer.part.together == "none" else replace(mixer.part, together="rates")
        mixer = replace(mixer, part=replace(part, in_turn=in_turn))
    if mixer is not None and isinstance(mixer.part, AttentionSpec):
        by_head = mixer.part.qkv_by_head  # of files all queries come first
        mixer = replace(mixer, part=replace(mixer.part, qkv_by_head=False, qkv_adaptable=not by_head))
    if feed_forward is not None and isinstance(feed_forward.part, MixtureSpec):
        feed_forward = replace(feed_forward, part=_mixture(feed_forward.part, shared_apart=shared_apart))
    elif feed_forward is not None and isinstance(feed_forward.part, GatedMLPSpec):
        mlp = _apart(feed_forward.part, "mlp")
        if is_apart and mlp.gate_up == ("mlp.gated_layers",):  # Jina's, in files of older converters
            mlp = replace(mlp, gate_up=("mlp.gated_layers_w", "mlp.gated_layers_v"))
        feed_forward = replace(feed_forward, part=mlp)
    return replace(layer, mixer=mixer, feed_forward=feed_forward)


def _mixture(mixture: MixtureSpec, *, shared_apart: bool) -> MixtureSpec:
    from penstock.models.families.granite_moe_hybrid import EXPERT_NAMES  # here: most models have no experts

    shared = mixture.shared
    if isinstance(shared, GatedMLPSpec) and shared_apart:
        shared = _apart(shared, "mlp.shared_expert")
    names = mixture.names
    if names == EXPERT_NAMES:
        names = replace(names, experts="mlp.experts", stacked=())
    return replace(mixture, transposed=False, interleaved=False, shared=shared, names=names)


def _apart(mlp: GatedMLPSpec, prefix: str) -> GatedMLPSpec:
    """Granite's MLP with separate gate and up matrices, which Hugging Face folders store fused."""
    if mlp.gate_up != ("shared_mlp.input_linear",):
        return mlp
    return replace(mlp, gate_up=(f"{prefix}.gate_proj", f"{prefix}.up_proj"), down=f"{prefix}.down_proj")
