"""Sizes of pictures after resizing, and the tokens that they take: arithmetic alone, as in `transformers`.

header ──> (height, width) ──layout──> Layout: resizings, then tiles ──sizes──> what the vision tower encodes
"""

import math
import struct
from collections.abc import Sequence

from penstock.config.image_input import GEMMA4_TOKENS, ImageInput
from penstock.dataclass import dataclass

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
    """Sizes of its consecutive resizings."""
    rows: int = 0
    """Rows of tiles; the whole picture follows them in a tile's size. 0: it is not cut."""
    columns: int = 0
    tile_size: int = 0
    whole: Size | None = None
    """Size of the whole picture after the tiles, resized from the given one; None: a tile's, from the resized one."""
    canvas: Size | None = None
    """Size that black pixels to the right and below fill after resizing; None: there are none."""

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the tiles and of the whole picture, in the order of their tokens."""
        if not self.rows:
            return [self.canvas or self.resizings[-1]]
        tile = (self.tile_size, self.tile_size)
        return [*[tile] * (self.rows * self.columns), self.whole or tile]


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
    if image_input.processor == "internvl":
        return _internvl(height, width, image_input, most)
    if image_input.processor == "lfm2_vl":
        return _lfm2_vl(height, width, image_input, most)
    if image_input.processor == "llama4":
        return _llama4(height, width, image_input, most)
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
    return _within(height, width, (round(height / side) * side, round(width / side) * side), image_input, most)


def _within(height: int, width: int, rounded: Size, image_input: ImageInput, most: int) -> Size:
    """`rounded`, which is the picture's size in multiples of a merged patch's side, with an area within bounds."""
    side = image_input.patch_size * image_input.merge_size
    largest = min(image_input.max_pixels, most * side**2) if most else image_input.max_pixels
    least = min(image_input.min_pixels, largest)
    h, w = rounded
    if h * w > largest:
        scale = math.sqrt(height * width / largest)
        h, w = math.floor(height / scale / side) * side, math.floor(width / scale / side) * side
    elif h * w < least:
        scale = math.sqrt(least / (height * width))
        h, w = math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
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


def _internvl(height: int, width: int, image_input: ImageInput, most: int) -> Layout:
    """Tiles of the grid with the closest shape, then the whole picture; or the picture alone."""
    tile = image_input.tile_size
    tiles = _most_tiles(image_input, most)
    sizes = range(1, tiles + 1)
    grids = [(columns, rows) for columns in sizes for rows in sizes if image_input.min_tiles <= columns * rows <= tiles]
    columns, rows = _closest(height, width, tile, sorted(grids, key=math.prod))
    if rows * columns == 1:
        return Layout(((tile, tile),))
    return Layout(((rows * tile, columns * tile),), rows, columns, tile, whole=(tile, tile))


def _most_tiles(image_input: ImageInput, most: int, whole: int | None = None) -> int:
    """Most tiles of a picture that takes at most `most` tokens, 0 being as many as the processor allows.

    Args:
        whole: tokens of the whole picture; None: as many as a tile's.
    """
    per_tile = math.prod(grid_of((image_input.tile_size, image_input.tile_size), image_input))
    fitting = (most - (per_tile if whole is None else whole)) // per_tile
    return max(1, min(image_input.max_tiles, fitting)) if most else image_input.max_tiles


def _closest(height: int, width: int, tile: int, grids: Sequence[Size]) -> Size:
    """Columns and rows of the grid closest to the picture in shape; (1, 1) if there are none.

    Of several, a later one if the picture has more than half the area of its tiles.
    """
    nearest, best = math.inf, (1, 1)
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        is_filled = height * width > 0.5 * tile**2 * columns * rows
        if difference < nearest or (difference == nearest and is_filled):
            nearest, best = difference, (columns, rows)
    return best


def _lfm2_vl(height: int, width: int, image_input: ImageInput, most: int) -> Layout:
    """As Qwen2-VL's; a picture that is much larger is also cut into tiles."""
    side = image_input.patch_size * image_input.merge_size
    h, w = round(height / side) * side, round(width / side) * side
    whole = _within(height, width, (max(side, h), max(side, w)), image_input, most)
    area = max(image_input.patch_size, h) * max(image_input.patch_size, w)
    tiles = _most_tiles(image_input, most, math.prod(grid_of(whole, image_input)))
    least = image_input.min_tiles
    if area <= image_input.max_pixels * image_input.tolerance or tiles < max(2, least):
        return Layout((whole,))
    sizes = [range(1, count + 1) for count in range(least, tiles + 1)]
    # A set, as in `transformers`: its order decides between grids of one size.
    grids = {(w, h) for axis in sizes for w in axis for h in axis if least <= w * h <= tiles}
    tile = image_input.tile_size
    columns, rows = _closest(height, width, tile, sorted(grids, key=math.prod))
    return Layout(((rows * tile, columns * tile),), rows, columns, tile, whole=whole)


def _llama4(height: int, width: int, image_input: ImageInput, most: int) -> Layout:
    """The smallest canvas of tiles on which the picture need not shrink, or shrinks least; the rest of it is black."""
    tile = image_input.tile_size
    canvases = [(h * tile, w * tile) for h, w in _grids_by_shape(_most_tiles(image_input, most))]
    scales = [_float32(min(h / height, w / width)) for h, w in canvases]
    scale = min((candidate for candidate in scales if candidate >= 1), default=max(scales))
    fitting = [canvas for canvas, candidate in zip(canvases, scales, strict=True) if candidate == scale]
    canvas = min(fitting, key=math.prod)
    most_h, most_w = min(max(height, tile), canvas[0]), min(max(width, tile), canvas[1])
    by_height, by_width = most_h / height, most_w / width
    if by_width < by_height:
        resized = min(math.floor(height * by_width), most_h), most_w
    else:
        resized = most_h, min(math.floor(width * by_height), most_w)
    resized = max(1, resized[0]), max(1, resized[1])
    rows, columns = canvas[0] // tile, canvas[1] // tile
    if rows * columns == 1:
        return Layout((resized,), canvas=canvas)
    return Layout((resized,), rows, columns, tile, whole=(tile, tile), canvas=canvas)


def _grids_by_shape(most: int) -> list[Size]:
    """Rows and columns of all grids of up to `most` tiles; those of one shape follow one another."""
    by_shape: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_shape.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_shape.values() for grid in grids]


def _float32(value: float) -> float:
    """As `transformers` computes: scales of nearly the same size are equal."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
