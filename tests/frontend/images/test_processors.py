"""Pictures and tokens of each family against `transformers`: its Pillow backend, with settings read from its files."""

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.image_input import read_image_input
from penstock.config.image_input import ImageInput
from penstock.frontend.images.pictures import cut
from penstock.frontend.images.placeholders import Placeholders
from penstock.frontend.images.reader import Part, Picture
from penstock.frontend.images.sizes import grid_of, layout_of
from penstock.frontend.images.tokens import ImageTokens
from penstock.models.patches import pixel_floats
from penstock.text.tokenizer import Tokenizer

SIZES = [(48, 64), (108, 192), (33, 77), (120, 81), (64, 48), (30, 170), (51, 51), (200, 150)]
IDS = {"image_token_id": 9, "image_token_index": 9, "boi_token_index": 7, "eoi_token_index": 8}
CONFIGS = {
    "qwen": {"model_type": "qwen3_vl", "vision_config": {"patch_size": 8}, **IDS},
    "smolvlm": {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 8}, **IDS},
    "gemma3": {"model_type": "gemma3", "mm_tokens_per_image": 16, "vision_config": {"patch_size": 7}, **IDS},
    "gemma4": {"model_type": "gemma4", "boi_token_id": 7, "eoi_token_id": 8, "vision_config": {"patch_size": 4}} | IDS,
    "pixtral": {"model_type": "mistral3", "vision_config": {"patch_size": 7, "model_type": "pixtral"}, **IDS},
    "internvl": {"model_type": "internvl", "vision_config": {"patch_size": [8, 8], "image_size": [48, 48]}, **IDS},
}
PROCESSORS = {
    "qwen": Qwen2VLImageProcessorPil(
        patch_size=8, image_mean=[0.5] * 3, size={"shortest_edge": 4096, "longest_edge": 16_384}
    ),
    "smolvlm": SmolVLMImageProcessorPil(size={"longest_edge": 160}, max_image_size={"longest_edge": 48}),
    "gemma3": Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
    "gemma4": Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4),
    "internvl": GotOcr2ImageProcessorPil(size={"height": 48, "width": 48}, crop_to_patches=True),
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
        assert [(picture.height, picture.width) for picture in pictures] == layout.sizes
        ours = [floats_of(picture, image_input) for picture in pictures]
        theirs = processor(images=[image], return_tensors="np")
        values, num_tokens = theirs["pixel_values"], sum(np.prod(grid_of(size, image_input)) for size in layout.sizes)
        if name == "qwen":
            ours, values = qwen_patches(ours[0], 8), np.asarray(values)
            assert num_tokens * 4 == len(values)
        elif name == "gemma4":
            patches = gemma4_patches(ours[0], 4)
            assert num_tokens == theirs["num_soft_tokens_per_image"][0]
            ours, values = patches, values[0][: len(patches)]
        elif name == "smolvlm":
            values = values[0]
        elif name == "internvl":
            assert theirs["num_patches"] == [len(pictures)]
        np.testing.assert_array_equal(np.stack(ours) if isinstance(ours, list) else ours, values)


