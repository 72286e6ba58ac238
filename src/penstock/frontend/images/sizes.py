"""Sizes of pictures after resizing, and the tokens that they take: arithmetic alone, as in `transformers`.

header ──> (height, width) ──layout──> Layout: resizings, then tiles ──sizes──> what the vision tower encodes
"""

import math
from dataclasses import dataclass

from penstock.config.image_input import GEMMA4_TOKENS, ImageInput

Size = tuple[int, int]
"""Height and width, in pixels."""
LOW_TOKENS = 256
"""Most tokens of a picture with `detail: low`, where the family lets it be smaller."""
_LONGEST_SIDE = 4096
"""Longest side of a picture that Idefics 3 cuts into tiles."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a picture is resized and cut."""

    resizings: tuple[Size, ...]
    """The sizes to which it is resized, one after another."""
    rows: int = 0
    """Rows of tiles; the whole picture follows them in a tile's size. 0: it is not cut."""
    columns: int = 0
    tile_size: int = 0

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the tiles and of the whole picture, in the order of their tokens."""
        if not self.rows:
            return [self.resizings[-1]]
        return [(self.tile_size, self.tile_size)] * (self.rows * self.columns + 1)


def grid_of(size: Size, image_input: ImageInput) -> tuple[int, int]:
    """Rows and columns of a picture's feature vectors."""
    side = image_input.patch_size * image_input.merge_size
    return size[0] // side, size[1] // side


def layout_of(height: int, width: int, image_input: ImageInput, is_low: bool = False) -> Layout:
    """The layout of a picture of this size.

    Args:
        is_low: whether the caller asked for `detail: low`.
    """
    most = image_input.max_tokens
    if is_low:
        low = GEMMA4_TOKENS[0] if image_input.processor == "gemma4" else LOW_TOKENS
        most = min(most, low) if most else low
    if image_input.processor == "idefics3":
        return _idefics3(height, width, image_input, most)
    if image_input.processor == "gemma3":
        return Layout(((image_input.size, image_input.size),))
    if image_input.processor == "gemma4":
        return Layout((_gemma4(height, width, image_input, most),))
    if image_input.processor == "pixtral":
        return Layout((_pixtral(height, width, image_input, most),))
    assert image_input.processor == "qwen2_vl", f"{image_input.processor} has no sizes"
    return Layout((_qwen2_vl(height, width, image_input, most),))


def _qwen2_vl(height: int, width: int, image_input: ImageInput, most: int) -> Size:
    """Multiples of a merged patch's side, with an area within bounds."""
    side = image_input.patch_size * image_input.merge_size
    largest = min(image_input.max_pixels, most * side**2) if most else image_input.max_pixels
    least = min(image_input.min_pixels, largest)
    h, w = round(height / side) * side, round(width / side) * side
    if h * w > largest:
        scale = math.sqrt(height * width / largest)
        return (
            max(side, math.floor(height / scale / side) * side),
            max(side, math.floor(width / scale / side) * side),
        )
    if h * w < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
    return max(side, h), max(side, w)


def _pixtral(height: int, width: int, image_input: ImageInput, most: int) -> Size:
    """Shrunk to the longest side, then rounded up to a multiple of a merged patch's side."""
    side = image_input.patch_size * image_input.merge_size
    longest = min(image_input.size, math.isqrt(most) * side) if most else image_input.size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    return ((height - 1) // side + 1) * side, ((width - 1) // side + 1) * side


def _gemma4(height: int, width: int, image_input: ImageInput, most: int) -> Size:
    """The largest multiples of a merged patch's side within `most` tokens, or the next lower count seen in training."""
    tokens = max((count for count in GEMMA4_TOKENS if count <= most), default=GEMMA4_TOKENS[0])
    side = image_input.patch_size * image_input.merge_size
    scale = math.sqrt(tokens * side**2 / (height * width))
    h, w = math.floor(scale * height / side) * side, math.floor(scale * width / side) * side
    if h == 0:
        return side, min(width // height, tokens) * side
    if w == 0:
        return min(height // width, tokens) * side, side
    return h, w


def _idefics3(height: int, width: int, image_input: ImageInput, most: int) -> Layout:
    """The longest side first, then multiples of a tile; with too many tokens for that, one tile alone."""
    tile = image_input.tile_size
    first = _idefics3_longest(height, width, image_input.size)
    single = Layout((first, (tile, tile)))
    ratio = first[1] / first[0]
    if first[1] >= first[0]:
        w = math.ceil(first[1] / tile) * tile
        h = math.ceil(int(w / ratio) / tile) * tile
    else:
        h = math.ceil(first[0] / tile) * tile
        w = math.ceil(int(h * ratio) / tile) * tile
    rows, columns = h // tile, w // tile
    per_tile = math.prod(grid_of((tile, tile), image_input))
    if most and (rows * columns + 1) * per_tile > most:
        return single
    if h > tile or w > tile:
        return Layout((first, (h, w)), rows, columns, tile)
    return Layout((first, (h, w)))


def _idefics3_longest(height: int, width: int, longest: int) -> Size:
    ratio = width / height
    if width >= height:
        h, w = int(longest / ratio), longest
        h += h % 2
    else:
        h, w = longest, int(longest * ratio)
        w += w % 2
    h, w = max(h, 1), max(w, 1)
    ratio = w / h
    if w >= h and w > _LONGEST_SIDE:
        h, w = int(_LONGEST_SIDE / ratio), _LONGEST_SIDE
    elif h > w and h > _LONGEST_SIDE:
        h, w = _LONGEST_SIDE, int(_LONGEST_SIDE * ratio)
    return max(h, 1), max(w, 1)
