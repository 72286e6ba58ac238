"""Tiny models that see, made by `transformers`, with prompts of two pictures; and a driver of Penstock's runner."""

import hashlib
import itertools
import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from penstock.api.request import Image
from penstock.core.plan import EncodePart, ForwardPlan, ImageRows, NewBlocks, StepResult
from penstock.kernels.ops import Ops
from penstock.layers.encoder_head import wide
from penstock.models.tower import Tower
from penstock.runner.device_runner import DeviceRunner
from tests.support.families import DELTA, GEMMA4, LLAMA4
from tests.support.stepping import plan_of, settings_for

if TYPE_CHECKING:
    from tests.support.omni import Omni
    from tests.support.sounds import Heard

Pixels = NDArray[np.uint8]
PLACEHOLDER = 151
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A kind of model: its configuration, and how `transformers` takes its pictures."""

    config: dict[str, Any]
    architecture: str
    sizes: tuple[tuple[int, int], ...]
    """Height and width of the two pictures."""
    merged: int
    """Pixels of a merged patch."""
    inputs: Callable[[list[Any]], dict[str, Any]]
    """From pictures [3, height, width] float32 to the model's arguments."""
    processor: dict[str, Any] = field(default_factory=dict)
    joined: bool = False
    """Whether an image's tokens attend to each other."""
    mrope: bool = False
    pixels: torch.dtype = torch.float32
    """In which the processor turns pixels into numbers."""
    project: Callable[[Any, Any], torch.Tensor] | None = None
    """From the model and the output of `get_image_features` to features; None: they are in the output."""


