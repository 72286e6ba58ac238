"""Rotary positions of texts with images, against transformers'."""

import random
from array import array
from typing import Any

import pytest

from penstock.api.request import Image
from penstock.core.image_positions import Axes, add_image_positions, rope_shift

PLACEHOLDER = 151
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
