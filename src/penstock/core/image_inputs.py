"""Inputs of a step for images: the rows that are features, rotary positions, and which keys a token attends to.

All of them follow from the request's images and the tokens' positions, so chunks and restarts do not change them.
"""

from array import array
from itertools import accumulate

from penstock.config.image_settings import ImageSettings
from penstock.core.image_positions import Axes, add_image_positions, add_text_positions
from penstock.core.plan import ForwardPlan, ImageRows
from penstock.core.sequence import INT32, Sequence


def add_image_inputs(forward: ForwardPlan, sequences: list[Sequence], settings: ImageSettings) -> None:
    """Set a plan's image rows, rotary positions and seen ends, if any of its sequences has images; or its windows."""
    if not any(seq.image_end for seq in sequences):
        return
    if settings.is_attended:
        forward.windows = [seq.request.images[0].digest for seq in sequences]
        return
    for seq, start, count, row in _chunks(forward, sequences):
        if start < seq.image_end:
            forward.image_rows += _image_rows(seq, start, count, row)
    if settings.rope_axes:
        forward.rope_positions = _rope_positions(forward, sequences)
    if any(tower.attends_within for tower in settings.towers.values()) and forward.image_rows:
        forward.seen_ends = _seen_ends(forward, sequences, settings)


def _chunks(forward: ForwardPlan, sequences: list[Sequence]) -> list[tuple[Sequence, int, int, int]]:
    """Each sequence of a step, its number of computed tokens, of new tokens, and its first row."""
    rows = accumulate(forward.query_lens, initial=0)
    return list(zip(sequences, forward.starts, forward.query_lens, rows, strict=False))


def _image_rows(seq: Sequence, start: int, count: int, row: int) -> list[ImageRows]:
    """The features among a sequence's new tokens, which begin at index `row` of the step."""
    features = []
    for image in seq.request.images:
        first, last = max(start, image.start), min(start + count, image.start + image.count)
        if first >= last:
            continue
        if image.count == image.rows * image.columns:
            rows = array(INT32, range(row + first - start, row + last - start))
            features.append(ImageRows(image.digest, first - image.start, rows))
            continue
        placeholder, tokens = seq.tokens[image.start], seq.tokens  # between its rows there is text
        rows = array(INT32, (row + at - start for at in range(first, last) if tokens[at] == placeholder))
        features.append(ImageRows(image.digest, tokens[image.start : first].count(placeholder), rows))
    return features


def _rope_positions(forward: ForwardPlan, sequences: list[Sequence]) -> "array[int]":
    axes: Axes = (array(INT32), array(INT32), array(INT32))
    for seq, start, count, _ in _chunks(forward, sequences):
        if start < seq.image_end:
            add_image_positions(axes, seq.request.images, start, start + count)
        else:
            add_text_positions(axes, start + seq.rope_shift, start + seq.rope_shift + count)
    return axes[0] + axes[1] + axes[2]


def _seen_ends(forward: ForwardPlan, sequences: list[Sequence], settings: ImageSettings) -> "array[int]":
    ends = array(INT32)
    for seq, start, count, row in _chunks(forward, sequences):
        # Causal first; then the tokens of an image see it to its end.
        ends.extend(range(start + 1, start + count + 1))
        for image in seq.request.images if start < seq.image_end else ():
            first, last = max(start, image.start), min(start + count, image.start + image.count)
            if first < last and settings.attends_within(image):
                place = slice(row + first - start, row + last - start)
                ends[place] = array(INT32, [image.start + image.count]) * (last - first)
    return ends