def as_patches(pictures: list[Any], size: int, merge: int) -> dict[str, Any]:
    """The arguments of Qwen's models: patches in squares, each pixel of two equal frames."""
    cut, grids = [], []
    for picture in pictures:
        height, width = (side // size for side in picture.shape[1:])
        parts = picture.reshape(3, height // merge, merge, size, width // merge, merge, size)
        rows = parts.permute(1, 4, 2, 5, 0, 3, 6).reshape(height * width, 3, 1, size, size)
        cut.append(rows.repeat(1, 1, 2, 1, 1).reshape(height * width, -1))
        grids.append([1, height, width])
    return {"pixel_values": torch.cat(cut), "image_grid_thw": torch.tensor(grids)}


def _padded(pictures: list[Any]) -> dict[str, Any]:
    """The arguments of Pixtral: pictures in the upper left corners of equal ones."""
    sizes = [tuple(picture.shape[1:]) for picture in pictures]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    pixels = torch.zeros(len(pictures), 3, height, width)
    for place, one in zip(pixels, pictures, strict=True):
        place[:, : one.shape[1], : one.shape[2]] = one
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _positioned(pictures: list[Any], size: int) -> dict[str, Any]:
    """The arguments of Gemma 4: patches of pixels from 0 to 1, with their columns and rows."""
    cut, places = [], []
    for picture in pictures:
        height, width = (side // size for side in picture.shape[1:])
        parts = ((picture + 1) / 2).reshape(3, height, size, width, size)
        cut.append(parts.permute(1, 3, 2, 4, 0).reshape(height * width, -1))
        places.append(torch.tensor([(column, row) for row in range(height) for column in range(width)]))
    most = max(map(len, cut))
    pad = torch.nn.functional.pad
    return {
        "pixel_values": torch.stack([pad(one, (0, 0, 0, most - len(one))) for one in cut]),
        "image_position_ids": torch.stack([pad(place, (0, 0, 0, most - len(place)), value=-1) for place in places]),
    }


def _in_rows(pictures: list[Any], size: int) -> dict[str, Any]:
    """The arguments of LFM2-VL: patches, filled up to one number, with the shape of each picture."""
    cut = []
    for picture in pictures:
        height, width = (side // size for side in picture.shape[1:])
        parts = picture.reshape(3, height, size, width, size)
        cut.append(parts.permute(1, 3, 2, 4, 0).reshape(height * width, -1))
    most = max(map(len, cut))
    return {
        "pixel_values": torch.stack([torch.nn.functional.pad(one, (0, 0, 0, most - len(one))) for one in cut]),
        "pixel_attention_mask": torch.tensor([[int(index < len(one)) for index in range(most)] for one in cut]),
        "spatial_shapes": torch.tensor([[side // size for side in picture.shape[1:]] for picture in pictures]),
    }


_TOKENS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 157,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "patch_size": 4,
}
_SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
_LLAMA = {key: value for key, value in _TEXT.items() if key != "head_dim"} | {"model_type": "llama"}

FAMILIES: dict[str, Family] = {
    "SmolVLM": Family(
        {"text_config": _LLAMA, "vision_config": _SIGLIP, "scale_factor": 2, "image_token_id": PLACEHOLDER},
        "SmolVLMForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)[None]},
        processor={"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}},
    ),
    "Idefics 3": Family(
        {"text_config": _LLAMA, "vision_config": _SIGLIP | {"num_attention_heads": 4}, "image_token_id": PLACEHOLDER},
        "Idefics3ForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)[None]},
        processor={"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}},
    ),
    "Qwen3-VL": Family(
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE},
            "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1]},
            **_TOKENS,
        },
        "Qwen3VLForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(as_patches, size=4, merge=2),
        mrope=True,
    ),
    "Qwen3-VL mixture": Family(
        {
            "text_config": _TEXT
            | {"rope_parameters": _MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [1]},
            **_TOKENS,
        },
        "Qwen3VLMoeForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(as_patches, size=4, merge=2),
        mrope=True,
    ),
    "Qwen3.5": Family(
        {
            "text_config": _TEXT
            | DELTA
            | {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
            "vision_config": {key: value for key, value in _QWEN_TOWER.items() if key != "deepstack_visual_indexes"},
            **_TOKENS,
        },
        "Qwen3_5ForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(as_patches, size=4, merge=2),
        mrope=True,
    ),
    "Qwen2.5-VL": Family(
        {
            "text_config": {key: value for key, value in _TEXT.items() if key != "head_dim"}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}},
            "vision_config": {key: value for key, value in _QWEN_TOWER.items() if key != "num_position_embeddings"}
            | {"window_size": 16, "fullatt_block_indexes": [1]},
            **_TOKENS,
        },
        "Qwen2_5_VLForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(as_patches, size=4, merge=2),
        mrope=True,
    ),
    "Qwen2-VL": Family(
        {
            "text_config": {key: value for key, value in _TEXT.items() if key != "head_dim"}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}},
            "vision_config": {
                "depth": 3,
                "embed_dim": 48,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            **_TOKENS,
        },
        "Qwen2VLForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(as_patches, size=4, merge=2),
        mrope=True,
    ),
    "InternVL": Family(
        {
            "text_config": _TEXT | {"model_type": "qwen3"},
            "vision_config": _SIGLIP
            | {"image_size": [32, 32], "patch_size": [4, 4], "attention_bias": True, "layer_scale_init_value": 0.5},
            "image_token_id": PLACEHOLDER,
            "image_seq_length": 16,
        },
        "InternVLForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)},
    ),
    "InternVL with InternViT-6B": Family(
        {
            "text_config": _LLAMA,
            "vision_config": _SIGLIP | {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
            "image_token_id": PLACEHOLDER,
            "image_seq_length": 16,
        },
        "InternVLForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)},
    ),
    "LFM2-VL": Family(
        {
            "text_config": {key: value for key, value in _TEXT.items() if key != "head_dim"}
            | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
            "vision_config": {key: value for key, value in _SIGLIP.items() if key != "image_size"}
            | {"model_type": "siglip2_vision_model", "num_patches": 49, "vision_use_head": False},
            "image_token_id": PLACEHOLDER,
            "projector_hidden_size": 56,
        },
        "Lfm2VlForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(_in_rows, size=4),
        processor={"tile_size": 32, "max_image_tokens": 16},
    ),
    "Llama 4": Family(
        {
            "text_config": {
                key: value for key, value in _TEXT.items() if key not in ("intermediate_size", "vocab_size")
            }
            | LLAMA4
            | {"vocab_size": 160, "num_hidden_layers": 4, "no_rope_layer_interval": 2},
            "vision_config": _SIGLIP
            | {
                "intermediate_size": 192,
                "vision_output_dim": 56,
                "projector_input_dim": 56,
                "projector_output_dim": 56,
            },
            "image_token_index": PLACEHOLDER,
            "boi_token_index": 152,
            "eoi_token_index": 153,
        },
        "Llama4ForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)},
        pixels=torch.bfloat16,
        project=lambda model, out: model.multi_modal_projector(out.last_hidden_state),
    ),
    "Gemma 3": Family(
        {
            "text_config": _TEXT
            | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"query_pre_attn_scalar": 16},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 16,
            "image_token_index": PLACEHOLDER,
            "boi_token_index": 152,
            "eoi_token_index": 153,
        },
        "Gemma3ForConditionalGeneration",
        ((32, 32), (32, 32)),
        8,
        lambda pictures: {"pixel_values": torch.stack(pictures)},
        joined=True,
    ),
    "Gemma 4": Family(
        {
            "text_config": _TEXT
            | GEMMA4
            | {"hidden_size": 64, "head_dim": 16, "use_bidirectional_attention": "vision", "pad_token_id": 3},
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 72,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 32,
                "use_clipped_linears": True,
                "standardize": True,
            },
            "image_token_id": PLACEHOLDER,
            "boi_token_id": 152,
            "eoi_token_id": 153,
            "audio_token_id": 155,
            "video_token_id": 156,
        },
        "Gemma4ForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        partial(_positioned, size=4),
        processor={"max_soft_tokens": 70, "pooling_kernel_size": 2, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        joined=True,
    ),
    "Pixtral": Family(
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 64,
                "intermediate_size": 72,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "patch_size": 8,
                "image_size": 64,
                "hidden_act": "silu",
            },
            "image_token_index": PLACEHOLDER,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "LlavaForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        _padded,
        processor={"size": {"longest_edge": 64}},
    ),
    "Mistral 3": Family(
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 64,
                "intermediate_size": 72,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 64,
            },
            "image_token_index": PLACEHOLDER,
        },
        "Mistral3ForConditionalGeneration",
        ((24, 40), (16, 24)),
        8,
        _padded,
        processor={"size": {"longest_edge": 64}},
    ),
}


@dataclass(frozen=True)
class Seen:
    """A checkpoint in a folder, its model of `transformers`, and a prompt with two pictures."""

    family: Family
    folder: Path
    model: Any
    tokens: list[int]
    pictures: list[Pixels]
    images: list[Image]

    def arguments(self, tokens: list[int]) -> dict[str, Any]:
        """The reference's arguments for these tokens, which have all pictures."""
        values = [torch.from_numpy(picture).permute(2, 0, 1).to(self.family.pixels) for picture in self.pictures]
        floats = [((one * (1 / 255) - 0.5) / 0.5).float() for one in values]
        ids = torch.tensor([tokens])
        given = {"input_ids": ids, **self.family.inputs(floats)}
        if self.family.mrope or "image_position_ids" in given:
            given["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        elif self.family.joined:
            given["token_type_ids"] = (ids == PLACEHOLDER).int()
        return given

    def features(self) -> list[list[torch.Tensor]]:
        """The reference's features of each picture, and of each tap."""
        given = self.arguments(self.tokens)
        known = {key: value for key, value in given.items() if key.startswith(("pixel_", "image_", "spatial_"))}
        with torch.no_grad():
            if self.family.project is not None:
                found = [self.family.project(self.model, self.model.get_image_features(**known))]
                return self._divided(found)
            out = self.model.model.get_image_features(**known)
        found = out if isinstance(out, (tuple, list)) else (out.pooler_output, *getattr(out, "deepstack_features", ()))
        return self._divided(found)

    def _divided(self, found: Sequence[Any]) -> list[list[torch.Tensor]]:
        """By pictures, features that come for all of them together or in one tensor each."""
        counts = [image.count for image in self.images]
        flat = [torch.cat(list(one)) if isinstance(one, (tuple, list)) else one.flatten(0, -2) for one in found]
        return [[one.split(counts)[index].float() for one in flat] for index in range(len(counts))]

    def logits(self) -> torch.Tensor:
        """The reference's logits of all tokens."""
        with torch.no_grad():
            return self.model(**self.arguments(self.tokens)).logits[0].float()

    def greedy(self, count: int) -> list[int]:
        """The reference's likeliest tokens after the prompt."""
        tokens = list(self.tokens)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(self.model(**self.arguments(tokens)).logits[0, -1].argmax()))
        return tokens[-count:]


def make(name: str, folder: Path, dtype: str = "float32") -> Seen:
    """Write a random checkpoint of a family to `folder`."""
    family = FAMILIES[name]
    torch.manual_seed(3)
    maker = getattr(transformers, family.architecture)
    model = maker(maker.config_class(**family.config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for index, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith(("_min", "_max")):  # of Gemma 4
            buffer.fill_((-1.5 if name.endswith("_min") else 1.6) * (1 + index % 5 / 10))
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_(name.endswith("scale") + torch.randn_like(buffer) * 0.1)
    if dtype != "float32":  # Llama 4's complex angles would become real
        model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 4, "merge_size": 2}
    processor |= {"size": {"longest_edge": 4096, "shortest_edge": 64, "height": 32, "width": 32}} | family.processor
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    rng = np.random.default_rng(7)
    pictures = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in family.sizes]
    tokens, images = [5, 9, 11], []
    for pixels in pictures:
        rows, columns = (side // family.merged for side in pixels.shape[:2])
        tokens.append(152)
        images.append(image_of(pixels, len(tokens), rows, columns))
        tokens += [PLACEHOLDER] * (rows * columns) + [153, 7, 8]
    return Seen(family, folder, model, [*tokens, 12, 13, 14], pictures, images)


def image_of(pixels: Pixels, start: int, rows: int, columns: int) -> Image:
    height, width = pixels.shape[:2]
    content = pixels.tobytes()
    digest = hashlib.sha256(struct.pack("<II", height, width) + content).digest()
    return Image(start, rows * columns, rows, columns, height, width, digest, content)


def axis_positions(images: Sequence[Image], first: int, last: int) -> "array[int]":
    """The positions of M-RoPE of the tokens `first` to `last`: by time, by row, then by column; sounds are text."""
    places: list[tuple[int, int, int]] = []
    at = 0
    for image in images:
        if image.is_sound:
            continue
        while len(places) < image.start:
            places.append((at, at, at))
            at += 1
        places += [(at, at + row, at + column) for row in range(image.rows) for column in range(image.columns)]
        at += max(image.rows, image.columns)
    while len(places) < last:
        places.append((at, at, at))
        at += 1
    return array("i", [place[axis] for axis in range(3) for place in places[first:last]])


class Looker:
    """A runner that computes one text with pictures or sounds, in any chunks, with layers of the tower in any parts."""

    def __init__(self, seen: "Seen | Heard | Omni", ops: Ops, **options: Any) -> None:
        self.seen = seen
        checkpoint, self.settings = settings_for(seen.folder, **({"kv_cache_memory": "4MiB"} | options))
        self.runner = DeviceRunner(checkpoint, self.settings, ops)
        self.computed = 0

    def encode(self, image: Image, cuts: Sequence[int] = ()) -> list[StepResult]:
        """Compute an image's features, in steps that end after `cuts` layers."""
        bounds = [0, *cuts, self.settings.towers[image.kind].num_layers]
        return [
            self.run(ForwardPlan([], [], array("i"), [], [], [], [], encode=[part]))
            for part in (
                EncodePart(image.digest, first, last, None if first else image)
                for first, last in itertools.pairwise(bounds)
            )
        ]

    def run(self, forward: ForwardPlan) -> StepResult:
        """Execute a step without samples."""
        plan = plan_of([], [])
        plan.forward = forward
        return self.runner.execute(plan)

    def features(self, image: Image) -> list[torch.Tensor]:
        """The features of an image, and those of taps on the tower's layers."""
        assert self.runner.images is not None
        ops = self.runner.ops
        with ops.inference():
            found = self.runner.images._features[image.digest]
            return [torch.from_numpy(np.array(ops.on_host(wide(one, ops)))) for one in found]

    def holds(self, image: Image) -> bool:
        """Whether the runner has an image's features."""
        assert self.runner.images is not None
        return image.digest in self.runner.images._features

    def poison(self) -> None:
        """Let black pixels be NaN."""
        assert self.runner.images is not None
        tower = self.runner.images.towers["image"]
        assert isinstance(tower, Tower)
        floats = tower._floats
        assert floats is not None
        floats[:, 0] = np.nan

    def step(self, tokens: Sequence[int], *, plain: bool = False) -> torch.Tensor:
        """Compute the next tokens; returns their logits.

        Args:
            plain: as text.
        """
        first, last = self.computed, self.computed + len(tokens)
        groups = range(len(self.settings.memory.groups))
        plan = plan_of([(first, tokens)], [], [len(tokens) - 1], [last])
        blocks = array("i", range(1, 1 + -(-len(self.seen.tokens + [0] * 8) // self.settings.memory.block_size)))
        if not first:
            plan.forward.new_blocks += [NewBlocks(group, 0, 0, blocks) for group in groups]
        if not plain:
            plan.forward.image_rows = list(self._rows(first, last))
        if self.seen.family.mrope and not plain:
            plan.forward.rope_positions = axis_positions(self.seen.images, first, last)
        if self.seen.family.joined and not plain:
            ends = [index + 1 for index in range(first, last)]
            for image in self.seen.images:
                for index in range(max(first, image.start), min(last, image.start + image.count)):
                    ends[index - first] = image.start + image.count
            plan.forward.seen_ends = array("i", ends)
        self.runner.execute(plan)
        self.computed = last
        with self.runner.ops.inference():
            rows = self.runner._forward.logits(list(range(len(tokens))))
            return torch.from_numpy(np.array(self.runner.ops.on_host(rows)))

    def _rows(self, first: int, last: int) -> "Sequence[ImageRows]":
        found = []
        for image in self.seen.images:
            begin, end = max(first, image.start), min(last, image.start + image.count)
            if begin < end:
                found.append(
                    ImageRows(image.digest, begin - image.start, array("i", range(begin - first, end - first)))
                )
        return found
