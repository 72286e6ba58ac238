"""Rotary positions with three axes, for texts with images (M-RoPE). Tokens of sounds have those of text."""

from array import array
from collections.abc import Sequence

from penstock.api.request import Image

_INT32 = "i"

Axes = tuple["array[int]", "array[int]", "array[int]"]
"""Positions of consecutive tokens in time, height and width."""


def rope_shift(images: Sequence[Image]) -> int:
    """Offset from the index of a token after all images to its rotary position."""
    return sum(max(image.rows, image.columns) - image.count for image in images)


def add_image_positions(axes: Axes, images: Sequence[Image], first: int, last: int) -> None:
    """Append the rotary positions of a text's tokens from `first` to `last`.

    An image's tokens share one time, and have its rows and columns as height and width; text goes on after the largest
    (multimodal rotary embedding: Wang et al., "Qwen2-VL", 2024).
    """
    token = position = 0
    for image in images:
        if image.start >= last:
            break
        if image.is_sound:
            continue
        shift = position - token
        add_text_positions(axes, max(first, token) + shift, min(last, image.start) + shift)
        position, token = image.start + shift, image.start + image.count
        begin, end = max(first, image.start) - image.start, min(last, token) - image.start
        if begin < end:
            _add_image(axes, position, image.columns, begin, end)
        position += max(image.rows, image.columns)
    add_text_positions(axes, max(first, token) + position - token, last + position - token)


def add_text_positions(axes: Axes, first: int, last: int) -> None:
    """Append the same positions, from `first` to `last`, to each axis."""
    for axis in axes:
        axis.extend(range(first, last))


def _add_image(axes: Axes, position: int, columns: int, begin: int, end: int) -> None:
    """Append the positions of an image's tokens from `begin` to `end`, if the image is at `position`."""
    time, height, width = axes
    time.extend(array(_INT32, [position]) * (end - begin))
    for row in range(begin // columns, -(-end // columns)):
        left, right = max(0, begin - row * columns), min(columns, end - row * columns)
        height.extend(array(_INT32, [position + row]) * (right - left))
        width.extend(range(position + left, position + right))
