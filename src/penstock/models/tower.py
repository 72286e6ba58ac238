"""A vision tower: turns a picture's pixels into features, the vectors in place of the embeddings of its tokens.

    uint8 pixels -> floats (a table by channel and value) -> patches -> layers, some at a time -> features

Places of patches, rotary angles and resampled positions are computed with numpy, so they are the same with every table
of operations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic

import numpy as np

from penstock.kernels.array_types import A
from penstock.layers.attention import AttentionSpec
from penstock.layers.mlp import PlainMLPSpec
from penstock.layers.norm import Norm
from penstock.layers.portable_math import cosines_and_sines
from penstock.layers.rotary import rope_frequencies
from penstock.layers.spec import StepInputs
from penstock.models.decoder import DecoderLayer
from penstock.models.patches import PatchGrid, cut_patches, pixel_floats
from penstock.models.spec import TowerSpec
from penstock.models.stream import Residual, Stream
from penstock.models.tower_parts import Connector, PatchEmbedding, Places
from penstock.quantization.rows import RowRun

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.api.request import Image
    from penstock.config.image_input import ImageInput
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


class Tower(Generic[A]):
    """A vision tower with its connector. The loader fills the weights."""

    def __init__(self, spec: TowerSpec, pixels: ImageInput | None, factory: WeightFactory[A]) -> None:
        """
        Args:
            pixels: how 8-bit pixels become floats; None: in a build that only records sizes.
        """
        self.spec, self._ops, self._dtype = spec, factory.ops, factory.dtype
        self._constant = factory.constant
        self._floats = None if pixels is None else pixel_floats(pixels)
        if self._floats is not None and spec.from_minus_one:
            self._floats = 2 * (self._floats - np.float32(0.5))
        self._patches = PatchEmbedding(spec.patch, spec.hidden_size, factory)
        self._places = Places(spec, factory)
        self._class = None if spec.class_token is None else factory.tensor(spec.class_token, spec.hidden_size)
        self._first_norm = None if spec.first_norm is None else Norm(spec.first_norm, factory)
        self._layers = [DecoderLayer(layer, 1.0, factory) for layer in spec.layers]
        if spec.by_halves:
            _reorder_heads(spec, factory)
        if spec.layer_scales is not None:
            _scale_layers(spec, spec.layer_scales, factory)
        self._residual = Residual(1.0, factory.ops)
        self._last_norm = None if spec.last_norm is None else Norm(spec.last_norm, factory)
        self._connector = Connector(spec.connector, spec.merge**2, spec.hidden_size, factory)
        self._taps = {index: Connector(parts, spec.merge**2, spec.hidden_size, factory) for index, parts in spec.taps}

    def grid(self, image: Image) -> PatchGrid:
        """The places of a picture's patches."""
        size = self.spec.patch.size
        return PatchGrid.of(image.height // size, image.width // size, self.spec.merge, self.spec.window)

    def begin(self, image: Image, grid: PatchGrid) -> A:
        """The stream before the first layer, [patches, hidden_size]; with a class token it has one row more."""
        assert self._floats is not None
        extra, count = 0 if self._class is None else 1, len(grid.rows)
        cut = cut_patches(image, grid, self.spec.patch.size, self._floats, self._patches.columns, extra)
        x = self._patches(self._constant(cut, self._dtype))
        if self._class is not None:
            self._ops.scatter(self._class.view(1, -1), self._constant(np.array([count])), x)
        places = self._places.of(grid)
        if places is not None:
            x = self._ops.add_rows(places, x, 1.0)
        return x if self._first_norm is None else self._first_norm(x)

    def angles(self, grid: PatchGrid) -> A | None:
        """Cosines and sines at the places of the stream's rows, [rows, 2, dim / 2] float32; None: no rotary
        embedding."""
        found = _axial_angles(self.spec, grid)
        return None if found is None else self._constant(found)

    @property
    def num_angles(self) -> int:
        """Angles of a patch; 0: no rotary embedding."""
        return 0 if self.spec.rope is None else self.spec.rope.dim // 2

    def most_windows(self, num_patches: int) -> int:
        """Largest number of windows of so many patches; 0: there are none."""
        return 0 if self.spec.window is None else num_patches // self.spec.merge**2

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of the layers with taps."""
        return tuple(index for index, _ in self.spec.taps)

    def layer(self, index: int, x: A, angles: A | None, whole: Batch, windows: Batch, cache: AnyCache[A]) -> A:
        """The stream after a layer, in place of that before it.

        Also called once with recorded arrays: see `Decoder`.

        Args:
            whole, windows: the picture's patches as one sequence, and as one for each window.
        """
        spec, layer = self.spec, self._layers[index]
        known = {} if angles is None or spec.rope is None else {spec.rope: angles}
        batch = whole if spec.window is None or index in spec.whole_layers else windows
        mixed, residual = layer.mix_tokens(Stream(x), StepInputs(x, known, {}), batch, cache)
        return self._residual.added(layer.feed_forward(mixed, residual))

    def tap(self, index: int, x: A, grid: PatchGrid) -> A | None:
        """The features of a tap on layer `index`, whose output is `x`; None: there is none."""
        tap = self._taps.get(index)
        return None if tap is None else tap(x, grid.restore)

    def end(self, x: A, grid: PatchGrid) -> A:
        """The features [merged patches, size] in reading order, of the last layer's output."""
        x = x[: len(grid.rows)]  # without the class token
        return self._connector(x if self._last_norm is None else self._last_norm(x), grid.restore)


def _scale_layers(spec: TowerSpec, names: tuple[str, str], factory: WeightFactory) -> None:
    """Load the last maps of attention and MLPs times their factors: see `TowerSpec.layer_scales`."""
    for layer in spec.layers:
        assert layer.mixer is not None
        assert layer.feed_forward is not None
        attention, mlp = layer.mixer.part, layer.feed_forward.part
        assert isinstance(attention, AttentionSpec)
        assert isinstance(mlp, PlainMLPSpec)
        for matrix, factors in zip((attention.names.output, mlp.down), names, strict=True):
            factory.at(layer.name).scale_rows(matrix, factors, spec.hidden_size)


def _reorder_heads(spec: TowerSpec, factory: WeightFactory) -> None:
    """Load the rows of queries and keys so that halves of a head rotate with each other: see `TowerSpec.by_halves`."""
    for layer in spec.layers:
        assert layer.mixer is not None
        attention = layer.mixer.part
        assert isinstance(attention, AttentionSpec)
        below, names, size = factory.at(layer.name), attention.names, attention.head_dim
        for name, heads in zip(names.qkv, (attention.num_heads, attention.num_kv_heads), strict=False):
            below.reorder_rows(name, _halved_rows(heads, size))
        for name in (names.query_norm, names.key_norm):
            below.reorder_rows(name, _halved_rows(1, size))


def _halved_rows(heads: int, size: int) -> tuple[RowRun, ...]:
    """Each head's quarters, with the second and the third exchanged."""
    quarter = size // 4
    runs = []
    for head in range(heads):
        for given, first in enumerate((0, 2, 1, 3)):
            runs.append(RowRun(head * size + given * quarter, head * size + first * quarter, quarter))
    return tuple(runs)


def _axial_angles(spec: TowerSpec, grid: PatchGrid) -> NDArray[np.float32] | None:
    """[rows of the stream, 2, dim / 2]: see `TowerSpec.rope`. A class token is not rotated."""
    if spec.rope is None:
        return None
    axes = (grid.columns, grid.rows) if spec.columns_first else (grid.rows, grid.columns)
    if spec.alternating:
        frequencies, _ = rope_frequencies(spec.rope)
        parts = [frequencies[0::2], frequencies[1::2]]
    else:  # of a rotary embedding with half the dimensions
        frequencies, _ = rope_frequencies(replace(spec.rope, dim=spec.rope.dim // 2))
        parts = [frequencies, frequencies]
    places = [(place + spec.first_place)[:, None].astype(np.float32) for place in axes]
    angles = np.concatenate([place * part for place, part in zip(places, parts, strict=True)], 1)
    if spec.class_token is not None:
        angles = np.concatenate((angles, np.zeros_like(angles[:1])))
    return np.stack(cosines_and_sines(angles), 1).astype(np.float32)
