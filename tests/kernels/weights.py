"""Random rows of weights in every integer format."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import StoredType, WeightFormat
from penstock.kernels.linear.quantized import Quantized


def random_integers(rows: int, columns: int, format: WeightFormat, seed: int = 0) -> Quantized:
    """Any values, with scales that keep weights below 10."""
    rng = np.random.default_rng(seed)
    groups, supers = (rows, format.num_groups(columns)), (rows, format.num_supers(columns))
    minima = format.offset == "minimum"
    largest = 1.0 / 2**format.bits

    def stored(type: StoredType | None, shape: tuple[int, int], most: float) -> NDArray[Any] | None:
        if type is None:
            return None
        if type.endswith("int8"):
            made = rng.integers(-127 if type == "int8" else 0, 128 if type == "int8" else int(most), shape)
        else:
            made = rng.uniform(most / 10, most, shape)
        return made.astype(getattr(ml_dtypes, type, type))

    scales = stored(format.scale, groups, 256 if format.super_type else largest)
    assert scales is not None
    zeros = {"centre": 0, "zero": 2**format.bits, "fraction": 128, "minimum": 256 if format.super_type else 0.5}
    values = rng.integers(0, 2**format.bits, (rows, columns), np.uint8)
    if format.value == "e4m3":
        values[values & 127 == 127] = 0  # its bits of what is no number
    return Quantized(
        values,
        scales,
        stored(format.offset_type, groups, zeros[format.offset]),
        stored(format.super_type, supers, largest / 64),
        stored(format.super_type if minima else None, supers, 0.5 / 64),
    )
