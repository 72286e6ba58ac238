"""Every family that sees against `transformers`: features of pictures, and logits of prompts with two pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_facts, read_spec
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.stepping import settings_for
from tests.support.vision import FAMILIES, Looker, Seen, make

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda name: name.replace(" ", "_"))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, torch.Tensor]:
    made = make(request.param, tmp_path_factory.mktemp("seen"))
    return made, made.logits()


def looked(seen: Seen, ops: Ops, ends: list[int], layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, Looker]:
    """The logits of all tokens, computed in chunks up to `ends`, with the tower's layers in parts."""
    looker, parts, first = Looker(seen, ops), [], 0
    for image in seen.images:
        assert not any(result.broken_images for result in looker.encode(image, layers))
    for last in [*ends, len(seen.tokens)]:
        parts.append(looker.step(seen.tokens[first:last]))
        first = last
    return torch.cat(parts), looker


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_those_of_transformers_whole_in_chunks_and_decoding(
    seen: tuple[Seen, torch.Tensor], kernels: Any
) -> None:
    """Chunks begin and end inside pictures, unless their tokens attend to each other; the last tokens come alone."""
    made, expected = seen
    whole, looker = looked(made, kernels(), [])
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    count = len(made.tokens)
    inside = [2] if made.family.joined else [7, 9, 20]
    cut, _ = looked(made, kernels(), [*inside, count - 3, count - 2, count - 1], layers=(1,))
    torch.testing.assert_close(cut, expected, atol=2e-4, rtol=0)
    if kernels is recording_table:
        assert isinstance(looker.runner._forward, RecordedForward)
        assert torch.equal(cut, whole)


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL"])
def test_repositories_in_their_published_form_are_read(name: str, tmp_path: Path) -> None:
    """Without a section for the text model, with rope type `mrope` and the tensors' older names."""
    made = make(name, tmp_path)
    expected, _ = looked(made, reference_ops(), [])
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config |= {key: value for key, value in text.items() if key not in {"model_type", "layer_types"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    older = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(looked(made, reference_ops(), [])[0], expected, atol=0, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_features_equal_those_of_transformers(seen: tuple[Seen, torch.Tensor], kernels: Any) -> None:
    made, _ = seen
    looker = Looker(made, kernels())
    for image, expected in zip(made.images, made.features(), strict=True):
        looker.encode(image, (1, 2))
        for own, other in zip(looker.features(image), expected, strict=True):
            torch.testing.assert_close(own, other, atol=2e-5, rtol=0)


@needs_native
def test_a_tower_in_bfloat16_computes_close_by(tmp_path: Path) -> None:
    made = make("Qwen3-VL", tmp_path, "bfloat16")
    made.model.float()
    looker = Looker(made, recording_table())
    for image, expected in zip(made.images, made.features(), strict=True):
        looker.encode(image)
        for own, other in zip(looker.features(image), expected, strict=True):
            assert (own - other).abs().mean() < 0.02 * other.abs().max()


def test_a_model_with_an_unknown_tower_takes_text_only_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make("SmolVLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "swish9"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(open_checkpoint(str(tmp_path))).tower is None
    looker = Looker(made, reference_ops())
    assert looker.runner.images is None
    notes = [record.message for record in caplog.records if "takes no images" in record.message]
    assert len(notes) == 1
    assert "swish9" in notes[0]
    assert torch.isfinite(looker.step([5, 9, 11])).all()


def test_a_model_without_an_image_processor_takes_text_only(tmp_path: Path) -> None:
    make("SmolVLM", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    _, settings = settings_for(tmp_path)
    assert not settings.towers


def test_a_model_whose_processor_makes_other_patches_than_the_towers_takes_text_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("Qwen3-VL", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 8}))
    _, settings = settings_for(tmp_path)
    assert not settings.towers
    assert f"takes no images: {file}: patch_size is 8, but the vision tower's patch_size" in caplog.text


@pytest.mark.parametrize(
    "name",
    ["Qwen3-VL", "Qwen2-VL", "Qwen2.5-VL", "Gemma 3", "Gemma 4", "Mistral 3", "InternVL", "LFM2-VL", "Llama 4"],
)
def test_whatever_the_config_of_a_tower_says_the_text_is_served_or_the_model_refused(name: str, tmp_path: Path) -> None:
    """Each setting of the tower in turn is nonsense; sizes are planned without allocating."""
    family = FAMILIES[name]
    maker = getattr(transformers, family.architecture)
    config = maker.config_class(**family.config)
    config.architectures = [family.architecture]
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_image_size": {"longest_edge": 32}}))
    for key in plain["vision_config"]:
        for nonsense in (0, 3, 2**23, 2**70, "x", [2**70], {"rope_type": "y"}):
            changed = plain | {"vision_config": plain["vision_config"] | {key: nonsense}}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                facts = read_facts(open_checkpoint(str(tmp_path)), with_weights=False)
            except CheckpointError:
                continue
            assert all(tower.max_tokens > 0 for tower in facts.towers.values())
