"""Decodes pictures with Pillow: checks of the header, then upright RGB, resized and cut. In worker processes only.

Formats and rules: JPEG, PNG, WebP, GIF and BMP, whatever the caller calls them; the first frame of an animation; turned
as its EXIF orientation says; transparent pixels become white; CMYK, 16 bits and palettes become 8-bit RGB.
"""

import io
import struct
from collections.abc import Callable

from PIL import Image, UnidentifiedImageError

from penstock.dataclass import dataclass
from penstock.frontend.images.sizes import Layout

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_ASPECT = 200
"""Maximum ratio of the longer side to the shorter one."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transformations that turn each EXIF orientation upright; those from 5 on swap height and width."""
_OTHERS: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("a PDF", lambda head: head.startswith(b"%PDF")),
    ("a TIFF", lambda head: head[:4] in (b"II*\0", b"MM\0*")),
    ("HEIC, AVIF or a video", lambda head: head[4:8] == b"ftyp"),
    ("SVG, HTML or XML", lambda head: head.lstrip()[:1] == b"<"),
    ("JPEG 2000 or JPEG XL", lambda head: head[4:8] in (b"jP  ", b"JXL ") or head[:2] == b"\xff\x0a"),
    ("an icon", lambda head: head[:4] == b"\0\0\1\0"),
    ("a Photoshop file", lambda head: head.startswith(b"8BPS")),
)


class PictureError(Exception):
    """A picture that is refused."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A picture whose header has been read."""

    image: Image.Image
    height: int
    """Height after the picture is turned upright; so is `width`."""
    width: int


def open_picture(data: bytes, max_pixels: int) -> Opened:
    """Read the header.

    Raises:
        PictureError: it is of another format, or has an implausible size.
    """
    Image.MAX_IMAGE_PIXELS = None  # `max_pixels` is the limit
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PictureError(_unknown(data)) from None
    except (OSError, ValueError, SyntaxError, KeyError, IndexError, struct.error, EOFError) as error:
        raise PictureError(f"the image's header is damaged ({_reason(error)})") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise PictureError(f"the image is {width} x {height} pixels")
    if width * height > max_pixels:
        raise PictureError(
            f"the image has {width} x {height} pixels; at most {max_pixels} are taken (max_image_pixels): make it "
            "smaller"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(
            f"the image is {width} x {height} pixels; the longer side may be at most {MAX_ASPECT} times the shorter"
        )
    if 5 <= _orientation(image) <= 8:
        width, height = height, width
    return Opened(image, height, width)


def _unknown(data: bytes) -> str:
    if not data:
        return "the image is empty"
    kind = next((name for name, fits in _OTHERS if fits(data[:16])), "of no known format, or damaged at its beginning")
    return f"the image is {kind}; JPEG, PNG, WebP, GIF and BMP are read"


def _orientation(image: Image.Image) -> int:
    exif = image.info.get("exif")
    if not isinstance(exif, bytes):  # a PNG may have it after the pixels, where it is ignored
        return 1
    try:
        found = Image.Exif()
        found.load(exif)
        return int(found.get(_ORIENTATION, 1))
    except Exception:  # a damaged block of facts about the picture is no part of it
        return 1


def decode(opened: Opened) -> Image.Image:
    """The picture as upright RGB.

    Raises:
        PictureError: its pixels are damaged or incomplete.
    """
    image = opened.image
    size = image.size
    try:
        image.load()
        if image.size != size:
            raise PictureError(f"the image's header says {size}, its content {image.size} pixels")
        return upright_rgb(image, _orientation(image))
    except (OSError, ValueError, SyntaxError, KeyError, IndexError, struct.error, EOFError) as error:
        raise PictureError(f"the image is damaged or incomplete ({_reason(error)})") from None


def upright_rgb(image: Image.Image, orientation: int) -> Image.Image:
    """8-bit RGB on white, turned by an EXIF orientation."""
    if image.mode.startswith("I"):  # 16 bits
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if image.has_transparency_data:
        alpha = image.convert("RGBA")
        image = Image.new("RGB", alpha.size, "white")
        image.paste(alpha, mask=alpha)
    rgb, turn = image.convert("RGB"), _TURNS.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def cut(image: Image.Image, layout: Layout, resample: int) -> list[Image.Image]:
    """Resize a picture and cut it into tiles: row by row, then the whole picture."""
    given, filter = image, Image.Resampling(resample)
    for height, width in layout.resizings:
        if image.size != (width, height):
            image = image.resize((width, height), filter)
    if layout.canvas is not None:
        resized, image = image, Image.new("RGB", layout.canvas[::-1])
        image.paste(resized)
    if not layout.rows:
        return [image]
    side = layout.tile_size
    tiles = [
        image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
        for row in range(layout.rows)
        for column in range(layout.columns)
    ]
    if layout.whole is None:
        return [*tiles, image.resize((side, side), filter)]
    return [*tiles, given.resize(layout.whole[::-1], filter)]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
