"""Reads llama.cpp's `mmproj` files, which add a vision tower, an audio encoder or both to a text model's GGUF file.

    general.architecture    clip
    clip.projector_type     with the text model, the family; of a file with two encoders,
                            clip.vision.projector_type and clip.audio.projector_type, or one name for both
    clip.vision.*           sizes of the tower, and how pictures become numbers (mmproj_vision.py)
    clip.audio.*            sizes of the encoder (mmproj_audio.py)

The result is what `config.json` and `preprocessor_config.json` of the model's folder say.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.gguf.file import GGUFFile, Metadata, is_mmproj_name, open_gguf, parts_of
from penstock.checkpoint.gguf.keys import Keys
from penstock.checkpoint.gguf.mmproj_audio import AUDIO_READERS
from penstock.checkpoint.gguf.mmproj_keys import EncoderSettings, GivenEncoder, Section
from penstock.checkpoint.gguf.mmproj_vision import MERGER, VISION_READERS
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
_VOXTRAL = ("voxtral", "VoxtralForConditionalGeneration")
_QWEN2_5_OMNI = ("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration")
_QWEN3_OMNI = ("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration")
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
    "qwen2a": {"Qwen2ForCausalLM": ("qwen2_audio", "Qwen2AudioForConditionalGeneration")},
    "musicflamingo": {"Qwen2ForCausalLM": ("audioflamingo3", "AudioFlamingo3ForConditionalGeneration")},
    "voxtral": dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), _VOXTRAL),
    "qwen2.5o": {"Qwen2ForCausalLM": _QWEN2_5_OMNI},
    "qwen3a": {"Qwen3MoeForCausalLM": _QWEN3_OMNI},
    "qwen3vl_merger and qwen3a": {"Qwen3MoeForCausalLM": _QWEN3_OMNI},
}
"""`model_type` and architecture of the whole model, by the projectors and the text model's architecture."""
_READERS: dict[Section, dict[str, Callable[[GivenEncoder], EncoderSettings]]] = {
    "vision": VISION_READERS,
    "audio": AUDIO_READERS,
}
_WITHOUT_EFFECT = (
    *("has_vision_encoder", "has_audio_encoder", "has_text_encoder", "use_gelu", "use_silu", "projector_type"),
    *("vision.projection_dim", "vision.image_size", "vision.feed_forward_length", "vision.spatial_merge_size"),
    *("vision.attention.layer_norm_epsilon", "vision.image_mean", "vision.image_std"),
)
"""Keys that some families' encoders do not depend on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An mmproj file, with what it adds to the text model's config."""

    file: GGUFFile
    projectors: Mapping[Section, str]
    """The type of the projector of each encoder that is read."""
    config: dict[str, Any]
    """The content of `config.json` of the whole model."""
    processor: dict[str, Any]
    """The content of `preprocessor_config.json`."""
    is_beside: bool = False
    """Whether it was found beside the model, and not named."""


def find_beside(model: Path) -> Path | None:
    """The mmproj file in the folder of a GGUF model; of several, one in 16 bits is preferred."""
    chosen = choose_mmproj([file.name for file in model.parent.glob("*.gguf") if file.is_file()], model.name)
    return None if chosen is None else model.parent / chosen


def choose_mmproj(names: Sequence[str], model: str) -> str | None:
    """The mmproj file to use of these files; None: there is none for the model."""
    found = [name for name in sorted(names) if is_mmproj_name(name) and _belongs(name, model)]
    for ending in _PREFERRED:
        for name in found:
            if Path(name).stem.lower().endswith(ending):
                return name
    return found[0] if found else None


def _belongs(name: str, model: str) -> bool:
    """Whether what precedes `mmproj` in the name of an mmproj file begins the model's, too."""
    before = Path(name).name.lower().partition("mmproj")[0].rstrip("-._")
    return Path(model).name.lower().startswith(before)


def wanted_files(names: Sequence[str], model: str) -> list[str]:
    """The files of a repository that make up a model: its parts, and an mmproj file in the same folder."""
    beside = choose_mmproj([name for name in names if Path(name).parent == Path(model).parent], model)
    return [*parts_of(names, model), *([] if beside is None else [beside])]


