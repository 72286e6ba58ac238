"""The tokens that stand for an image in a prompt, as the checkpoint's processor writes them."""

import functools

from penstock.api.request import Image
from penstock.config.image_input import ImageInput
from penstock.errors import CheckpointError
from penstock.frontend.images.placeholders import Expansion, MediaTokens
from penstock.frontend.images.reader import Part, Picture
from penstock.frontend.images.sizes import grid_of
from penstock.text.tokenizer import Tokenizer

_VISION_FRAMES = (("<|vision_start|>", "<|vision_end|>"), ("<|vision_bos|>", "<|vision_eos|>"))
"""Around an image in Qwen's prompts; the second in those of Qwen2.5-Omni."""
_ROW_BREAK, _IMAGE_END = "[IMG_BREAK]", "[IMG_END]"
_AROUND_TILES, _WHOLE = "<fake_token_around_image>", "<global-img>"
_INTERN_FRAME = ("<img>", "</img>")
_LFM2_FRAME, _LFM2_WHOLE = ("<|image_start|>", "<|image_end|>"), "<|img_thumbnail|>"
_LLAMA4_FRAME, _LLAMA4_WHOLE = ("<|image_start|>", "<|image_end|>"), "<|image|>"
_AFTER_TILE, _AFTER_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
_MARKERS = {"llama4": _LLAMA4_WHOLE}
"""Texts that chat templates write for an image, of processors whose checkpoints do not name their ids."""


class ImageTokens(MediaTokens):
    """The tokens of images for one model."""

    def __init__(self, image_input: ImageInput, tokenizer: Tokenizer) -> None:
        """
        Raises:
            CheckpointError: the tokenizer lacks a token that the checkpoint's config names.
        """
        super().__init__(image_input.placeholder, tokenizer)
        self._image_input = image_input
        marker = self.placeholder if image_input.marker is None else self._text(image_input.marker)
        self.marker = _MARKERS.get(image_input.processor, marker)
        begin, end = ("".join(map(self._text, ids)) for ids in (image_input.begin, image_input.end))
        self.in_text = f"{image_input.around}{begin}{self.placeholder}{end}{image_input.around}"
        self.piece_ids = functools.lru_cache(maxsize=1024)(self._encode)

    @property
    def bare_marker(self) -> str:
        """The text that stands for an image in a prompt without a chat template."""
        frames = _VISION_FRAMES if self._image_input.processor == "qwen2_vl" else ()
        known = (frame for frame in frames if self._tokenizer.special_token(frame[0]) is not None)
        begin, end = next(known, ("", ""))
        return f"{begin}{self.marker}{end}"

    def image(self, part: Part, start: int) -> Image:
        rows, columns = grid_of((part.height, part.width), self._image_input)
        breaks = rows - 1 if self._image_input.processor == "pixtral" else 0
        return Image(
            start=start,
            count=rows * columns + breaks,
            rows=rows,
            columns=columns,
            height=part.height,
            width=part.width,
            digest=part.digest,
            pixels=part.pixels,
        )

    def expanded(self, picture: Picture) -> Expansion:
        made = Expansion()
        add = {
            "idefics3": self._add_tiles,
            "internvl": self._add_intern_tiles,
            "lfm2_vl": self._add_lfm2_tiles,
            "llama4": self._add_llama4_tiles,
        }.get(self._image_input.processor)
        if add is not None:
            add(made, picture)
            return made
        (part,) = picture.parts
        rows, columns = grid_of((part.height, part.width), self._image_input)
        made.starts.append(0)
        if self._image_input.processor == "pixtral":
            row = [self._image_input.placeholder] * columns
            made.token_ids += [*row, self._id(_ROW_BREAK)] * rows
            made.token_ids[-1] = self._id(_IMAGE_END)
        else:
            made.token_ids += [self._image_input.placeholder] * (rows * columns)
        return made

    def _add_tiles(self, made: Expansion, picture: Picture) -> None:
        """Tiles row by row, each with its place, and the whole picture; line breaks end rows."""
        for index, part in enumerate(picture.parts):
            row, column = divmod(index, picture.columns) if picture.rows else (0, 0)
            is_whole = index == len(picture.parts) - 1
            line_break = "" if column or not index else "\n\n" if is_whole else "\n"
            place = _WHOLE if is_whole else f"<row_{row + 1}_col_{column + 1}>"
            if line_break:
                made.token_ids += self.piece_ids(line_break)
            made.token_ids += self.piece_ids(_AROUND_TILES + place)
            self._add_part(made, part)
        made.token_ids += self.piece_ids(_AROUND_TILES)

    def _add_part(self, made: Expansion, part: Part) -> None:
        made.starts.append(len(made.token_ids))
        rows, columns = grid_of((part.height, part.width), self._image_input)
        made.token_ids += [self._image_input.placeholder] * (rows * columns)

    def _add_intern_tiles(self, made: Expansion, picture: Picture) -> None:
        """Tiles and the whole picture, one after another."""
        first, last = map(self._id, _INTERN_FRAME)
        made.token_ids.append(first)
        for part in picture.parts:
            self._add_part(made, part)
        made.token_ids.append(last)

    def _add_lfm2_tiles(self, made: Expansion, picture: Picture) -> None:
        """Tiles row by row, each after its place, and the whole picture; a picture without tiles has no place."""
        first, last = map(self._id, _LFM2_FRAME)
        made.token_ids.append(first)
        for index, part in enumerate(picture.parts):
            if picture.rows:
                row, column = divmod(index, picture.columns)
                is_whole = index == len(picture.parts) - 1
                place = _LFM2_WHOLE if is_whole else f"<|img_row_{row + 1}_col_{column + 1}|>"
                made.token_ids.append(self._id(place))
            self._add_part(made, part)
        made.token_ids.append(last)

    def _add_llama4_tiles(self, made: Expansion, picture: Picture) -> None:
        """Tiles row by row, each before a separator, and the whole picture after its token."""
        first, last = map(self._id, _LLAMA4_FRAME)
        made.token_ids.append(first)
        *tiles, whole = picture.parts
        for index, part in enumerate(tiles):
            self._add_part(made, part)
            made.token_ids.append(self._id(_AFTER_TILE if (index + 1) % picture.columns else _AFTER_ROW))
        made.token_ids.append(self._id(_LLAMA4_WHOLE))
        self._add_part(made, whole)
        made.token_ids.append(last)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _id(self, text: str) -> int:
        token = self._tokenizer.backend.token_to_id(text)
        if token is None:
            raise CheckpointError(f"the tokenizer has no token {text!r}, which images of this model need")
        return token
