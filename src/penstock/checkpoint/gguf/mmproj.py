"""Reads llama.cpp's vision files (`mmproj`), which add a tower to the GGUF file of a text model.

    general.architecture    clip
    clip.projector_type     with the text model, the family
    clip.vision.*           sizes of the tower, and how pictures become numbers

The result is what `config.json` and `preprocessor_config.json` of the model's folder say. llama.cpp has the other
settings of processors in its code; here they are the defaults of `checkpoint/image_input.py`.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.gguf.file import GGUFFile, Metadata, is_vision_name, open_gguf, parts_of
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.keys import Keys
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

_TYPES = ("mmproj", "clip-vision", "model")
"""Values of `general.type`; older files have the second, or none."""
_PREFERRED = ("-f16", "-bf16", "-f32")
_TEXT_TYPES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Llama4ForCausalLM": "llama4_text",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
}
"""`model_type` of text models, by their architecture."""
_MISTRAL = ("mistral3", "Mistral3ForConditionalGeneration")
_INTERNVL = ("internvl", "InternVLForConditionalGeneration")
_LFM2 = ("lfm2_vl", "Lfm2VlForConditionalGeneration")
_LLAVA = ("llava", "LlavaForConditionalGeneration")
FAMILIES: dict[str, dict[str, tuple[str, str]]] = {
    "qwen2vl_merger": {"Qwen2ForCausalLM": ("qwen2_vl", "Qwen2VLForConditionalGeneration")},
    "qwen2.5vl_merger": {"Qwen2ForCausalLM": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")},
    "qwen3vl_merger": {
        "Qwen3ForCausalLM": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        "Qwen3MoeForCausalLM": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        "Qwen3_5ForCausalLM": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    },
    "gemma3": {"Gemma3ForCausalLM": ("gemma3", "Gemma3ForConditionalGeneration")},
    "gemma4v": {"Gemma4ForCausalLM": ("gemma4", "Gemma4ForConditionalGeneration")},
    "idefics3": {"LlamaForCausalLM": ("idefics3", "Idefics3ForConditionalGeneration")},
    "pixtral": dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), _LLAVA),
    "pixtral with a merger": dict.fromkeys(
        ("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM"), _MISTRAL
    ),
    "llama4": {"Llama4ForCausalLM": ("llama4", "Llama4ForConditionalGeneration")},
    "lfm2": dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), _LFM2),
    "internvl": dict.fromkeys(
        ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"), _INTERNVL
    ),
}
"""`model_type` and architecture of both models, by the projector and the text model's architecture."""
_MERGER = "mm.patch_merger.weight"
_WITHOUT_EFFECT = (
    *("has_vision_encoder", "has_audio_encoder", "has_text_encoder", "use_gelu", "use_silu", "projector_type"),
    *("vision.projection_dim", "vision.image_size", "vision.feed_forward_length", "vision.spatial_merge_size"),
    *("vision.attention.layer_norm_epsilon", "vision.image_mean", "vision.image_std"),
)
"""Keys that some families' towers do not depend on."""
_FEWEST_TOKENS, _MOST_TOKENS = 8, 4096
"""llama.cpp's limits for a picture of Qwen's."""
_LARGEST = 2**26
"""Largest size that is plausible."""
_EPS = 1e-5
"""Of the norms of Pixtral's and Llama 4's towers."""
_WINDOW = 112
"""Side in pixels of Qwen2.5-VL's windows, in llama.cpp."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionFile:
    """A vision file, with what it adds to the text model's config."""

    file: GGUFFile
    projector: str
    """`clip.projector_type`."""
    config: dict[str, Any]
    """The content of `config.json` of both."""
    processor: dict[str, Any]
    """The content of `preprocessor_config.json`."""
    is_beside: bool = False
    """Whether it was found beside the model, and not named."""