def read_beside(model: Path, text: dict[str, Any], vocabulary: Metadata) -> MediaFile | None:
    """The mmproj file beside a model; None: there is none, or it is not supported, which is logged."""
    path = find_beside(model)
    if path is None:
        return None
    try:
        return replace(read_mmproj(path, text, vocabulary), is_beside=True)
    except CheckpointError as error:
        _warn_once(f"{model.name} takes text only, as the mmproj file beside it is not supported: {error}")
        return None


@functools.lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def read_mmproj(path: Path, text: dict[str, Any], vocabulary: Metadata) -> MediaFile:
    """Read an mmproj file.

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
            f"{path} is not an mmproj file: its general.architecture is {shown(architecture)}, not clip"
        )
    keys = Keys(file.metadata, "clip")
    projectors, skipped = _projectors(keys)
    kind, name = _kind(projectors, file), str(text["architectures"][0])
    if kind not in FAMILIES:
        raise CheckpointError(f"{path} has the projectors {kind}, which no supported model has together")
    if name not in FAMILIES[kind]:
        raise CheckpointError(f"{path} is for text models of {', '.join(FAMILIES[kind])}, not {name}")
    family, architecture = FAMILIES[kind][name]
    config: dict[str, Any] = {} if skipped is None else {"audio_config": {"model_type": skipped}}
    processor: dict[str, Any] = {}
    for section, projector in projectors.items():
        given = GivenEncoder(section, keys, file.metadata, file.tensors, text, vocabulary)
        found, config[f"{section}_config"], settings = _READERS[section][projector](given)
        if (size := given.size("projection_dim", text["hidden_size"])) != text["hidden_size"]:
            raise CheckpointError(f"{path} is for a text model of hidden size {size}, not {text['hidden_size']}")
        about = {key: given.numbers(key) for key in ("image_mean", "image_std")}
        config |= found
        processor |= _without_none(about) | settings
    keys.ignore(*_WITHOUT_EFFECT)
    for section in projectors:
        config[f"{section}_config"] = _without_none(config[f"{section}_config"]) | _unread(keys, section)
    return MediaFile(
        file,
        projectors,
        {
            "architectures": [architecture],
            "model_type": family,
            "dtype": text["dtype"],
            **config,
            "text_config": {"model_type": _TEXT_TYPES[name], **text} | config.get("text_config", {}),
        },
        processor,
    )


def _projectors(keys: Keys) -> tuple[dict[Section, str], str | None]:
    """The projectors of the encoders that are read, and that of an audio encoder which is skipped.

    Raises:
        CheckpointError: a vision tower, or an audio encoder alone, is of a kind that is not supported.
    """
    whole = keys.find("projector_type", str)
    found: dict[Section, str] = {}
    for section, readers in _READERS.items():
        own = keys.find(f"{section}.projector_type", str) or (whole if whole in readers else None)
        if own is not None and keys.find(f"has_{section}_encoder", bool) is not False:
            found[section] = own
    if not found:
        whole = keys.need("projector_type", str)
        raise keys.unsupported("projector_type", whole, f"supported: {', '.join({**VISION_READERS, **AUDIO_READERS})}")
    skipped = found.get("audio")
    if "vision" in found and skipped is not None and skipped not in AUDIO_READERS:
        return {"vision": _known(keys, "vision", found["vision"])}, skipped
    return {section: _known(keys, section, projector) for section, projector in found.items()}, None


def _known(keys: Keys, section: Section, projector: str) -> str:
    if projector not in _READERS[section]:
        supported = f"supported: {', '.join(_READERS[section])}"
        raise keys.unsupported(f"{section}.projector_type", projector, supported)
    return projector


def _kind(projectors: Mapping[Section, str], file: GGUFFile) -> str:
    """The key of `FAMILIES`."""
    merges = {"pixtral": "pixtral with a merger"} if MERGER in file.tensors else {}
    return " and ".join(dict.fromkeys(merges.get(projector, projector) for projector in projectors.values()))


def _unread(keys: Keys, section: Section) -> dict[str, bool]:
    """The keys without effect, but for the other encoder's: they are reported."""
    others = "clip.vision." if section == "audio" else "clip.audio."
    return dict.fromkeys((key for key in keys.unread() if not key.startswith(others)), True)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
