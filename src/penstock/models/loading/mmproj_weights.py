"""Reads the encoders of an `mmproj` file: llama.cpp's names, and tensors that its converter changes.

attn.qkv                     three tensors
patches of two frames        a tensor a frame
a matrix of pixels           a convolution
queries and keys (Pixtral)   rows of adjacent pairs
norms by 1 + weight          1 + weight
biases of convolutions       axes of size 1 after the vector's
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.mmproj import MediaFile
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.models.loading.gguf_tensors import MadeTensor
from penstock.models.loading.gguf_weights import GGUFWeights
from penstock.models.spec import ModelSpec, TowerSpec

Floats = NDArray[np.float32]

_LAYER = re.compile(r"(?:visual\.blocks|vision_(?:tower|model)\.(?:encoder|transformer|model)\.layers?)\.(\d+)\.(.+)")
_TAP = re.compile(r"visual\.(?:deepstack_)?merger_list\.(\d+)\.(.+)")
_INNER = {
    **dict.fromkeys(("norm1", "layer_norm1", "layernorm_before", "attention_norm"), "ln1"),
    **dict.fromkeys(("norm2", "layer_norm2", "layernorm_after", "ffn_norm"), "ln2"),
    **dict.fromkeys(("attn.proj", "self_attn.out_proj", "attention.projection_layer", "attention.o_proj"), "attn_out"),
    **{f"{above}.{part}_proj": f"attn_{part}" for above in ("self_attn", "attention") for part in "qkv"},
    **{f"attn.{part}": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.o_proj": "attn_out",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **dict.fromkeys(("mlp.fc1", "mlp.linear_fc1", "mlp.up_proj", "feed_forward.up_proj"), "ffn_up"),
    **dict.fromkeys(("mlp.gate_proj", "feed_forward.gate_proj"), "ffn_gate"),
    **dict.fromkeys(("mlp.fc2", "mlp.linear_fc2", "mlp.down_proj", "feed_forward.down_proj"), "ffn_down"),
}
"""Names within a layer, without `.weight` and `.bias`."""
_WHOLE = {"lambda_1": "ls1.weight", "lambda_2": "ls2.weight"}
_EXCHANGED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_OTHERWISE = {"attn_post_norm": "ln2"}
"""Names in older files of Llama 4, which the tables of newer converters give to another norm."""
_QKV = ("attn_q", "attn_k", "attn_v")
_TAPPED = {
    **dict.fromkeys(("norm", "ln_q"), "norm"),
    **dict.fromkeys(("linear_fc1", "mlp.0"), "fc1"),
    **dict.fromkeys(("linear_fc2", "mlp.2"), "fc2"),
}

_SIGLIP = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
_QWEN = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.pos_embed": "v.position_embd",
    **dict.fromkeys(("visual.merger.ln_q", "visual.merger.norm"), "v.post_ln"),
    **dict.fromkeys(("visual.merger.mlp.0", "visual.merger.linear_fc1"), "mm.0"),
    **dict.fromkeys(("visual.merger.mlp.2", "visual.merger.linear_fc2"), "mm.2"),
}
_OUTER: dict[str, dict[str, str]] = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o", "qwen3vl_merger"), _QWEN),
    "gemma3": {
        **{f"vision_tower.{name}": stored for name, stored in _SIGLIP.items()},
        "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    },
    "gemma4v": {
        "vision_tower.patch_embedder.input_proj": "v.patch_embd",
        "embed_vision.embedding_projection": "mm.input_projection",
    },
    "idefics3": {
        **{f"vision_model.{name}": stored for name, stored in _SIGLIP.items()},
        "connector.modality_projection.proj": "mm.model.fc",
    },
    "pixtral": {
        "vision_tower.patch_conv": "v.patch_embd",
        "vision_tower.ln_pre": "v.pre_ln",
        "multi_modal_projector.norm": "mm.input_norm",
        "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    "llama4": {
        "vision_model.patch_embedding.linear": "v.patch_embd",
        "vision_model.layernorm_pre": "v.pre_ln",
        "vision_model.layernorm_post": "v.post_ln",
        "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
        "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
        "multi_modal_projector.linear_1": "mm.model.fc",
    },
    "lfm2": {
        **{f"vision_tower.{name}": stored for name, stored in _SIGLIP.items()},
        "multi_modal_projector.layer_norm": "mm.input_norm",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    "internvl": {
        "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
        "vision_tower.layernorm": "v.post_ln",
        "multi_modal_projector.layer_norm": "mm.model.mlp.0",
        "multi_modal_projector.linear_1": "mm.model.mlp.1",
        "multi_modal_projector.linear_2": "mm.model.mlp.3",
    },
}
"""Names outside the layers, without `.weight` and `.bias`, by `clip.projector_type`."""
_COMPLETE = {
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_model.class_embedding": "v.class_embd",
    "vision_model.positional_embedding_vlm": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
}
"""Complete names."""
_AUDIO_LAYER = re.compile(r"audio_tower\.layers\.(\d+)\.(.+)\.(weight|bias)")
_AUDIO_INNER = {
    "self_attn_layer_norm": "ln1",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.out_proj": "attn_out",
    "final_layer_norm": "ln2",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
"""Names within a layer of an audio encoder, without `.weight` and `.bias`."""
_AUDIO_OUTER = {
    **{f"audio_tower.conv{number}": f"a.conv1d.{number}" for number in (1, 2)},
    **{f"audio_tower.conv2d{number}": f"a.conv2d.{number}" for number in (1, 2, 3)},
    "audio_tower.conv_out": "a.conv_out",
    "audio_tower.embed_positions": "a.position_embd",
    **dict.fromkeys(("audio_tower.layer_norm", "audio_tower.ln_post"), "a.post_ln"),
    **dict.fromkeys(("multi_modal_projector.linear", "audio_tower.proj"), "mm.a.fc"),
    **{f"multi_modal_projector.linear_{number}": f"mm.a.mlp.{number}" for number in (1, 2)},
    **{f"audio_tower.proj{number}": f"mm.a.mlp.{number}" for number in (1, 2)},
}
"""Names outside of its layers, without `.weight` and `.bias`, of all projectors."""
_UNUSED = re.compile(r"v\.token_embd\.img_break|a\.position_embd\.weight|a\.blk\.\d+\.attn_k\.bias")
"""A copy of a row of the text model's embedding, sinusoids, and what attention weights do not depend on."""
_AUDIO = re.compile(r"(mm\.)?a\..*")


