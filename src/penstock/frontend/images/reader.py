"""Reads images and sounds in worker processes, and keeps the latest.

    source ──digest──> cache, or a process of `penstock.frontend.images.worker` (sounds: `...audio.worker`) ──> Picture

They are strangers' bytes, so processes decode them (`Decoders`). Conversations repeat their images in each turn:
those come from the cache.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.api.request import MediaKind
from penstock.config.engine_config import ImageConfig
from penstock.config.image_input import ImageInput
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.frontend.decoder_frames import DECODED, NO_MEMORY, pack, unpack
from penstock.frontend.decoders import DecoderKind, Decoders
from penstock.frontend.images.limits import CPU_SECONDS, MEMORY_BYTES
from penstock.system.extras import has_pillow
from penstock.text.content import ImageSource

_LONGEST_HEAD = 256
"""Characters of a data URL before its content."""


@dataclass(frozen=True, slots=True)
class Part:
    """A resized picture or a tile of one."""

    height: int
    width: int
    digest: bytes = b""
    """SHA-256 of size and pixels; empty, like `pixels`, if only the header was read."""
    pixels: bytes = b""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, resized and cut for the model; or the features of a sound."""

    parts: tuple[Part, ...]
    """Tiles row by row, then the whole picture; without tiles, the whole picture alone. Of a sound, its windows, whose
    height and width are those of their features."""
    rows: int = 0
    """Rows of tiles."""
    columns: int = 0
    kind: MediaKind = "image"

    @property
    def num_bytes(self) -> int:
        return sum(len(part.pixels) for part in self.parts)


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Limits of what is read, and of what is kept of it."""

    option: str
    """The option with the next."""
    max_bytes: int
    """Of one file."""
    memory_bytes: int
    """Memory of the decoding process."""
    element_bytes: int
    """Of one pixel, or one feature of a frame."""


class MediaReader:
    """Reads images, or sounds, for one model. Its methods block, and may be called from any thread."""

    def __init__(
        self, kind: DecoderKind, header: Mapping[str, Any], limits: ReadingLimits, kept: "KeptPictures"
    ) -> None:
        """
        Args:
            header: what the decoding process is told, beside the source.
            kept: the latest, of all kinds that the model takes.
        """
        self._header, self._limits, self._kept = header, limits, kept
        self._workers = Decoders(kind)

    def read(self, source: ImageSource, namespace: str = "", *, wants_pixels: bool = True) -> Picture:
        """Decode, resize and cut an image; or decode a sound, compute its features, and cut these.

        Args:
            namespace: images are shared within it only.
            wants_pixels: False asks for sizes alone: of an image, the header is read.

        Raises:
            InvalidRequestError: it is too large, damaged, or in a format that is not read.
            EngineError: there is no process to read it.
        """
        content, is_base64 = self._content_of(source)
        # With the namespace: how fast an answer comes must not tell a tenant what another has sent.
        key = (namespace, source.kind, source.is_low, hashlib.sha256(content).digest())
        picture = self._kept.find(key)
        if picture is None:
            header = {
                **self._header,
                "is_base64": is_base64,
                "is_low": source.is_low,
                "wants_pixels": wants_pixels,
            }
            answer = self._workers.ask(pack(header, content), source.field)
            picture = _picture(answer, source, self._limits)
            if wants_pixels:
                self._kept.add(key, picture)
        return picture

    def _content_of(self, source: ImageSource) -> tuple[bytes, bool]:
        """The content of a source, and whether it is base64."""
        data, is_base64 = source.data, isinstance(source.data, str)
        if source.is_url:
            assert isinstance(data, str)
            data = _of_data_url(data, source)
        if isinstance(data, str):
            try:
                data = data.encode("ascii")
            except UnicodeEncodeError:
                raise InvalidRequestError(
                    f"{source.field}: the {source.kind} is not base64: it has other characters", source.field
                ) from None
        most = self._limits.max_bytes  # decoded: base64 is a third longer, and padded
        if len(data) > (most * 4 // 3 + 4 if is_base64 else most) and not source.is_own:
            raise InvalidRequestError(
                f"{source.field}: the {source.kind} has more than {most} bytes ({self._limits.option}): send a smaller "
                "one",
                source.field,
            )
        return data, is_base64

    def close(self) -> None:
        """Kill the processes; nothing can be read afterwards."""
        self._workers.close()


class ImageReader(MediaReader):
    """Reads images for one model."""

    def __init__(self, image_input: ImageInput, limits: ImageConfig, kept: "KeptPictures") -> None:
        header = {"image_input": asdict(image_input), "max_pixels": limits.max_image_pixels}
        most = limits.max_image_bytes
        super().__init__(_DECODER, header, ReadingLimits("max_image_bytes", most, MEMORY_BYTES, 3), kept)


def _of_data_url(url: str, source: ImageSource) -> str:
    """The base64 content of a data URL."""
    field, what = source.field, source.kind
    kind_of_media = source.part["type"]
    comma = url.find(",", 0, _LONGEST_HEAD)
    # Of the head alone: a URL may have megabytes, and lower() copies.
    kind, *parameters = url[: max(comma, 0)].lower().removeprefix("data:").split(";")
    if comma < 0 or not url[:5].lower() == "data:":
        raise InvalidRequestError(f"{field}: the {what}'s URL must begin with data:{kind_of_media}/...;base64,", field)
    if "base64" not in parameters:
        raise InvalidRequestError(f"{field}: the {what}'s data URL must say ;base64 before its comma", field)
    if kind and not kind.startswith(f"{kind_of_media}/") and kind != "application/octet-stream":
        raise InvalidRequestError(f"{field}: {kind} is not supported; {what}s and text are", field)
    return url[comma + 1 :]


def _picture(answer: bytes, source: ImageSource, limits: ReadingLimits) -> Picture:
    """
    Raises:
        InvalidRequestError: the process refused the image.
    """
    view, field = memoryview(answer), source.field
    if answer[:1] == NO_MEMORY:
        most = limits.memory_bytes >> 20
        raise InvalidRequestError(f"{field}: decoding the {source.kind} takes more than {most} MiB", field)
    if answer[:1] != DECODED:
        raise InvalidRequestError(f"{field}: {bytes(view[1:]).decode(errors='replace')}", field)
    about, pixels = unpack(view[1:])
    parts = _parts(about["sizes"], about.get("digests"), pixels, limits.element_bytes)
    return Picture(tuple(parts), about["rows"], about["columns"], source.kind)


def _parts(
    sizes: Sequence[Sequence[int]], digests: Sequence[str] | None, pixels: memoryview, element_bytes: int
) -> list[Part]:
    if digests is None:
        return [Part(height, width) for height, width in sizes]
    parts, start = [], 0
    for (height, width), digest in zip(sizes, digests, strict=True):
        end = start + element_bytes * height * width
        parts.append(Part(height, width, bytes.fromhex(digest), bytes(pixels[start:end])))
        start = end
    assert start == len(pixels), "the pixels are not those of the sizes"
    return parts


def _check_pillow() -> None:
    if not has_pillow():
        raise InvalidRequestError("Pillow is needed for images: pip install '.[images]' in Penstock's source folder")


_DECODER = DecoderKind("penstock.frontend.images.worker", "image", CPU_SECONDS, _check_pillow)


class KeptPictures:
    """The latest pictures and sounds, by the digest of their source."""

    def __init__(self, max_bytes: int) -> None:
        self._pictures: OrderedDict[Any, Picture] = OrderedDict()
        self._max_bytes = self._left = max_bytes
        self._lock = threading.Lock()

    def find(self, key: Any) -> Picture | None:
        with self._lock:
            picture = self._pictures.get(key)
            if picture is not None:
                self._pictures.move_to_end(key)
            return picture

    def add(self, key: Any, picture: Picture) -> None:
        with self._lock:
            if key in self._pictures or picture.num_bytes > self._max_bytes:  # which would drop all others, and itself
                return
            self._pictures[key] = picture
            self._left -= picture.num_bytes
            while self._left < 0:
                _, dropped = self._pictures.popitem(last=False)
                self._left += dropped.num_bytes
