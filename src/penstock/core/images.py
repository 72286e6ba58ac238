"""The encoders' work: which layers a step computes for which image or sound, and whose features are kept.

    waiting ──layers, in one step or several──> ready ──not needed, and room is wanted──> freed
                       └── a step failed, or the oldest sequence takes its room ──> waiting

A window of audio is an image that stands for all tokens of its text, and is needed until that ends.

A layer costs as many tokens of the step's budget as take the same multiplications in the text model. A sequence's
chunk ends before an image that is not ready; an image that becomes ready in a step can be used in the same step.

**Progress.** Each step computes tokens of the oldest running sequence, or at least one layer of its next image: it is
kept a token of the budget, for which it gets a layer of any cost, and its next image gets room in the budget of
features at the cost of images that only others need, which are encoded again. So it reaches its last image after at
most as many steps as it has tokens and its images have layers.

**Memory.** Features stay until room is wanted: then those go that no running sequence needs, least recently used first.
They go in a step after the last one that used them, as the runner frees before it computes.
"""

from collections import OrderedDict

from penstock.api.request import Image
from penstock.config.image_settings import ImageSettings
from penstock.core.image_inputs import add_image_inputs
from penstock.core.plan import EncodePart, ForwardPlan
from penstock.core.policies import QueuePolicy
from penstock.core.sequence import Sequence, Status
from penstock.core.sequence_table import SequenceTable
from penstock.core.step import Step
from penstock.dataclass import dataclass


@dataclass(slots=True, eq=False)
class _Encoding:
    """An image that has room for its features."""

    nbytes: int
    num_layers: int = 0
    """Layers that are computed, this step's included."""


class ImageWork:
    """The images in the tower, by digest."""

    def __init__(self, settings: ImageSettings, sequences: SequenceTable, queue: QueuePolicy) -> None:
        self.settings = settings
        self.num_encoded = 0
        """Images that became ready."""
        self._sequences, self._queue = sequences, queue
        self._is_attended = settings.is_attended
        self._images: OrderedDict[bytes, _Encoding] = OrderedDict()  # least recently used first
        self._held = 0
        self._freed: list[bytes] = []
        self._in_step: set[bytes] = set()
        """Images that the step encodes or uses."""

    def replace(self, previous: "ImageWork") -> None:
        """Free the images of the previous scheduler, whose runner this one continues with."""
        self._freed = [*previous._freed, *previous._images]

    def begin_step(self) -> None:
        """Give the oldest running sequence's next image room. Called before any chunk of the step is added."""
        self._in_step.clear()
        running = self._sequences.running
        image = self._next_image(running[0]) if running else None
        # The oldest sequence must advance in each step, so its image takes room from any other.
        if image is not None and image.digest not in self._images:
            has_room = self._take_room(image, kept=set())
            assert has_room, "an image was accepted that exceeds the budget of features"

    def can_decode(self, seq: Sequence) -> bool:
        """Whether a sequence that lacks one token has the features that it attends to; those stay for the step."""
        if not self._is_attended:
            return True
        if not all(map(self._is_ready, seq.request.images)):
            return False
        for image in seq.request.images:
            self._use(image.digest)
        return True

    def least_tokens(self, seq: Sequence) -> int:
        """Tokens of the budget to keep for the oldest running sequence: one, or those of an image that attends within
        itself and is ready.
        """
        image = self._next_image(seq)
        if image is None or not self.settings.attends_within(image) or not self._is_ready(image):
            return 1
        return image.start + image.count - seq.num_computed

    def _next_image(self, seq: Sequence) -> Image | None:
        """The image that the sequence's next token belongs to."""
        if seq.num_computed < seq.image_end:
            for image in seq.request.images:
                if image.start <= seq.num_computed < image.start + image.count:
                    return image
        return None

    def _is_ready(self, image: Image) -> bool:
        encoding = self._images.get(image.digest)
        return encoding is not None and encoding.num_layers == self.settings.num_layers(image)

    def prepare(self, seq: Sequence, step: Step, kept: int) -> int:
        """Add layers of the images that a sequence's next tokens need; returns how many tokens its chunk may have.

        Args:
            kept: budget reserved for others.
        """
        start, is_oldest = seq.num_computed, seq is self._sequences.running[0]
        for image in seq.request.images:
            end, before = image.start + image.count, max(0, image.start - start)
            if end <= start:
                continue
            room = step.room - kept - before
            if room <= 0:
                break
            if not self._is_ready(image):
                room = self._add_layers(image, seq, step, room, needs_layer=is_oldest and not before)
                if not self._is_ready(image):
                    return before
            if self.settings.attends_within(image) and room < end - max(start, image.start):
                return before
            self._use(image.digest)
        return len(seq.tokens) - start

    def _add_layers(self, image: Image, seq: Sequence, step: Step, room: int, *, needs_layer: bool) -> int:
        """Add as many of an image's layers as fit `room` tokens, at least one if it needs one; returns the rest."""
        cost = self.settings.layer_tokens(image)
        count = max(room // cost, int(needs_layer))
        kept = self._in_step if needs_layer else self._needed()
        if not count or not (image.digest in self._images or self._take_room(image, kept)):
            return room
        encoding = self._images[image.digest]
        first, total = encoding.num_layers, self.settings.num_layers(image)
        last = encoding.num_layers = min(first + count, total)
        step.add_layers(EncodePart(image.digest, first, last, None if first else image), seq, cost * (last - first))
        self._use(image.digest)
        self.num_encoded += last == total
        if seq.num_charged <= max(seq.num_computed, image.start):  # else it was charged before it was preempted
            self._queue.encoded(seq, cost * (last - first))
        return room - cost * (last - first)

    def _use(self, digest: bytes) -> None:
        self._images.move_to_end(digest)
        self._in_step.add(digest)

    def _needed(self) -> set[bytes]:
        """Digests of the images with tokens that the running sequences have not computed."""
        return {
            image.digest
            for seq in self._sequences.running
            if seq.num_computed < seq.image_end and seq.status is Status.RUNNING
            for image in seq.request.images
            if image.start + image.count > seq.num_computed
        }

    def _take_room(self, image: Image, kept: set[bytes]) -> bool:
        """Free the features of images other than `kept` until another image fits; returns whether it does."""
        nbytes, needed = self.settings.image_bytes(image), self._needed()
        free = self.settings.feature_bytes - self._held
        victims: list[bytes] = []
        for digest in sorted(self._images, key=needed.__contains__):  # those that are not needed first
            if free >= nbytes:
                break
            if digest not in kept:
                victims.append(digest)
                free += self._images[digest].nbytes
        if free < nbytes:
            return False
        # All or none: features freed for an image that does not fit would be encoded again for nothing.
        for digest in victims:
            self.drop(digest)
        self._images[image.digest] = _Encoding(nbytes)
        self._held += nbytes
        return True

    def drop(self, digest: bytes) -> None:
        """Free an image before the next step."""
        encoding = self._images.pop(digest, None)
        if encoding is not None:
            self._held -= encoding.nbytes
            self._freed.append(digest)

    def complete(self, forward: ForwardPlan, step: Step) -> None:
        """Add images to a step's plan."""
        forward.encode = step.encode
        forward.freed_images, self._freed = self._freed, []
        add_image_inputs(forward, step.sequences, self.settings)

    def check_integrity(self) -> None:
        """Assert that the features are within their budget, and counted."""
        assert self._held == sum(image.nbytes for image in self._images.values()), "the count of features is off"
        assert self._held <= self.settings.feature_bytes, "the features exceed their budget"
        assert not self._freed or not set(self._freed) & set(self._images), "an image is freed that is encoded"