def mmproj_weights(media: MediaFile, spec: ModelSpec, parameters: Iterable[str]) -> list[GGUFWeights]:
    """The weights of the encoders, under the names of their parameters, without an encoder that has none.

    Raises:
        CheckpointError: a tensor is missing, or has a shape that cannot be converted.
    """
    names, found = list(parameters), list[GGUFWeights]()
    tensors, audio = media.file.tensors, {name for name in media.file.tensors if _AUDIO.fullmatch(name)}
    if "vision" in media.projectors and spec.tower is not None:
        found += _weights(media, tensors.keys() - audio, dict(_Tensors(media, spec.tower).of(names)))
    if "audio" in media.projectors:
        found += _weights(media, audio, dict(_audio_tensors(media, names)))
    return found


def _weights(media: MediaFile, stored: Set[str], made: Mapping[str, MadeTensor]) -> Iterator[GGUFWeights]:
    """The weights of one encoder, whose tensors are `stored`."""
    if made:
        used = {info.name for each in made.values() for info in each.stored}
        others = [name for name in stored - used if not _UNUSED.fullmatch(name)]
        yield GGUFWeights(media.file.path, {name: media.file.tensors[name] for name in others}, {}, made)


def _audio_tensors(media: MediaFile, parameters: Iterable[str]) -> Iterator[tuple[str, MadeTensor]]:
    """Each parameter of an audio encoder, with how it is made."""
    for name in parameters:
        if layer := _AUDIO_LAYER.fullmatch(name):
            stored = f"a.blk.{layer[1]}.{_AUDIO_INNER[layer[2]]}.{layer[3]}"
        else:
            stem, _, leaf = name.rpartition(".")
            if stem not in _AUDIO_OUTER:
                continue
            stored = f"{_AUDIO_OUTER[stem]}.{leaf}"
        info = _stored(media, stored)
        is_bias = name.endswith(".bias") and info.size == info.shape[0]
        yield name, _reshaped(info, (info.size,)) if is_bias else _plain(info)


def _stored(media: MediaFile, name: str) -> TensorInfo:
    info = media.file.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{media.file.path} lacks the tensor {name}")
    return info


