"""Images in a runner's plans: parts of several images in turn, freed ones, broken ones, and text beside them."""

from array import array
from dataclasses import replace

import pytest
import torch

from penstock.core.plan import EncodePart, ForwardPlan
from penstock.kernels.reference_ops import reference_ops
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.stepping import settings_for
from tests.support.vision import Looker, Seen, make


@pytest.fixture(scope="module", params=["SmolVLM", "Qwen3-VL"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return make(request.param, tmp_path_factory.mktemp("seen"))


def encoding(*parts: EncodePart, freed: tuple[bytes, ...] = ()) -> ForwardPlan:
    return ForwardPlan([], [], array("i"), [], [], [], [], encode=list(parts), freed_images=list(freed))


@needs_native
def test_parts_of_several_images_in_turn_give_the_features_of_each_alone(seen: Seen) -> None:
    looker, alone = Looker(seen, recording_table()), Looker(seen, recording_table())
    one, two = seen.images
    looker.run(encoding(EncodePart(one.digest, 0, 1, one), EncodePart(two.digest, 0, 2, two)))
    looker.run(encoding(EncodePart(two.digest, 2, 3, None)))
    looker.run(encoding(EncodePart(one.digest, 1, 3, None)))
    for image in seen.images:
        alone.encode(image)
        for own, other in zip(looker.features(image), alone.features(image), strict=True):
            assert torch.equal(own, other)


def test_freed_images_are_gone_and_may_be_encoded_again_in_the_same_step(seen: Seen) -> None:
    looker = Looker(seen, reference_ops())
    one, two = seen.images
    looker.encode(one)
    before = looker.features(one)
    looker.run(encoding(EncodePart(one.digest, 0, 1, one), freed=(one.digest, b"unknown")))
    assert not looker.holds(one)
    looker.run(encoding(EncodePart(one.digest, 0, 3, one), EncodePart(two.digest, 0, 3, two), freed=(one.digest,)))
    assert all(torch.equal(a, b) for a, b in zip(before, looker.features(one), strict=True))
    looker.run(encoding(freed=(one.digest,)))
    assert looker.holds(two)
    assert not looker.holds(one)


@pytest.mark.parametrize("kernels", [reference_ops, pytest.param(recording_table, marks=needs_native)])
def test_an_image_whose_features_are_not_finite_is_reported_alone(seen: Seen, kernels: object) -> None:
    looker = Looker(seen, kernels())  # type: ignore[operator]
    one, two = seen.images
    looker.poison()
    broken = replace(one, pixels=bytes(len(one.pixels)))
    (result,) = looker.encode(broken)
    assert result.broken_images == [one.digest]
    (result,) = looker.encode(replace(two, pixels=b"\xff" * len(two.pixels)))
    assert result.broken_images == []


@needs_native
def test_text_is_computed_by_the_same_calls_with_the_same_bits_with_a_tower_and_without(seen: Seen) -> None:
    looker = Looker(seen, recording_table())
    checkpoint, settings = settings_for(seen.folder, kv_cache_memory="4MiB")
    plain = DeviceRunner(checkpoint, replace(settings, images=None), recording_table())
    forwards = looker.runner._forward, plain._forward
    assert all(isinstance(forward, RecordedForward) for forward in forwards)
    calls = [forward._layers.num_calls for forward in forwards]  # type: ignore[union-attr]
    assert calls[0] == calls[1]
    text = [token for token in seen.tokens if token < 150]
    with_tower = looker.step(text, plain=True)
    looker.runner, looker.computed = plain, 0
    assert torch.equal(looker.step(text, plain=True), with_tower)
