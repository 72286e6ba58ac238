"""Pictures for tests, as files and URLs; and an engine that says which images it got."""

import base64
import io
import json
from dataclasses import replace

from PIL import Image

from penstock.config.image_input import ImageInput
from penstock.text.tokenizer import Tokenizer
from tests.server.echoing import SPECIAL, EchoCore, write_checkpoint

MARKERS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
PLACEHOLDER = len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% elif m.role != 'tool' %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}{# <tool_call> #}"
)
"""Its tool results are texts alone."""
INPUT = ImageInput(
    processor="qwen2_vl",
    patch_size=4,
    merge_size=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    placeholder=PLACEHOLDER,
    min_pixels=64,
    max_pixels=64 * 64,
)


class ImageCore(EchoCore):
    """Each answer tells the prompt's length and its images: (start, count, rows, columns, first pixel)."""

    def __init__(self, config, start):
        super().__init__(config, start)
        self.info = replace(self.info, image_input=INPUT if config.images.images else None)
        self._tokenizer = Tokenizer.from_path(config.model.model)

    def add_request(self, request, resumed, source):
        about = {
            "length": len(request.prompt_token_ids),
            "images": [(i.start, i.count, i.rows, i.columns, list(i.pixels[:3])) for i in request.images],
            "sound": all(len(i.pixels) == 3 * i.height * i.width and len(i.digest) == 32 for i in request.images)
            and all(
                set(request.prompt_token_ids[i.start : i.start + i.count]) == {PLACEHOLDER} for i in request.images
            ),
        }
        told = tuple(self._tokenizer.encode(json.dumps(about)))
        super().add_request(replace(request, prompt_token_ids=told), resumed, source)


def write_model(folder):
    return write_checkpoint(folder, TEMPLATE, MARKERS)


def file_of(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def square(colour, side=16, format="PNG", mode="RGB", **options):
    """The file of a square in one colour."""
    return file_of(Image.new(mode, (side, side), colour), format, **options)


def base64_of(content):
    return base64.b64encode(content).decode()


def url_of(content, kind="image/png"):
    return f"data:{kind};base64,{base64_of(content)}"