@pytest.fixture
def pillow_for_torchvision(monkeypatch):
    """Lets processors that `transformers` has for torchvision alone resize with Pillow, as its others can."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    functional.pad = lambda images, padding, fill: torch.nn.functional.pad(images, (0, padding[2], 0, padding[3]))
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = ModuleType(name)
        module.__spec__, module.functional = ModuleSpec(name, None), functional
        monkeypatch.setitem(sys.modules, name, module)

    def resize(_, images, size, resample=None, **__):
        filter = Image.Resampling(resample)
        made = [
            Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size.width, size.height), filter)
            for image in images
        ]
        return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in made])

    def normalize(_, images, mean, std):
        mean, std = (torch.tensor(one, dtype=images.dtype)[:, None, None] for one in (mean, std))
        return images.sub(mean).div_(std)

    monkeypatch.setattr(TorchvisionBackend, "resize", resize)
    monkeypatch.setattr(TorchvisionBackend, "normalize", normalize)
    return monkeypatch


def processor_of(family, name, **settings):
    """A processor without its constructor, which needs torchvision; and its settings."""
    module = importlib.import_module(f"transformers.models.{family}.image_processing_{family}")
    kind = getattr(module, name)
    names = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_resize")
    return kind.__new__(kind), {
        **{name: getattr(kind, name) for name in names},
        "return_tensors": None,
        "disable_grouping": False,
        **settings,
    }


def read_input(folder, config, settings):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_image_input(open_checkpoint(str(folder)))


def pieces_of(size, image_input):
    layout = layout_of(*size, image_input)
    pictures = cut(picture_of(*size), layout, image_input.resample)
    assert [(picture.height, picture.width) for picture in pictures] == layout.sizes
    return layout, [np.asarray(picture) for picture in pictures]


def test_pictures_of_llama_4_equal_those_of_transformers_bit_for_bit(pillow_for_torchvision, tmp_path):
    config = {"model_type": "llama4", "vision_config": {"patch_size": 8, "image_size": 48}, **IDS}
    settings = {"size": {"height": 48, "width": 48}, "max_patches": 6}
    image_input = read_input(tmp_path, config, settings)
    given = settings | {"size": SizeDict(height=48, width=48), "resize_to_max_canvas": False, "rescale_factor": 1 / 255}
    processor, given = processor_of("llama4", "Llama4ImageProcessor", **given)
    floats = pixel_floats(image_input)
    for size in [*SIZES, (300, 90), (20, 20)]:
        layout, pictures = pieces_of(size, image_input)
        theirs = processor._preprocess([torch.from_numpy(np.array(picture_of(*size))).permute(2, 0, 1)], **given)
        assert theirs["aspect_ratios"][0].tolist() == [max(layout.rows, 1), max(layout.columns, 1)]
        ours = np.stack(
            [np.stack([floats[channel][picture[:, :, channel]] for channel in range(3)]) for picture in pictures]
        )
        np.testing.assert_array_equal(ours, theirs["pixel_values"][0].float().numpy())


def test_pictures_of_lfm2_equal_those_of_transformers_bit_for_bit(pillow_for_torchvision, tmp_path):
    config = {"model_type": "lfm2_vl", "vision_config": {"patch_size": 8}, **IDS}
    settings = {"tile_size": 48, "min_image_tokens": 4, "max_image_tokens": 9, "max_pixels_tolerance": 2.0}
    settings |= {"min_tiles": 2, "max_tiles": 6, "do_image_splitting": True, "use_thumbnail": True}
    image_input = read_input(tmp_path, config, settings)
    processor, given = processor_of("lfm2_vl", "Lfm2VlImageProcessor", **settings, encoder_patch_size=8)
    pillow_for_torchvision.setattr(TorchvisionBackend, "rescale_and_normalize", lambda _, images, *__: images)
    given |= {"downsample_factor": 2, "do_pad": True, "return_row_col_info": True}
    for size in [*SIZES, (300, 90), (20, 20)]:
        layout, pictures = pieces_of(size, image_input)
        theirs = processor._preprocess([torch.from_numpy(np.array(picture_of(*size))).permute(2, 0, 1)], **given)
        assert (theirs["image_rows"], theirs["image_cols"]) == ([max(layout.rows, 1)], [max(layout.columns, 1)])
        assert tuple(theirs["image_sizes"][0]) == layout.sizes[-1]
        shapes = theirs["spatial_shapes"].tolist()
        assert shapes == [[height // 8, width // 8] for height, width in layout.sizes]
        for own, other, (rows, columns) in zip(pictures, theirs["pixel_values"].numpy(), shapes, strict=True):
            cut_up = own.reshape(rows, 8, columns, 8, 3).swapaxes(1, 2).reshape(rows * columns, -1)
            np.testing.assert_array_equal(cut_up, other[: rows * columns])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token for each byte, each special token of the families, and two line breaks."""
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", *rows, "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    special += [
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<|image_start|>",
        "<|image_end|>",
        "<|img_thumbnail|>",
        "<|patch|>",
    ]
    special += [*[f"<|img_row_{r}_col_{c}|>" for r in (1, 2) for c in (1, 2, 3)], "<|tile_x_separator|>"]
    special += ["<|tile_y_separator|>"]
    special += ["<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"]
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
    kind = ImageTokens(image_input_of(tokenizer, "idefics3", placeholder="<image>"), tokenizer)
    tokens = Placeholders([kind])
    columns = 3 if rows else 0
    picture = Picture((Part(8, 8),) * (rows * columns + 1), rows, columns)
    prompt = tokens.place(tokenizer.encode("a\n<image>\nb"), [picture], "messages")
    theirs = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    assert prompt.token_ids == tokenizer.encode(f"a\n{theirs}\nb")
    placeholder = tokenizer.special_token("<image>")
    covered = [prompt.token_ids[image.start : image.start + image.count] for image in prompt.images]
    assert covered == [[placeholder] * 4] * (rows * columns + 1)


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (1, 2), (2, 3)])
@pytest.mark.parametrize("family", ["internvl", "lfm2_vl", "llama4"])
def test_tiles_of_other_families_are_written_as_transformers_writes_them(tokenizer, family, rows, columns):
    placeholder = {"internvl": "<IMG_CONTEXT>", "lfm2_vl": "<image>", "llama4": "<|patch|>"}[family]
    kind = ImageTokens(image_input_of(tokenizer, family, placeholder=placeholder), tokenizer)
    tokens = Placeholders([kind])
    picture = Picture(
        (Part(8, 8),) * (rows * columns) + (Part(8, 12) if family == "lfm2_vl" else Part(8, 8),), rows, columns
    )
    text = tokens.with_placeholders(f"a{kind.marker}b")
    prompt = tokens.place(tokenizer.encode(text), [picture], "messages")
    if family == "internvl":
        processor = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token=placeholder)
        processor.image_seq_length = 4
        theirs = InternVLProcessor.replace_image_token(processor, {"num_patches": [len(picture.parts)]}, 0)
    elif family == "lfm2_vl":
        processor = SimpleNamespace(image_token=placeholder, image_thumbnail_token="<|img_thumbnail|>")
        processor.image_start_token, processor.image_end_token = "<|image_start|>", "<|image_end|>"
        shape = (max(rows, 1), max(columns, 1))
        theirs = Lfm2VlProcessor._build_image_tokens(processor, *shape, 4, 6, True, True)
    else:
        theirs = Llama4Processor._prompt_split_image(None, (max(rows, 1), max(columns, 1)), 4)
    assert prompt.token_ids == tokenizer.encode(f"a{theirs}b")
    wanted = tokenizer.special_token(placeholder)
    assert all(set(prompt.token_ids[image.start : image.start + image.count]) == {wanted} for image in prompt.images)
    assert sum(image.count for image in prompt.images) == prompt.token_ids.count(wanted)
    assert len(prompt.images) == len(picture.parts)


