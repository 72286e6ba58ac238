"""Reads how a checkpoint takes images. No torch.

config.json                the family, the ids of placeholder tokens, sizes of the tower
preprocessor_config.json   sizes, filter, mean and deviation of pictures
processor_config.json      the same in newer checkpoints, within `image_processor`; sizes of counted patches
mmproj*.gguf               all of this, beside a GGUF file of a text model
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoint.checkpoint import Checkpoint, read_json
from penstock.config.image_input import GEMMA4_TOKENS, ImageInput
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
_LARGEST = 2**26
"""Largest size, area or token id that is plausible."""
_MOST_TILES = 64
_COUNTED = ("pixtral", "llama4")
"""Processors that have settings of their own in processor_config.json, by which `transformers` counts placeholders."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """Values of a JSON object, with their file for errors."""

    values: Mapping[str, Any]
    file: str

    def within(self, *keys: str) -> "_Settings":
        """The object at the first of these keys; empty if there is none."""
        found: dict[str, Any] = next((self.values[key] for key in keys if isinstance(self.values.get(key), dict)), {})
        return _Settings(found, self.file)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The number at the first of these keys that is set.

        Raises:
            CheckpointError: it is missing, or is no plausible number.
        """
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
                    value = value[0]  # of a square
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if type(value) is not int or not 0 <= value < _LARGEST:
                    raise CheckpointError(
                        f"{self.file}: {key} must be a number from 0 to {_LARGEST}, not {shown(value)}"
                    )
                return value
        if default is None:
            raise CheckpointError(f"{self.file} has no {keys[0]}, which image input needs")
        return default

    def side(self, *keys: str, default: int | None = None) -> int:
        """As `integer`, above 0."""
        if (value := self.integer(*keys, default=default)) == 0:
            raise CheckpointError(f"{self.file}: {keys[0]} must be above 0")
        return value

    def number(self, key: str, default: float) -> float:
        """A number above 0.

        Raises:
            CheckpointError: it is no such number.
        """
        value = self.values.get(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
            raise CheckpointError(f"{self.file}: {key} must be a number above 0, not {shown(value)}")
        return float(value)

    def refuse(self, key: str, value: bool) -> None:
        """
        Raises:
            CheckpointError: the setting has this value.
        """
        if self.values.get(key) is value:
            wanted, given = (str(flag).lower() for flag in (not value, value))
            raise CheckpointError(f"{self.file}: {key} {given} is not supported: set it to {wanted}")

    def channels(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        given = self.values.get(key, default)
        numbers = tuple(given) if isinstance(given, (list, tuple)) else ()
        if len(numbers) != 3 or not all(
            isinstance(number, (int, float)) and math.isfinite(number) for number in numbers
        ):
            raise CheckpointError(f"{self.file}: {key} must be three numbers, not {shown(given)}")
        return float(numbers[0]), float(numbers[1]), float(numbers[2])


def read_image_input(checkpoint: Checkpoint) -> ImageInput | None:
    """How a checkpoint with a vision tower takes images; None if images of its family are not supported.

    Raises:
        CheckpointError: a file or a setting is missing, or is not plausible.
    """
    read = _FAMILIES.get(str(checkpoint.config.get("model_type")))
    if read is None or (checkpoint.gguf is not None and checkpoint.media is None):
        return None
    config = _Settings(checkpoint.config, str(checkpoint.config_file))
    found = read(config, _processor(checkpoint))
    if found.processor in _COUNTED and checkpoint.media is None:
        _check_counted(checkpoint, config, found)
    return found


def _check_counted(checkpoint: Checkpoint, config: _Settings, found: ImageInput) -> None:
    """
    Raises:
        CheckpointError: placeholders would be counted by other patches than the tower's.
    """
    file = checkpoint.path / "processor_config.json"
    counted, vision = _Settings(read_json(file) or {}, str(file)), config.within("vision_config")
    _check_agreed(counted, "patch_size", vision, "patch_size", found.patch_size)
    _check_agreed(counted, "spatial_merge_size", config, "spatial_merge_size", found.merge_size)


def _processor(checkpoint: Checkpoint) -> _Settings:
    if checkpoint.media is not None:
        return _Settings(checkpoint.media.processor, str(checkpoint.media.file.path))
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = checkpoint.path / name
        found = read_json(file)
        if found is not None:
            inner = found.get("image_processor", found if name.startswith("pre") else None)
            if isinstance(inner, dict):
                return _Settings(inner, str(file))
    raise CheckpointError(
        f"{checkpoint.path} has neither a preprocessor_config.json nor a processor_config.json with an "
        "image_processor, which image input needs: add it, or start with images=False (--no-images)"
    )


def _pixels(
    processor: _Settings, mean: tuple[float, float, float], std: tuple[float, float, float], resample: int
) -> dict[str, Any]:
    """The settings that turn pixels into numbers."""
    plain, values = processor.values.get("do_normalize") is False, processor.values
    factor = values.get("rescale_factor", 1 / 255)
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        raise CheckpointError(f"{processor.file}: rescale_factor must be a number, not {shown(factor)}")
    resample = processor.integer("resample", default=resample)
    if resample not in (_LANCZOS, _BILINEAR, _BICUBIC):
        raise CheckpointError(f"{processor.file}: resample {resample} is not supported; 1, 2 and 3 are")
    return {
        "mean": (0.0, 0.0, 0.0) if plain else processor.channels("image_mean", mean),
        "std": (1.0, 1.0, 1.0) if plain else processor.channels("image_std", std),
        "rescale_factor": 1.0 if values.get("do_rescale") is False else float(factor),
        "resample": resample,
    }


def _check_agreed(processor: _Settings, key: str, tower: _Settings, tower_key: str, value: int) -> None:
    """
    Args:
        value: the tower's, which counts.

    Raises:
        CheckpointError: the processor's files state another: pictures would not be of the tower's patches.
    """
    if (given := processor.side(key, default=value)) != value:
        raise CheckpointError(
            f"{processor.file}: {key} is {given}, but the vision tower's {tower_key} ({tower.file}) is {value}: "
            "correct the one that is wrong, or start with images=False (--no-images)"
        )


def _qwen2_vl(config: _Settings, processor: _Settings) -> ImageInput:
    return _qwen_vl(config, processor, patch_default=14)


def _qwen3_vl(config: _Settings, processor: _Settings) -> ImageInput:
    return _qwen_vl(config, processor, patch_default=16)


def _qwen_vl(config: _Settings, processor: _Settings, patch_default: int) -> ImageInput:
    vision, size = config.within("vision_config"), processor.within("size")
    patch, merge = vision.side("patch_size", default=patch_default), vision.side("spatial_merge_size", default=2)
    frames = vision.side("temporal_patch_size", default=2)
    _check_agreed(processor, "patch_size", vision, "patch_size", patch)
    _check_agreed(processor, "merge_size", vision, "spatial_merge_size", merge)
    _check_agreed(processor, "temporal_patch_size", vision, "temporal_patch_size", frames)
    return ImageInput(
        processor="qwen2_vl",
        patch_size=patch,
        merge_size=merge,
        placeholder=config.integer("image_token_id"),
        min_pixels=processor.side("min_pixels", default=size.side("shortest_edge", "min_pixels", default=56 * 56)),
        max_pixels=processor.side(
            "max_pixels", default=size.side("longest_edge", "max_pixels", default=1280 * 28 * 28)
        ),
        **_pixels(processor, _CLIP_MEAN, _CLIP_STD, _BICUBIC),
    )


def _qwen_omni(config: _Settings, processor: _Settings) -> ImageInput:
    thinker = config.within("thinker_config") if "thinker_config" in config.values else config
    placeholder = thinker.integer("image_token_id", "image_token_index", default=151655)
    named = _Settings({**thinker.values, "image_token_id": placeholder}, config.file)
    kind = str(config.values.get("model_type"))
    return _qwen3_vl(named, processor) if kind.startswith("qwen3") else _qwen2_vl(named, processor)


def _idefics3(config: _Settings, processor: _Settings) -> ImageInput:
    patch, merge = config.within("vision_config").side("patch_size"), config.side("scale_factor", default=2)
    tile = processor.within("max_image_size").side("longest_edge", default=364)
    splits = processor.values.get("do_image_splitting") is not False
    return ImageInput(
        processor="idefics3",
        patch_size=patch,
        merge_size=merge,
        placeholder=config.integer("image_token_id"),
        size=processor.within("size").side("longest_edge", default=4 * 364),
        tile_size=tile,
        max_tokens=0 if splits else (tile // patch // merge) ** 2,
        **_pixels(processor, _HALF, _HALF, _LANCZOS),
    )


def _gemma3(config: _Settings, processor: _Settings) -> ImageInput:
    vision = config.within("vision_config")
    processor.refuse("do_pan_and_scan", True)
    size, patch = processor.within("size").side("height", default=224), vision.side("patch_size", default=14)
    side = math.isqrt(config.side("mm_tokens_per_image", default=256))
    begin, end = config.integer("boi_token_index", "boi_token_id"), config.integer("eoi_token_index", "eoi_token_id")
    return ImageInput(
        processor="gemma3",
        patch_size=patch,
        merge_size=max(1, size // patch // side),
        placeholder=config.integer("image_token_index", "image_token_id"),
        marker=begin,
        size=size,
        begin=(begin,),
        end=(end,),
        around="\n\n",
        **_pixels(processor, _HALF, _HALF, _BILINEAR),
    )


def _gemma4(config: _Settings, processor: _Settings) -> ImageInput:
    tokens = processor.side("max_soft_tokens", default=280)
    if tokens not in GEMMA4_TOKENS:
        raise CheckpointError(f"{processor.file}: max_soft_tokens must be one of {GEMMA4_TOKENS}, not {tokens}")
    vision = config.within("vision_config")
    patch, merge = vision.side("patch_size", default=16), vision.side("pooling_kernel_size", default=3)
    _check_agreed(processor, "patch_size", vision, "patch_size", patch)
    _check_agreed(processor, "pooling_kernel_size", vision, "pooling_kernel_size", merge)
    return ImageInput(
        processor="gemma4",
        patch_size=patch,
        merge_size=merge,
        placeholder=config.integer("image_token_id"),
        max_tokens=tokens,
        begin=(config.integer("boi_token_id"),),
        end=(config.integer("eoi_token_id"),),
        **(_pixels(processor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), _BICUBIC)),
    )


def _pixtral(config: _Settings, processor: _Settings) -> ImageInput:
    if config.within("vision_config").values.get("model_type") != "pixtral":  # LLaVA with another tower
        raise CheckpointError(
            f"{config.file}: images of this vision tower are not supported: start with images=False (--no-images)"
        )
    return ImageInput(
        processor="pixtral",
        patch_size=config.within("vision_config").side("patch_size"),
        merge_size=config.side("spatial_merge_size", default=1),
        placeholder=config.integer("image_token_index", "image_token_id"),
        size=processor.within("size").side("longest_edge", default=1024),
        **_pixels(processor, _CLIP_MEAN, _CLIP_STD, _BICUBIC),
    )


def _internvl(config: _Settings, processor: _Settings) -> ImageInput:
    """InternVL cuts pictures whatever `crop_to_patches` says, which its processor in `transformers` replaces."""
    vision = config.within("vision_config")
    return ImageInput(
        processor="internvl",
        patch_size=vision.side("patch_size", default=14),
        merge_size=round(1 / config.number("downsample_ratio", 0.5)),
        placeholder=config.integer("image_token_id"),
        tile_size=_tile(processor, vision, processor_default=384, tower_default=448),
        min_tiles=processor.side("min_patches", default=1),
        max_tiles=_num_tiles(processor, "max_patches", 12),
        **_pixels(processor, _CLIP_MEAN, _CLIP_STD, _BICUBIC),
    )


def _tile(processor: _Settings, vision: _Settings, processor_default: int, tower_default: int) -> int:
    """The side of tiles.

    Raises:
        CheckpointError: it is not that of the tower's pictures.
    """
    side = processor.within("size").side("height", default=processor_default)
    wanted = vision.side("image_size", default=tower_default)
    if side != wanted:
        raise CheckpointError(f"{processor.file}: size must be image_size of vision_config, {wanted}, not {side}")
    return side


def _num_tiles(processor: _Settings, key: str, default: int) -> int:
    """
    Raises:
        CheckpointError: it is implausible: shapes of tiles are tried one by one.
    """
    if (value := processor.side(key, default=default)) > _MOST_TILES:
        raise CheckpointError(f"{processor.file}: {key} must be at most {_MOST_TILES}, not {value}")
    return value


def _lfm2_vl(config: _Settings, processor: _Settings) -> ImageInput:
    config.refuse("use_image_special_tokens", False)
    processor.refuse("use_thumbnail", False)
    vision = config.within("vision_config")
    patch, merge = vision.side("patch_size", default=16), config.side("downsample_factor", default=2)
    _check_agreed(processor, "encoder_patch_size", vision, "patch_size", patch)
    _check_agreed(processor, "downsample_factor", config, "downsample_factor", merge)
    area, tile = (patch * merge) ** 2, processor.side("tile_size", default=512)
    splits = processor.values.get("do_image_splitting") is not False
    least, most = processor.side("min_tiles", default=2), _num_tiles(processor, "max_tiles", 10)
    if splits and (least < 2 or tile % (patch * merge)):
        raise CheckpointError(
            f"{processor.file}: min_tiles must be at least 2, not {least}, and tile_size {tile} a multiple of "
            f"{patch * merge}"
        )
    return ImageInput(
        processor="lfm2_vl",
        patch_size=patch,
        merge_size=merge,
        placeholder=config.integer("image_token_id", default=396),
        min_pixels=processor.side("min_image_tokens", default=64) * area,
        max_pixels=processor.side("max_image_tokens", default=256) * area,
        tile_size=tile if splits else patch * merge,
        min_tiles=least,
        max_tiles=most if splits else 1,
        tolerance=processor.number("max_pixels_tolerance", 2.0),
        **_pixels(processor, _HALF, _HALF, _BILINEAR),
    )


def _llama4(config: _Settings, processor: _Settings) -> ImageInput:
    vision = config.within("vision_config")
    processor.refuse("resize_to_max_canvas", True)
    pixels = _pixels(processor, _HALF, _HALF, _BILINEAR)
    return ImageInput(
        processor="llama4",
        patch_size=vision.side("patch_size", default=14),
        merge_size=round(1 / vision.number("pixel_shuffle_ratio", 0.5)),
        placeholder=config.integer("image_token_index", "image_token_id", default=200092),
        tile_size=_tile(processor, vision, processor_default=336, tower_default=448),
        min_tiles=1,
        max_tiles=_num_tiles(processor, "max_patches", 16),
        bfloat16=not {False}.intersection(processor.values.get(key) for key in ("do_rescale", "do_normalize")),
        **pixels,
    )


_FAMILIES: dict[str, Callable[[_Settings, _Settings], ImageInput]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen2_5_omni": _qwen_omni,
    "qwen2_5_omni_thinker": _qwen_omni,
    "qwen3_omni_moe": _qwen_omni,
    "qwen3_omni_moe_thinker": _qwen_omni,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mistral3": _pixtral,
    "llava": _pixtral,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "lfm2-vl": _lfm2_vl,
    "llama4": _llama4,
}
"""By `model_type` of config.json."""
