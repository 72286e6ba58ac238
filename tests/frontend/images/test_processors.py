"""Pictures and tokens of each family against `transformers`: its Pillow backend, with settings read from its files."""

import json

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.image_input import read_image_input
from penstock.config.image_input import ImageInput
from penstock.frontend.images.pictures import cut
from penstock.frontend.images.reader import Part, Picture
from penstock.frontend.images.sizes import grid_of, layout_of
from penstock.frontend.images.tokens import ImageTokens
from penstock.text.tokenizer import Tokenizer

SIZES = [(48, 64), (108, 192), (33, 77), (120, 81), (64, 48), (30, 170), (51, 51), (200, 150)]
IDS = {"image_token_id": 9, "image_token_index": 9, "boi_token_index": 7, "eoi_token_index": 8}
CONFIGS = {
    "qwen": {"model_type": "qwen3_vl", **IDS},
    "smolvlm": {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 8}, **IDS},
    "gemma3": {"model_type": "gemma3", "mm_tokens_per_image": 16, "vision_config": {"patch_size": 7}, **IDS},
    "gemma4": {"model_type": "gemma4", "boi_token_id": 7, "eoi_token_id": 8, **IDS},
    "pixtral": {"model_type": "mistral3", "vision_config": {"patch_size": 7, "model_type": "pixtral"}, **IDS},
}
PROCESSORS = {
    "qwen": Qwen2VLImageProcessorPil(
        patch_size=8, image_mean=[0.5] * 3, size={"shortest_edge": 4096, "longest_edge": 16_384}
    ),
    "smolvlm": SmolVLMImageProcessorPil(size={"longest_edge": 160}, max_image_size={"longest_edge": 48}),
    "gemma3": Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
    "gemma4": Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4),
    "pixtral": PixtralImageProcessorPil(size={"longest_edge": 100}, patch_size={"height": 14, "width": 14}),
}


def picture_of(height, width):
    """A picture with edges, gradients and noise."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([127 + 120 * np.sin(x / 17 + y / 31), 255 * x / width, 255 * ((x // 23 + y // 29) % 2)], -1)
    noise = np.random.default_rng(1).normal(0, 12, base.shape)
    return Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8))


def floats_of(picture, image_input):
    """float32 [3, height, width]: what the engine's table makes of 8-bit pixels."""
    pixels = (np.asarray(picture).astype(np.float64) * image_input.rescale_factor).astype(np.float32)
    mean, std = (np.asarray(values, np.float32) for values in (image_input.mean, image_input.std))
    return ((pixels - mean) / std).transpose(2, 0, 1)


