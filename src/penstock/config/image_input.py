"""How a checkpoint takes images: its processor's settings and the tokens that stand for an image. Plain data."""

from typing import Literal

from penstock.dataclass import dataclass

Processor = Literal["qwen2_vl", "idefics3", "gemma3", "gemma4", "pixtral", "lfm2_vl", "internvl", "llama4"]
GEMMA4_TOKENS = (70, 140, 280, 560, 1120)
"""Numbers of feature vectors of a picture that Gemma 4 was trained with."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """Settings of a checkpoint's image processor, of `preprocessor_config.json` and `config.json`.

    The front end resizes pictures and expands placeholders by it; the engine turns 8-bit pixels into the tower's input.
    """

    processor: Processor
    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """Patches of a feature vector, along each axis."""
    mean: tuple[float, float, float]
    """A pixel becomes `(value * rescale_factor - mean) / std`, by channel."""
    std: tuple[float, float, float]
    placeholder: int
    """Token id that stands for one feature vector."""
    marker: int | None = None
    """Token id that the chat template writes for an image; None: the placeholder."""
    rescale_factor: float = 1 / 255
    resample: int = 3
    """Pillow's number of the filter: 1 Lanczos, 2 bilinear, 3 bicubic."""
    min_pixels: int = 0
    """Smallest and largest area of a resized picture, where the processor has them."""
    max_pixels: int = 0
    size: int = 0
    """Side of the square, or longest side, that a picture is resized to, where the processor has one."""
    tile_size: int = 0
    """Side of the tiles that a picture is cut into, where the processor has them."""
    min_tiles: int = 0
    """Fewest and most tiles that a picture is cut into, where the processor chooses them by its shape."""
    max_tiles: int = 0
    tolerance: float = 0.0
    """A picture is cut into tiles from so many times the largest area on, where the processor has this limit."""
    bfloat16: bool = False
    """Whether pixels become numbers in bfloat16, each step rounded."""
    max_tokens: int = 0
    """Largest number of feature vectors of a picture; 0: as many as the other settings give."""
    begin: tuple[int, ...] = ()
    """Token ids that the processor, not the chat template, puts before and after the placeholders of an image."""
    end: tuple[int, ...] = ()
    around: str = ""
    """Text that the processor puts before and after those."""
