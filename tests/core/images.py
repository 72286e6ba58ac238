"""Images for tests of the scheduler, and a runner that compares the pixels behind each cached key that is read."""

import hashlib

from penstock.api.request import Image, Request
from penstock.config.image_settings import ImageSettings
from penstock.config.model_facts import ActivationSizes, TowerFacts
from penstock.core.kv_manager import CacheGroup
from penstock.core.plan import ForwardPlan, SampledSequence, StepPlan, StepResult
from tests.core.fakes import FakeRunner

PLACEHOLDER, ROW_BREAK = 18, 17
SIDE = 2
"""Pixels of a patch."""


def make_tower(
    num_layers: int = 3,
    layer_elements: int = 1,
    *,
    attends_within: bool = False,
    rope_axes: bool = False,
    is_attended: bool = False,
) -> TowerFacts:
    return TowerFacts(
        num_layers=num_layers,
        patch_pixels=SIDE,
        layer_elements=layer_elements,
        hidden_size=1,
        num_parameters=10,
        feature_elements=4,
        activation_sizes=ActivationSizes(1, 1, 1),
        max_tokens=12,
        max_patches=12,
        attends_within=attends_within,
        rope_axes=rope_axes,
        is_attended=is_attended,
    )


def make_images(tower: TowerFacts, feature_bytes: int = 100, token_elements: int = 4) -> ImageSettings:
    return ImageSettings({"image": tower}, 1, token_elements, feature_bytes)


def make_image(name: int, rows: int = 2, columns: int = 3, start: int = 0, *, breaks: bool = False) -> Image:
    """An image whose pixels are its name; with `breaks` there is a token of text after each row but the last."""
    height, width = rows * SIDE, columns * SIDE
    pixels = bytes([name]) * (3 * height * width)
    digest = hashlib.sha256(height.to_bytes(4, "little") + width.to_bytes(4, "little") + pixels).digest()
    count = rows * columns + (rows - 1) * breaks
    return Image(start, count, rows, columns, height, width, digest, pixels)


def placeholders(image: Image) -> list[int]:
    """The tokens that stand for an image."""
    tokens = (
        ([PLACEHOLDER] * image.columns + [ROW_BREAK]) * image.rows if image.count > image.rows * image.columns else []
    )
    return tokens[:-1] if tokens else [PLACEHOLDER] * image.count


def content(digest: bytes, index: int) -> int:
    """What stands for a feature of an image, where a token would stand for itself."""
    return 1000 + int.from_bytes(digest[:4], "little") * 64 + index


class ImageRunner(FakeRunner):
    """Encodes images layer by layer, and lets the keys of their tokens stand for their features.

    Requests have seeds of their own, by which the runner knows what a sequence must have seen.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], block_size: int, settings: ImageSettings) -> None:
        super().__init__(groups, block_size)
        self.settings, self.num_layers = settings, settings.towers["image"].num_layers
        self.requests: dict[int, Request] = {}
        self.layers: dict[bytes, int] = {}
        self.sizes: dict[bytes, int] = {}
        self.num_encoded = 0
        self.broken: set[bytes] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        forward, broken = plan.forward, []
        for digest in forward.freed_images:
            self.layers.pop(digest, None)
        assert len({part.digest for part in forward.encode}) == len(forward.encode), "an image is encoded twice"
        for part in forward.encode:
            assert (part.image is not None) == (part.first == 0)
            assert self.layers.get(part.digest, 0) == part.first < part.last, "layers are left out, or computed twice"
            if part.image is not None:
                assert part.digest not in self.layers, "an image is encoded that was not freed"
                self.sizes[part.digest] = self.settings.image_bytes(part.image)
            self.layers[part.digest] = part.last
            self.num_encoded += part.last == self.num_layers
            if part.digest in self.broken and part.last == self.num_layers:
                broken.append(part.digest)
        held = sum(self.sizes[digest] for digest in self.layers)
        assert held <= self.settings.feature_bytes, "the features exceed their budget"
        result = super().execute(plan)
        result.broken_images = broken
        return result

    def contents_of(self, forward: ForwardPlan) -> list[int]:
        contents = super().contents_of(forward)
        for rows in forward.image_rows:
            assert self.layers.get(rows.digest) == self.num_layers, "features are used that are not there"
            for index, row in enumerate(rows.rows, rows.first):
                assert contents[row] == PLACEHOLDER
                contents[row] = content(rows.digest, index)
        if self.settings.towers["image"].attends_within:
            self._check_ends(forward)
        if self.settings.is_attended:
            self._add_windows(forward, contents)
        return contents

    def _add_windows(self, forward: ForwardPlan, contents: list[int]) -> None:
        """The first token of a text stands for its window, too."""
        assert len(forward.windows) == len(forward.query_lens)
        row = 0
        for digest, start, count in zip(forward.windows, forward.starts, forward.query_lens, strict=True):
            assert self.layers.get(digest) == self.num_layers, "a window is used that is not there"
            if start == 0:
                contents[row] = content(digest, contents[row])
            row += count

    def _check_ends(self, forward: ForwardPlan) -> None:
        """A token of an image attends to all of it, so all of it is computed in the step or before."""
        assert (forward.seen_ends is not None) == bool(forward.image_rows)
        row = 0
        for start, count in zip(forward.starts, forward.query_lens, strict=True):
            for position in range(start, start + count):
                if forward.seen_ends is not None:
                    assert position < forward.seen_ends[row] <= start + count, "a key is attended to that is not there"
                row += 1

    def prompt_contents(self, request: Request) -> list[int]:
        contents = super().prompt_contents(request)
        if self.settings.is_attended:
            return [content(request.images[0].digest, contents[0]), *contents[1:]]
        for image in request.images:
            index = 0
            for at in range(image.start, image.start + image.count):
                if contents[at] == PLACEHOLDER:
                    contents[at] = content(image.digest, index)
                    index += 1
        return contents

    def contents(self, seq: SampledSequence, count: int) -> list[int]:
        request = self.requests[seq.params.seed]
        prompt = self.prompt_contents(request)
        return (prompt + list(seq.tokens[len(prompt) :]))[:count]