def qwen_patches(floats, size):
    height, width = (side // (2 * size) for side in floats.shape[1:])
    cut_up = floats.reshape(3, height, 2, size, width, 2, size).transpose(1, 4, 2, 5, 0, 3, 6)
    twice = np.broadcast_to(cut_up[:, :, :, :, :, None], (*cut_up.shape[:5], 2, size, size))
    return twice.reshape(4 * height * width, -1)


def gemma4_patches(floats, size):
    height, width = (side // size for side in floats.shape[1:])
    return floats.reshape(3, height, size, width, size).transpose(1, 3, 2, 4, 0).reshape(height * width, -1)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pictures_equal_those_of_transformers_bit_for_bit(name, tmp_path):
    config, processor = dict(CONFIGS[name]), PROCESSORS[name]
    if name == "pixtral":
        config["spatial_merge_size"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(processor.to_json_string())
    image_input = read_image_input(open_checkpoint(str(tmp_path)))
    for size in SIZES:
        image = picture_of(*size)
        layout = layout_of(*size, image_input)
        pictures = cut(image, layout, image_input.resample)
        assert [(one.height, one.width) for one in pictures] == layout.sizes
        ours = [floats_of(one, image_input) for one in pictures]
        theirs = processor(images=[image], return_tensors="np")
        values, num_tokens = theirs["pixel_values"], sum(np.prod(grid_of(one, image_input)) for one in layout.sizes)
        if name == "qwen":
            ours, values = qwen_patches(ours[0], 8), np.asarray(values)
            assert num_tokens * 4 == len(values)
        elif name == "gemma4":
            patches = gemma4_patches(ours[0], 4)
            assert num_tokens == theirs["num_soft_tokens_per_image"][0]
            ours, values = patches, values[0][: len(patches)]
        elif name == "smolvlm":
            values = values[0]
        np.testing.assert_array_equal(np.stack(ours) if isinstance(ours, list) else ours, values)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token for each byte, each special token of the families, and two line breaks."""
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", *rows, "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    special += ["<start_of_image>", "<image_soft_token>", "<end_of_image>", "<boi>", "<|image|>", "<eoi>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    made = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_path(folder)


def image_input_of(tokenizer, processor, **settings):
    """Of tiles of 2 x 2 feature vectors, by the texts of its tokens."""
    ids = {
        name: tuple(map(tokenizer.special_token, value)) if isinstance(value, tuple) else tokenizer.special_token(value)
        for name, value in settings.items()
        if name != "around"
    }
    return ImageInput(
        processor=processor,
        patch_size=2,
        merge_size=2,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        **(settings | ids),
    )


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_tiles_are_written_as_transformers_writes_them(tokenizer, rows):
    tokens = ImageTokens(image_input_of(tokenizer, "idefics3", placeholder="<image>"), tokenizer)
    columns = 3 if rows else 0
    picture = Picture((Part(8, 8),) * (rows * columns + 1), rows, columns)
    prompt = tokens.place(tokenizer.encode("a\n<image>\nb"), [picture], "messages")
    theirs = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    assert prompt.token_ids == tokenizer.encode(f"a\n{theirs}\nb")
    placeholder = tokenizer.special_token("<image>")
    covered = [prompt.token_ids[one.start : one.start + one.count] for one in prompt.images]
    assert covered == [[placeholder] * 4] * (rows * columns + 1)


def test_text_around_an_image_merges_with_that_of_the_prompt(tokenizer):
    """As `Gemma3Processor` has it: line breaks around the image, tokenised with those of the template."""
    settings = {"placeholder": "<image_soft_token>", "marker": "<start_of_image>", "around": "\n\n"}
    frame = {"begin": ("<start_of_image>",), "end": ("<end_of_image>",)}
    tokens = ImageTokens(image_input_of(tokenizer, "gemma3", **settings, **frame), tokenizer)
    text = tokens.with_placeholders("a\n<start_of_image>b")
    prompt = tokens.place(tokenizer.encode(text), [Picture((Part(8, 12),))], "messages")
    theirs = "a\n\n\n<start_of_image>" + "<image_soft_token>" * 6 + "<end_of_image>\n\nb"
    assert prompt.token_ids == tokenizer.encode(theirs)
    (image,) = prompt.images
    assert (image.rows, image.columns, image.count) == (2, 3, 6)


def test_rows_end_with_a_break_and_the_last_with_an_end(tokenizer):
    """As `PixtralProcessor` has it."""
    tokens = ImageTokens(image_input_of(tokenizer, "pixtral", placeholder="[IMG]"), tokenizer)
    prompt = tokens.place(tokenizer.encode("a[IMG]b[IMG]"), [Picture((Part(8, 12),)), Picture((Part(4, 4),))], "x")
    row = "[IMG]" * 3
    assert prompt.token_ids == tokenizer.encode(f"a{row}[IMG_BREAK]{row}[IMG_END]b[IMG][IMG_END]")
    assert [(one.start, one.count) for one in prompt.images] == [(1, 7), (10, 1)]


def test_a_token_beside_each_end_may_be_the_processors(tokenizer):
    """As `Gemma4Processor` has it."""
    frame = {"begin": ("<boi>",), "end": ("<eoi>",)}
    tokens = ImageTokens(image_input_of(tokenizer, "gemma4", placeholder="<|image|>", **frame), tokenizer)
    text = tokens.with_placeholders("a<|image|>b")
    prompt = tokens.place(tokenizer.encode(text), [Picture((Part(4, 8),))], "x")
    assert prompt.token_ids == tokenizer.encode("a<boi><|image|><|image|><eoi>b")


def test_few_tokens_suffice_with_low_detail():
    qwen = ImageInput("qwen2_vl", 8, 2, (0, 0, 0), (1, 1, 1), 9, min_pixels=4096, max_pixels=2**24)
    assert np.prod(grid_of(layout_of(2000, 1500, qwen).sizes[0], qwen)) > 10_000
    for one in (
        qwen,
        ImageInput("pixtral", 8, 2, (0, 0, 0), (1, 1, 1), 9, size=1540),
        ImageInput("idefics3", 8, 2, (0, 0, 0), (1, 1, 1), 9, size=2048, tile_size=256),
    ):
        assert sum(np.prod(grid_of(size, one)) for size in layout_of(2000, 1500, one, is_low=True).sizes) <= 256
    gemma = ImageInput("gemma4", 16, 3, (0, 0, 0), (1, 1, 1), 9, max_tokens=280)
    assert np.prod(grid_of(layout_of(2000, 1500, gemma, is_low=True).sizes[0], gemma)) <= 70