class _Tensors:
    """The stored tensors of a vision tower's parameters."""

    def __init__(self, media: MediaFile, tower: TowerSpec) -> None:
        self._tower, self._projector, self._media = tower, media.projectors["vision"], media
        self._file, self._tensors = media.file.path, media.file.tensors
        down = self._tensors.get("v.blk.0.ffn_down.weight")
        hidden = tower.hidden_size
        self._is_exchanged = down is not None and down.shape[-1] == hidden != down.shape[0]
        """Whether names of an MLP's maps are exchanged, as in older files."""

    def of(self, parameters: Iterable[str]) -> Iterator[tuple[str, MadeTensor]]:
        """Each parameter of the tower, with how it is made."""
        for name in parameters:
            found = self._made(name)
            if found is not None:
                yield name, found

    def _made(self, name: str) -> MadeTensor | None:
        stem, _, leaf = name.rpartition(".")
        if name in _COMPLETE:
            return _plain(self._info(_COMPLETE[name]))
        if layer := _LAYER.fullmatch(name):
            return self._of_layer(f"v.blk.{layer[1]}.", layer[2])
        if tap := _TAP.fullmatch(stem):
            index = self._tower.taps[int(tap[1])][0]
            return _plain(self._info(f"v.deepstack.{index}.{_TAPPED[tap[2]]}.{leaf}"))
        stored = _OUTER[self._projector].get(stem)
        if stored is None:
            return None
        info = self._info(f"{stored}.{leaf}")
        if stored == "v.patch_embd" and leaf == "weight":
            return self._patches(info)
        if stored == "mm.soft_emb_norm":
            return MadeTensor((info,), info.shape, lambda weight: weight - np.float32(1))
        return _plain(info)

    def _of_layer(self, above: str, name: str) -> MadeTensor:
        if name in _WHOLE:
            return _plain(self._info(above + _WHOLE[name]))
        stem, _, leaf = name.rpartition(".")
        stem = stem.removesuffix(".linear")  # whose limits are beside it
        if stem == "attn.qkv" and f"{above}attn_qkv.{leaf}" not in self._tensors:
            parts = tuple(self._info(f"{above}{part}.{leaf}") for part in _QKV)
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            return MadeTensor(parts, shape, lambda *parts: np.concatenate(parts))
        stored = "attn_qkv" if stem == "attn.qkv" else _INNER[stem]
        if f"{above}{stored}.{leaf}" not in self._tensors:
            stored = _OTHERWISE.get(stored, stored)
        info = self._info(f"{above}{_EXCHANGED.get(stored, stored) if self._is_exchanged else stored}.{leaf}")
        if self._projector == "pixtral" and stored in _QKV[:2]:
            return MadeTensor((info,), info.shape, _halves(self._head_dim()))
        return _plain(info)

    def _head_dim(self) -> int:
        mixer = self._tower.layers[0].mixer
        assert mixer is not None
        assert isinstance(mixer.part, AttentionSpec)
        return mixer.part.head_dim

    def _patches(self, info: TensorInfo) -> MadeTensor:
        patch = self._tower.patch
        if patch.flat == "channels":
            flat = (info.shape[0], info.size // max(1, info.shape[0]))
            return _reshaped(info, flat)
        if len(info.shape) != 4:
            raise CheckpointError(f"{info.name} in {self._file} has the shape {list(info.shape)}; 4 axes are read")
        rows, channels, height, width = info.shape
        if patch.frames is not None:
            others = [self._info(f"{info.name}.{frame}") for frame in range(1, patch.frames)]
            shape: tuple[int, ...] = (rows, channels, patch.frames, height, width)
            return MadeTensor((info, *others), shape, lambda *frames: np.stack(frames, 2))
        if patch.flat == "pixels":
            return MadeTensor(
                (info,),
                (rows, channels * height * width),
                lambda weight: weight.transpose(0, 2, 3, 1).reshape(len(weight), -1),
            )
        return _plain(info)

    def _info(self, name: str) -> TensorInfo:
        return _stored(self._media, name)


def _plain(info: TensorInfo) -> MadeTensor:
    return MadeTensor((info,), info.shape, lambda values: values)


def _reshaped(info: TensorInfo, shape: tuple[int, ...]) -> MadeTensor:
    return MadeTensor((info,), shape, lambda values: values.reshape(shape))


def _halves(head_dim: int) -> Callable[[Floats], Floats]:
    """Reorder rows of heads from rotating adjacent pairs to rotating halves."""

    def make(rows: Floats) -> Floats:
        made: Floats = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return made

    return make
