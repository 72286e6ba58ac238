"""A picture's patches: their order and positions, and their pixels as floats. Plain numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.api.request import Image
    from penstock.config.image_input import ImageInput

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]


class PatchGrid(NamedTuple):
    """The positions of a picture's patches, in the tower's order.

    Patches of a square that is merged follow one another; with windows, so do the squares of a window.
    """

    height: int
    """Rows and columns of patches."""
    width: int
    rows: Ints
    """[patches]: of each patch, its row and its column."""
    columns: Ints
    windows: tuple[int, ...]
    """Patches of each window; all, if there are no windows."""
    restore: Ints | None
    """[merged patches]: index of each square of reading order in the order of patches; None: they are equal."""

    @classmethod
    def of(cls, height: int, width: int, merge: int, window: int | None) -> PatchGrid:
        """The grid of a picture of `height` by `width` patches, in squares of `merge`, and windows of `window`."""
        assert height % merge == width % merge == 0, "a picture's sides are multiples of a merged patch's"
        squares = np.arange(height // merge * (width // merge)).reshape(height // merge, -1)
        order = squares.ravel()
        lengths: tuple[int, ...] = (height * width,)
        restore: Ints | None = None
        if window is not None:
            side = window // merge
            parts = [
                squares[row : row + side, column : column + side].ravel()
                for row in range(0, squares.shape[0], side)
                for column in range(0, squares.shape[1], side)
            ]
            order, restore = np.concatenate(parts), np.argsort(np.concatenate(parts))
            lengths = tuple(len(part) * merge**2 for part in parts)
        inside = np.arange(merge)
        top, left = order // squares.shape[1] * merge, order % squares.shape[1] * merge
        rows = np.broadcast_to(top[:, None, None] + inside[:, None], (len(order), merge, merge)).ravel()
        columns = np.broadcast_to(left[:, None, None] + inside, (len(order), merge, merge)).ravel()
        return cls(height, width, rows, columns, lengths, restore)


def pixel_floats(pixels: ImageInput) -> Floats:
    """[3, 256]: the float of each channel's 8-bit values."""
    values = _rounded(np.arange(256, dtype=np.float32) * np.float32(pixels.rescale_factor), pixels)
    mean, std = (_rounded(np.array(statistic, np.float32)[:, None], pixels) for statistic in (pixels.mean, pixels.std))
    return _rounded(_rounded(values - mean, pixels) / std, pixels)


def _rounded(values: Floats, pixels: ImageInput) -> Floats:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32) if pixels.bfloat16 else values


def cut_patches(image: Image, grid: PatchGrid, size: int, floats: Floats, columns: int, extra: int = 0) -> Floats:
    """[patches + extra, columns]: channels, then rows and columns of pixels, then zeros; `extra` rows are zeros."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(grid.height, size, grid.width, size, 3)
    cut = pixels.transpose(0, 2, 4, 1, 3)[grid.rows, grid.columns].reshape(len(grid.rows), 3, size**2)
    made = np.zeros((len(cut) + extra, columns), np.float32)
    for channel in range(3):
        made[: len(cut), channel * size**2 : (channel + 1) * size**2] = floats[channel][cut[:, channel]]
    return made


def nearest_places(grid: PatchGrid, side: int) -> Ints:
    """[patches]: the place in a table of `side` by `side` at the same relative place in the picture."""
    return grid.rows * side // grid.height * side + grid.columns * side // grid.width


def bilinear_places(grid: PatchGrid, side: int) -> tuple[Ints, Floats]:
    """[patches, 4]: the four places around each patch in a table of `side` by `side`, and their weights."""
    (rows, row_weights), (columns, column_weights) = (
        _between(grid.rows, grid.height, side),
        _between(grid.columns, grid.width, side),
    )
    places = (rows[:, :, None] * side + columns[:, None]).reshape(-1, 4)
    return places, (row_weights[:, :, None] * column_weights[:, None]).reshape(-1, 4)


def _between(index: Ints, size: int, side: int) -> tuple[Ints, Floats]:
    """Each [patches, 2]: the table's entries on both sides of a patch along an axis, and their weights."""
    steps = np.linspace(0, side - 1, size, dtype=np.float32)[index] if size > 1 else np.zeros(len(index), np.float32)
    low = np.floor(steps).astype(np.int64)
    share = steps - low.astype(np.float32)
    return np.stack((low, np.minimum(low + 1, side - 1)), 1), np.stack((1 - share, share), 1)


def antialiased(table: Floats, grid: PatchGrid, side: int) -> Floats:
    """[patches, size]: a table [side * side, size] resampled to the picture's patches, as `torch` does bilinearly with
    antialiasing: each place is a weighted mean of those within a triangle that is as wide as a patch, at least."""
    by_row = _weighted(_triangles(side, grid.height), table.reshape(side, -1)).reshape(grid.height, side, -1)
    by_column = _weighted(_triangles(side, grid.width), by_row.swapaxes(0, 1).reshape(side, -1))
    return by_column.reshape(grid.width, grid.height, -1)[grid.columns, grid.rows]


def _weighted(weights: Floats, values: Floats) -> Floats:
    """`weights` [any, count] times `values` [count, size], added one after another: the same on each machine."""
    made = np.zeros((len(weights), values.shape[1]), np.float32)
    for weight, value in zip(weights.T, values, strict=True):
        made += weight[:, None] * value
    return made


def _triangles(count: int, wanted: int) -> Floats:
    """[wanted, count]: the weights for resampling an axis from `count` to `wanted` places, by triangles."""
    step = count / wanted
    half = max(step, 1.0)
    centres = (np.arange(wanted) + 0.5) * step
    distances = np.abs(np.arange(count) + 0.5 - centres[:, None]) / half
    weights = np.maximum(1 - distances, 0)
    triangles: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return triangles
