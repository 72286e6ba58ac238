"""Whisper against `transformers`: logits whole, in chunks and decoding, in steps shared with other windows."""

import hashlib
import itertools
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.api.request import Image
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core.plan import EncodePart, ForwardPlan, NewBlocks
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_spec
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.hearing import CONTEXT, ENGLISH, MELS, POSITIONS, START, TRANSCRIBE, Hearing, a_sound, make_hearing
from tests.support.stepping import plan_of, settings_for

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]
BLOCKS = CONTEXT // 4
TOKENS = [START, ENGLISH, TRANSCRIBE, 12, 40, 100, 7, 201, 66, 12, 99, 140]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return make_hearing(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def windows(hearing: Hearing) -> list[torch.Tensor]:
    """Features of two sounds."""
    return [hearing.features(a_sound(2.0, seed))[0] for seed in (1, 2)]


def window_of(features: torch.Tensor) -> Image:
    pixels = np.ascontiguousarray(features.numpy()).tobytes()
    digest = hashlib.sha256(struct.pack("<II", *features.shape) + pixels).digest()
    return Image(0, CONTEXT, 1, POSITIONS, *features.shape, digest, pixels, is_sound=True)


class Listener:
    """A runner with two windows, and a text about each."""

    def __init__(self, folder: Path, ops: Ops, windows: Sequence[torch.Tensor], parts: Sequence[int] = ()) -> None:
        """
        Args:
            parts: layers after which a step of the tower ends.
        """
        checkpoint, self.settings = settings_for(folder, kv_cache_memory="4MiB", dtype="float32")
        self.runner, self.images = (
            DeviceRunner(checkpoint, self.settings, ops),
            [window_of(window) for window in windows],
        )
        bounds = [0, *parts, self.settings.towers["sound"].num_layers]
        for first, last in itertools.pairwise(bounds):
            for image in self.images:
                self.execute(
                    ForwardPlan([], [], array("i"), [], [], [], []),
                    EncodePart(image.digest, first, last, None if first else image),
                )

    def execute(self, forward: ForwardPlan, *encode: EncodePart) -> None:
        plan = plan_of([], [])
        plan.forward = forward
        forward.encode = list(encode)
        assert not self.runner.execute(plan).broken_images

    def step(self, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Compute `TOKENS` from first to last of texts (text, first, last); returns their logits."""
        plan = plan_of([(first, TOKENS[first:last]) for _, first, last in parts], [])
        plan.forward.slots = [text for text, _, _ in parts]
        plan.forward.windows = [self.images[text].digest for text, _, _ in parts]
        plan.forward.new_blocks += [
            NewBlocks(0, text, 0, array("i", range(text * BLOCKS, (text + 1) * BLOCKS)))
            for text, first, _ in parts
            if not first
        ]
        self.runner.execute(plan)
        with self.runner.ops.inference():
            rows = self.runner._forward.logits(list(range(len(plan.forward.token_ids))))
            return torch.from_numpy(np.array(self.runner.ops.on_host(rows)))


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_those_of_transformers_and_no_division_into_steps_changes_a_bit(
    hearing: Hearing, windows: list[torch.Tensor], kernels: Any
) -> None:
    count = len(TOKENS)
    with torch.no_grad():
        ids = torch.tensor([TOKENS] * 2)
        expected = hearing.model(torch.stack(windows), decoder_input_ids=ids).logits
    whole = Listener(hearing.folder, kernels(), windows)
    alone = [whole.step([(text, 0, count)]) for text in range(2)]
    torch.testing.assert_close(torch.stack(alone), expected, atol=2e-4, rtol=0)
    shared = Listener(hearing.folder, kernels(), windows, parts=(1, 3))
    found: list[list[torch.Tensor]] = [[], []]
    for begins in ((0, 0), (5, 3), (6, 7), (7, 8)):  # chunks, then decodes, of both texts at once
        ends = [{0: 5, 5: 6, 6: 7, 7: count}, {0: 3, 3: 7, 7: 8, 8: count}]
        parts = [(text, first, ends[text][first]) for text, first in enumerate(begins)]
        logits = shared.step(parts)
        cut = parts[0][2] - parts[0][1]
        found[0].append(logits[:cut])
        found[1].append(logits[cut:])
    for text in range(2):
        made = torch.cat(found[text])
        torch.testing.assert_close(made, expected[text], atol=2e-4, rtol=0)
        if kernels is recording_table:
            assert isinstance(shared.runner._forward, RecordedForward)
            assert torch.equal(made, alone[text])


def test_settings_that_change_the_model_are_refused_by_name(hearing: Hearing, tmp_path: Path) -> None:
    for setting in ('{"activation_function": "relu"}', '{"scale_embedding": true}', '{"max_source_positions": 50}'):
        with pytest.raises(CheckpointError, match=setting.split('"')[1]):
            read_spec(open_checkpoint(str(hearing.folder), hf_overrides=setting))
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        settings_for(hearing.folder, tensor_parallel_size=2)


def test_the_memory_plan_has_the_tower_and_whole_windows(hearing: Hearing) -> None:
    _, settings = settings_for(hearing.folder)
    tower = settings.towers["sound"]
    assert tower is not None
    assert (tower.num_layers, tower.max_patches, tower.patch_height) == (4, POSITIONS, MELS)
    assert settings.images is not None
    assert settings.images.num_patches(window_of(torch.zeros(MELS, 2 * POSITIONS))) == POSITIONS
    window = settings.images.image_bytes(window_of(torch.zeros(MELS, 2 * POSITIONS)))
    assert settings.memory.image_features % window == 0
    assert settings.memory.image_features >= 2 * window
    keys = 2 * 2 * 32  # of two layers
    stream = POSITIONS * tower.hidden_size * settings.images.element_bytes
    assert window >= POSITIONS * keys * settings.images.element_bytes + stream, "a window in progress has both"
    assert tower.largest_pixels == 2 * POSITIONS * MELS * 4
    assert settings.memory.image_pixels >= 2 * tower.largest_pixels