@dataclass(frozen=True, slots=True)
class _Given:
    """The input of a projector's reader."""

    keys: Keys
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    text: Mapping[str, Any]
    vocabulary: Metadata
    """Of the text model's file."""

    def token(self, text: str) -> int:
        """The id of a token of the text model's vocabulary.

        Raises:
            CheckpointError: there is no such token.
        """
        tokens = self.vocabulary.string_array("tokenizer.ggml.tokens")
        found = None if tokens is None else tokens.find(text)
        if found is None:
            raise CheckpointError(f"the vocabulary of {self.vocabulary.file} lacks {text}, which images need")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        """
        Raises:
            CheckpointError: the value is missing, or not plausible.
        """
        found = self.keys.need(f"vision.{key}", int) if default is None else self.keys.find(f"vision.{key}", int)
        if found is None:
            assert default is not None
            return default
        if not 1 <= found <= _LARGEST:
            raise self.keys.unsupported(f"vision.{key}", found, f"it must be from 1 to {_LARGEST}")
        return found

    def num_layers(self) -> int:
        """
        Raises:
            CheckpointError: the file has fewer blocks.
        """
        count = self.size("block_count")
        if count > len(self.tensors) or f"v.blk.{count - 1}.ln1.weight" not in self.tensors:
            raise self.keys.unsupported("vision.block_count", count, "the file has the tensors of fewer blocks")
        return count

    def shape(self, tensor: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor, without leading axes of size 1.

        Raises:
            CheckpointError: it is missing, or has another number of axes.
        """
        info = self.tensors.get(tensor)
        if info is None:
            raise CheckpointError(f"{self.keys.file} lacks the tensor {tensor}")
        shape = info.shape
        while len(shape) > axes and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != axes:
            raise CheckpointError(
                f"{tensor} in {self.keys.file} has the shape {list(info.shape)}; {axes} axes are read"
            )
        return shape

    def numbers(self, key: str) -> list[float] | None:
        values = self.metadata.numbers(f"clip.vision.{key}", "fd")
        return None if values is None else list(values)

    def common(self) -> dict[str, Any]:
        """Settings of SigLIP's kind that all files have."""
        return {
            "hidden_size": self.size("embedding_length"),
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.num_layers(),
            "num_attention_heads": self.size("attention.head_count"),
            "patch_size": self.size("patch_size"),
            "layer_norm_eps": self.keys.find("vision.attention.layer_norm_epsilon", float),
        }


_Read = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What a projector's reader finds: entries of `config.json`, its `vision_config`, and the processor's settings."""


def find_beside(model: Path) -> Path | None:
    """The vision file in the folder of a GGUF model; of several, one in 16 bits is preferred."""
    chosen = choose_mmproj([file.name for file in model.parent.glob("*.gguf") if file.is_file()], model.name)
    return None if chosen is None else model.parent / chosen


def choose_mmproj(names: Sequence[str], model: str) -> str | None:
    """The vision file to use of these files; None: there is none for the model."""
    found = [name for name in sorted(names) if is_vision_name(name) and _belongs(name, model)]
    for ending in _PREFERRED:
        for name in found:
            if Path(name).stem.lower().endswith(ending):
                return name
    return found[0] if found else None


def _belongs(name: str, model: str) -> bool:
    """Whether what precedes `mmproj` in the name of a vision file begins the model's, too."""
    before = Path(name).name.lower().partition("mmproj")[0].rstrip("-._")
    return Path(model).name.lower().startswith(before)


def wanted_files(names: Sequence[str], model: str) -> list[str]:
    """The files of a repository that make up a model: its parts, and a vision file in the same folder."""
    beside = choose_mmproj([name for name in names if Path(name).parent == Path(model).parent], model)
    return [*parts_of(names, model), *([] if beside is None else [beside])]


def read_beside(model: Path, text: dict[str, Any], vocabulary: Metadata) -> VisionFile | None:
    """The vision file beside a model; None: there is none, or it is not supported, which is logged."""
    path = find_beside(model)
    if path is None:
        return None
    try:
        return replace(read_mmproj(path, text, vocabulary), is_beside=True)
    except CheckpointError as error:
        _warn_once(f"{model.name} takes text only, as the vision file beside it is not supported: {error}")
        return None


@functools.lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def read_mmproj(path: Path, text: dict[str, Any], vocabulary: Metadata) -> VisionFile:
    """Read a vision file.

    Args:
        text: the text model's config.
        vocabulary: metadata of its file.

    Raises:
        CheckpointError: it is damaged, of a kind that is not supported, or not for this text model.
    """
    file = open_gguf(path, _TYPES)
    architecture = file.metadata.find("general.architecture", str)
    if architecture != "clip":
        raise CheckpointError(
            f"{path} is not a vision file: its general.architecture is {shown(architecture)}, not clip"
        )
    keys = Keys(file.metadata, "clip")
    projector = keys.find("vision.projector_type", str) or keys.need("projector_type", str)
    if projector not in _READERS:
        raise keys.unsupported("projector_type", projector, f"supported: {', '.join(_READERS)}")
    given = _Given(keys, file.metadata, file.tensors, text, vocabulary)
    merges = projector == "pixtral" and _MERGER in file.tensors
    kind, name = "pixtral with a merger" if merges else projector, _architecture(text)
    if name not in FAMILIES[kind]:
        raise CheckpointError(f"{path} is for text models of {', '.join(FAMILIES[kind])}, not {name}")
    (family, both), (config, vision, processor) = FAMILIES[kind][name], _READERS[projector](given)
    if (size := given.size("projection_dim", text["hidden_size"])) != text["hidden_size"]:
        raise CheckpointError(f"{path} is for a text model of hidden size {size}, not {text['hidden_size']}")
    about = {key: given.numbers(key) for key in ("image_mean", "image_std")}
    keys.ignore(*_WITHOUT_EFFECT, *(key for key in file.metadata.below("clip.") if key.startswith("audio.")))
    vision |= dict.fromkeys(keys.unread(), True)  # to be reported
    return VisionFile(
        file,
        projector,
        {
            "architectures": [both],
            "model_type": family,
            "dtype": text["dtype"],
            **config,
            "text_config": {"model_type": _TEXT_TYPES[name], **text} | config.get("text_config", {}),
            "vision_config": {key: value for key, value in vision.items() if value is not None},
        },
        {**{key: value for key, value in about.items() if value is not None}, **processor},
    )


def _architecture(text: Mapping[str, Any]) -> str:
    return str(text["architectures"][0])


def _qwen_vision(given: _Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the towers of Qwen's models have in common: `vision_config` and the processor's settings."""
    patch, merge = given.size("patch_size"), given.size("spatial_merge_size", 2)
    side = patch * merge
    vision = {
        "depth": given.num_layers(),
        "num_heads": given.size("attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
    }
    processor = {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": given.size("image_min_pixels", _FEWEST_TOKENS * side**2),
        "max_pixels": given.size("image_max_pixels", _MOST_TOKENS * side**2),
    }
    return vision, processor


def _qwen2_vl(given: _Given) -> _Read:
    vision, processor = _qwen_vision(given)
    hidden, (inner, _) = given.size("embedding_length"), _mlp_shape(given)
    vision |= {"embed_dim": hidden, "mlp_ratio": inner // hidden, "hidden_size": given.text["hidden_size"]}
    return {"image_token_id": given.token("<|image_pad|>")}, vision, processor


def _mlp_shape(given: _Given) -> tuple[int, int]:
    """Inner and outer size of the first MLP; older files exchange the names of its maps."""
    rows, columns = given.shape("v.blk.0.ffn_up.weight", 2)
    return max(rows, columns), min(rows, columns)


def _qwen2_5_vl(given: _Given) -> _Read:
    vision, processor = _qwen_vision(given)
    pattern = given.size("n_wa_pattern")
    vision |= {
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "out_hidden_size": given.text["hidden_size"],
        "window_size": given.size("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(pattern - 1, vision["depth"], pattern)),
    }
    return {"image_token_id": given.token("<|image_pad|>")}, vision, processor


def _qwen3_vl(given: _Given) -> _Read:
    vision, processor = _qwen_vision(given)
    tapped = given.keys.by_layer("vision.is_deepstack_layers") or []
    vision |= {
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "out_hidden_size": given.text["hidden_size"],
        "num_position_embeddings": given.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": [index for index, is_tapped in enumerate(tapped) if is_tapped],
    }
    return {"image_token_id": given.token("<|image_pad|>")}, vision, processor


def _gemma3(given: _Given) -> _Read:
    vision = given.common() | {"model_type": "siglip_vision_model", "image_size": given.size("image_size")}
    side = vision["image_size"] // vision["patch_size"] // given.size("projector.scale_factor", 4)
    config = {
        "mm_tokens_per_image": side**2,
        "image_token_index": given.token("<image_soft_token>"),
        "boi_token_index": given.token("<start_of_image>"),
        "eoi_token_index": given.token("<end_of_image>"),
    }
    processor = {"size": {"height": vision["image_size"]}}
    return config, vision, processor


def _gemma4(given: _Given) -> _Read:
    heads = given.size("attention.head_count")
    rows, key_rows = (given.shape(f"v.blk.0.attn_{part}.weight", 2)[0] for part in "qk")
    head_dim = max(1, rows // heads)
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "num_hidden_layers": given.num_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": key_rows // head_dim,
        "head_dim": head_dim,
        "patch_size": given.size("patch_size"),
        "pooling_kernel_size": given.size("projector.scale_factor", 3),
        "position_embedding_size": given.shape("v.position_embd.weight", 3)[1],
        "rms_norm_eps": given.keys.find("vision.attention.layer_norm_epsilon", float),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in given.tensors,
        "standardize": "v.std_bias" in given.tensors,
    }
    # The E-models, which alone have per-layer inputs, attend to images causally; files do not say it.
    is_causal = bool(given.text.get("hidden_size_per_layer_input"))
    config: dict[str, Any] = {
        "image_token_id": given.token("<|image|>"),
        "boi_token_id": given.token("<|image>"),
        "eoi_token_id": given.token("<image|>"),
        "text_config": {
            "use_bidirectional_attention": None if is_causal else "vision",
            "pad_token_id": given.vocabulary.find("tokenizer.ggml.padding_token_id", int),
        },
    }
    processor = {"patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"]}
    return config, vision, processor


def _idefics3(given: _Given) -> _Read:
    vision = given.common() | {"image_size": given.size("image_size")}
    config = {"scale_factor": given.size("projector.scale_factor", 2), "image_token_id": given.token("<image>")}
    processor: dict[str, Any] = {"max_image_size": {"longest_edge": vision["image_size"]}}
    longest = given.keys.find("vision.preproc_image_size", int)
    processor |= {"do_image_splitting": False} if not longest else {"size": {"longest_edge": longest}}
    return config, vision, processor


def _pixtral(given: _Given) -> _Read:
    silu = given.keys.find("use_silu", bool)
    vision = given.common() | {
        "model_type": "pixtral",
        "image_size": given.size("image_size"),
        "hidden_act": "silu" if silu else "gelu",
        "layer_norm_eps": None,
    }
    _check_eps(given)
    config: dict[str, Any] = {
        "image_token_index": given.token("[IMG]"),
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in given.tensors,
    }
    if _MERGER in given.tensors:
        config |= {"spatial_merge_size": given.size("spatial_merge_size", 1), "text_config": _as_mistral(given.text)}
    else:
        config["vision_feature_select_strategy"] = "full"
    processor = {"size": {"longest_edge": vision["image_size"]}}
    return config, vision, processor


def _check_eps(given: _Given) -> None:
    """
    Raises:
        CheckpointError: the epsilon of norms is not that which `transformers` has in its code for this tower.
    """
    key = "vision.attention.layer_norm_epsilon"
    eps = given.keys.find(key, float) or _EPS
    if not math.isclose(eps, _EPS, rel_tol=1e-6):  # a float32 in the file
        raise given.keys.unsupported(key, eps, f"only {_EPS} is")


def _llama4(given: _Given) -> _Read:
    _check_eps(given)
    vision = given.common() | {
        "image_size": given.size("image_size"),
        "pixel_shuffle_ratio": 1 / given.size("projector.scale_factor", 2),
        "layer_norm_eps": None,
    }
    out = given.shape("mm.model.mlp.1.weight", 2)[0]
    vision |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), out)
    return {"image_token_index": given.token("<|patch|>")}, vision, {"size": {"height": vision["image_size"]}}


def _as_mistral(text: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a text model's config that make a Mistral of it, which files call Llama."""
    if _architecture(text) != "LlamaForCausalLM" or text.get("attention_bias") or text.get("mlp_bias"):
        return {}
    return {"model_type": "mistral", "sliding_window": None, "attention_bias": None, "mlp_bias": None}


def _lfm2(given: _Given) -> _Read:
    vision = given.common() | {
        "model_type": "siglip2_vision_model",
        "num_patches": given.shape("v.position_embd.weight", 2)[0],
    }
    config = {
        "image_token_id": given.token("<image>"),
        "downsample_factor": given.size("projector.scale_factor", 2),
        "projector_hidden_size": given.shape("mm.1.weight", 2)[0],
        "projector_bias": "mm.1.bias" in given.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in given.tensors,
    }
    return config, vision, {}


def _internvl(given: _Given) -> _Read:
    size, tensors = given.size("image_size"), given.tensors
    vision = given.common() | {
        "image_size": size,
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
    }
    ratio = 1 / given.size("projector.scale_factor", 2)
    config = {"image_token_id": given.token("<IMG_CONTEXT>"), "downsample_ratio": ratio}
    processor = {
        "size": {"height": size},
        "min_patches": given.size("preproc_min_tiles", 1),
        "max_patches": given.size("preproc_max_tiles", 12),
    }
    return config, vision, processor


_READERS: dict[str, Callable[[_Given], _Read]] = {
    "qwen2vl_merger": _qwen2_vl,
    "qwen2.5vl_merger": _qwen2_5_vl,
    "qwen3vl_merger": _qwen3_vl,
    "gemma3": _gemma3,
    "gemma4v": _gemma4,
    "idefics3": _idefics3,
    "pixtral": _pixtral,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "internvl": _internvl,
}
"""By `clip.projector_type`."""
