"""Rotary positions of texts with images, against transformers'."""

import random
from array import array
from typing import Any

import pytest

from penstock.api.request import Image
from penstock.core.image_positions import Axes, add_image_positions, rope_shift

PLACEHOLDER, START, SOUND, SOUND_START, END = range(151, 156)
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 200,
}


def qwen3_vl() -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    text = TEXT | {"head_dim": 16, "intermediate_size": 16, "rope_parameters": {"rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER))


def qwen2_5_vl() -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    text = TEXT | {"intermediate_size": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER))


def positions(images: list[Image], first: int, last: int) -> list[list[int]]:
    axes: Axes = (array("i"), array("i"), array("i"))
    add_image_positions(axes, images, first, last)
    return [axis.tolist() for axis in axes]


def qwen2_5_omni() -> Any:
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as settings
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as models

    return omni(models.Qwen2_5OmniPreTrainedModelForConditionalGeneration, settings.Qwen2_5OmniThinkerConfig)


def qwen3_omni() -> Any:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as settings
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as models

    return omni(models.Qwen3OmniMoePreTrainedModelForConditionalGeneration, settings.Qwen3OmniMoeThinkerConfig)


def omni(base: Any, config: Any) -> Any:
    """A thinker without weights: its positions follow from its config alone."""
    known = {"image_token_id": PLACEHOLDER, "audio_token_id": SOUND, "vision_start_token_id": START}
    made = base.__new__(base)
    made.__dict__ |= {"config": config(**known, audio_start_token_id=SOUND_START, video_token_id=190)}
    made.__dict__ |= {"spatial_merge_size": 2}
    return made


@pytest.mark.parametrize("make", [qwen2_5_omni, qwen3_omni])
def test_positions_of_images_and_sounds_in_any_order_equal_those_of_transformers(make: Any) -> None:
    torch = pytest.importorskip("torch")
    model, rng = make(), random.Random(4)
    for _ in range(40):
        tokens: list[int] = []
        images: list[Image] = []
        frames: list[int] = []
        for kind in rng.choices("is", k=rng.randrange(1, 6)):
            tokens += [7] * rng.randrange(9)
            if kind == "i":
                rows, columns = rng.randrange(1, 9), rng.randrange(1, 9)
                images.append(Image(len(tokens) + 1, rows * columns, rows, columns, 0, 0, b"", b""))
                tokens += [START, *[PLACEHOLDER] * (rows * columns), END]
            else:
                count = rng.randrange(1, 13)  # up to a chunk of Qwen3's
                frames.append(4 * count if make is qwen2_5_omni else 8 * count)
                images.append(Image(len(tokens) + 1, count, 1, count, 0, 0, b"", b"", is_sound=True))
                tokens += [SOUND_START, *[SOUND] * count, END]
        tokens += [7] * rng.randrange(1, 9)
        seen = [[1, 2 * image.rows, 2 * image.columns] for image in images if not image.is_sound]
        if not seen:
            continue  # then transformers counts tokens
        ids, end = torch.tensor([tokens]), len(tokens)
        lengths = torch.tensor(frames) if frames else None
        expected, shift = model.get_rope_index(
            ids, torch.tensor(seen), attention_mask=torch.ones_like(ids), audio_seqlens=lengths
        )
        whole = expected[:, 0].long().tolist()
        assert positions(images, 0, end) == whole
        first = rng.randrange(end)
        last = rng.randrange(first, end + 1)
        assert positions(images, first, last) == [axis[first:last] for axis in whole]
        assert rope_shift(images) == int(shift.item())


@pytest.mark.parametrize("make", [qwen3_vl, qwen2_5_vl])
def test_positions_equal_those_of_transformers_whole_in_chunks_and_after_the_images(make: Any) -> None:
    torch = pytest.importorskip("torch")
    model, rng = make(), random.Random(3)
    for _ in range(40):
        tokens: list[int] = []
        images: list[Image] = []
        for _ in range(rng.randrange(5)):
            tokens += [7] * rng.randrange(1, 9)
            rows, columns = rng.randrange(1, 9), rng.randrange(1, 9)
            images.append(Image(len(tokens), rows * columns, rows, columns, 0, 0, b"", b""))
            tokens += [PLACEHOLDER] * (rows * columns)
        tokens += [7] * rng.randrange(1, 9)
        ids, end = torch.tensor([tokens]), len(tokens)
        grids = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images]) if images else None
        expected, shift = model.get_rope_index(ids, (ids == PLACEHOLDER).int(), grids)
        whole = expected[:, 0].tolist()
        assert positions(images, 0, end) == whole
        first = rng.randrange(end)
        last = rng.randrange(first, end + 1)
        assert positions(images, first, last) == [axis[first:last] for axis in whole]
        assert rope_shift(images) == shift.item()
        assert positions(images, end, end + 2) == [[end + shift.item(), end + 1 + shift.item()]] * 3