def test_text_around_an_image_merges_with_that_of_the_prompt(tokenizer):
    """As `Gemma3Processor` has it: line breaks around the image, tokenised with those of the template."""
    settings = {"placeholder": "<image_soft_token>", "marker": "<start_of_image>", "around": "\n\n"}
    frame = {"begin": ("<start_of_image>",), "end": ("<end_of_image>",)}
    kind = ImageTokens(image_input_of(tokenizer, "gemma3", **settings, **frame), tokenizer)
    tokens = Placeholders([kind])
    text = tokens.with_placeholders("a\n<start_of_image>b")
    prompt = tokens.place(tokenizer.encode(text), [Picture((Part(8, 12),))], "messages")
    theirs = "a\n\n\n<start_of_image>" + "<image_soft_token>" * 6 + "<end_of_image>\n\nb"
    assert prompt.token_ids == tokenizer.encode(theirs)
    (image,) = prompt.images
    assert (image.rows, image.columns, image.count) == (2, 3, 6)


def test_rows_end_with_a_break_and_the_last_with_an_end(tokenizer):
    """As `PixtralProcessor` has it."""
    kind = ImageTokens(image_input_of(tokenizer, "pixtral", placeholder="[IMG]"), tokenizer)
    tokens = Placeholders([kind])
    prompt = tokens.place(tokenizer.encode("a[IMG]b[IMG]"), [Picture((Part(8, 12),)), Picture((Part(4, 4),))], "x")
    row = "[IMG]" * 3
    assert prompt.token_ids == tokenizer.encode(f"a{row}[IMG_BREAK]{row}[IMG_END]b[IMG][IMG_END]")
    assert [(image.start, image.count) for image in prompt.images] == [(1, 7), (10, 1)]


def test_a_token_beside_each_end_may_be_the_processors(tokenizer):
    """As `Gemma4Processor` has it."""
    frame = {"begin": ("<boi>",), "end": ("<eoi>",)}
    kind = ImageTokens(image_input_of(tokenizer, "gemma4", placeholder="<|image|>", **frame), tokenizer)
    tokens = Placeholders([kind])
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
        ImageInput("internvl", 8, 2, (0, 0, 0), (1, 1, 1), 9, tile_size=64, min_tiles=1, max_tiles=60),
        ImageInput("llama4", 8, 2, (0, 0, 0), (1, 1, 1), 9, tile_size=64, min_tiles=1, max_tiles=60),
        ImageInput(
            "lfm2_vl",
            8,
            2,
            (0, 0, 0),
            (1, 1, 1),
            9,
            min_pixels=4096,
            max_pixels=2**14,
            tile_size=64,
            min_tiles=2,
            max_tiles=60,
            tolerance=2.0,
        ),
    ):
        assert sum(np.prod(grid_of(size, one)) for size in layout_of(2000, 1500, one, is_low=True).sizes) <= 256
    gemma = ImageInput("gemma4", 16, 3, (0, 0, 0), (1, 1, 1), 9, max_tokens=280)
    assert np.prod(grid_of(layout_of(2000, 1500, gemma, is_low=True).sizes[0], gemma)) <= 70


def test_an_image_without_a_chat_template_has_the_frame_that_the_tokenizer_knows(tokenizer):
    omni = ImageTokens(image_input_of(tokenizer, "qwen2_vl", placeholder="<|IMAGE|>"), tokenizer)
    assert omni.bare_marker == "<|vision_bos|><|IMAGE|><|vision_eos|>"
    assert ImageTokens(image_input_of(tokenizer, "pixtral", placeholder="[IMG]"), tokenizer).bare_marker == "[IMG]"
