"""Models that hear from GGUF files and their mmproj files: the answers of their folders, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf.file import open_gguf
from penstock.checkpoint.image_input import read_image_input
from penstock.checkpoint.sound_input import read_sound_input, unsupported_encoder
from penstock.errors import CheckpointError
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_facts
from tests.kernels.versions import recording_table
from tests.support import omni, sounds
from tests.support.gguf_files import finish
from tests.support.gguf_sounds import write_with_sounds
from tests.support.gguf_vision import write_with_vision
from tests.support.needs import needs_native
from tests.support.vision import Looker
from tests.support.vision import make as make_vision

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]
WINDOWS = {"Qwen2.5-Omni": {"n_window": 100}, "Qwen3-Omni": {"n_window": 50, "n_window_infer": 800}}
"""Settings of encoders that files do not have, as the families' checkpoints have them."""
Made = sounds.Heard | omni.Omni


def make(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A random checkpoint of a family with its settings that files do not have."""
    if name not in WINDOWS:
        return sounds.make(name, folder)
    family = sounds.FAMILIES[name]
    config = {**family.config, "audio_config": family.config["audio_config"] | WINDOWS[name]}
    monkeypatch.setitem(sounds.FAMILIES, name, replace(family, config=config))
    return omni.make(name, folder)


def computed(made: Made, ops: Ops) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of all tokens, and the features of all media."""
    looker = Looker(made, ops)
    for image in made.images:
        looker.encode(image)
    return looker.step(made.tokens), [looker.features(image)[0] for image in made.images]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", sounds.FAMILIES)
def test_a_gguf_file_with_its_mmproj_file_beside_it_answers_as_the_folder_does(
    name: str, kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(name, tmp_path / "folder", monkeypatch)
    (tmp_path / "model").mkdir()
    model = tmp_path / "model" / "text-F32.gguf"
    write_with_sounds(made.folder, model)
    logits, features = computed(replace(made, folder=model), kernels())
    expected, heard = computed(made, kernels())
    assert all(map(torch.equal, features, heard))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", sounds.FAMILIES)
def test_sounds_and_images_are_taken_as_for_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = make(name, tmp_path / "folder", monkeypatch), tmp_path / "text.gguf"
    write_with_sounds(made.folder, model)
    processor = json.loads((made.folder / "preprocessor_config.json").read_text())
    del processor["chunk_length"]  # which files do not have: the family's is the default
    # llama.cpp's limits of pictures, which files do not have either
    (made.folder / "preprocessor_config.json").write_text(
        json.dumps(processor | {"min_pixels": 8 * 64, "max_pixels": 4096 * 64})
    )
    folder, both = open_checkpoint(str(made.folder)), open_checkpoint(str(model))
    assert read_sound_input(both) == read_sound_input(folder) is not None
    if isinstance(made, omni.Omni):
        assert read_image_input(both) == read_image_input(folder) is not None
    assert read_facts(both).towers == read_facts(folder).towers


def test_weights_in_16_bits_and_biases_with_more_axes_are_read_as_stored(tmp_path: Path) -> None:
    """As in most files of llama.cpp's converter."""
    made, model = sounds.make("Voxtral", tmp_path / "folder"), tmp_path / "text.gguf"
    tensors = load_file(made.folder / "model.safetensors")
    of_encoder = {name: one for name, one in tensors.items() if name.startswith(("audio_tower", "multi_modal"))}
    rounded = {name: one.half().float() for name, one in of_encoder.items() if one.dim() > 1 or ".conv" in name}
    del rounded["audio_tower.embed_positions.weight"]
    save_file(tensors | rounded, made.folder / "model.safetensors")
    write_with_sounds(made.folder, model, stored="F16")
    stored = open_gguf(tmp_path / "mmproj-F32.gguf", ("mmproj",)).tensors
    assert (stored["a.conv1d.1.bias"].type.name, stored["a.conv1d.1.bias"].shape) == ("F16", (32, 1))
    (logits, _), (expected, _) = (computed(one, reference_ops()) for one in (replace(made, folder=model), made))
    assert torch.equal(logits, expected)


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with its mmproj file beside it."""
    folder = tmp_path_factory.mktemp("voxtral")
    write_with_sounds(sounds.make("Voxtral", folder / "folder").folder, folder / "text.gguf")
    return folder / "text.gguf"


def copied(model: Path, folder: Path, **changes: Any) -> Path:
    """The model in another folder, with an mmproj file of other metadata and no tensors."""
    (folder / model.name).write_bytes(model.read_bytes())
    writer = GGUFWriter(None, "clip", use_temp_file=False)
    for key, value in changes.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"clip.{key.replace('__', '.')}", value)
    finish(writer, folder / "mmproj-F16.gguf")
    return folder / model.name


@pytest.mark.parametrize("projector", ["ultravox", "gemma3na", "meralion"])
def test_another_projector_is_refused_by_name(
    projector: str, voxtral: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = copied(voxtral, tmp_path, projector_type=projector, has_audio_encoder=True)
    assert open_checkpoint(str(model)).media is None
    assert f"takes text only, as the mmproj file beside it is not supported: clip.projector_type '{projector}'" in (
        caplog.text
    )
    with pytest.raises(CheckpointError, match=rf"clip\.projector_type '{projector}' .*; supported: .*, qwen2a, "):
        open_checkpoint(str(model), mmproj=str(tmp_path / "mmproj-F16.gguf"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"audio__projector_type": "ultravox"}, r"clip\.audio\.projector_type 'ultravox' .*; supported: qwen2a, "),
        (
            {"vision__projector_type": "step3vl", "audio__projector_type": "voxtral"},
            r"vision\.projector_type 'step3vl'",
        ),
        ({"vision__projector_type": "gemma3", "audio__projector_type": "voxtral"}, "gemma3 and voxtral, which no "),
        ({"projector_type": "qwen2a"}, "for text models of Qwen2ForCausalLM, not LlamaForCausalLM"),
        ({"projector_type": "voxtral", "has_audio_encoder": False}, "'voxtral' .* is not supported"),
        ({"projector_type": "voxtral"}, r"lacks clip\.audio\.num_mel_bins"),
        ({}, r"lacks clip\.projector_type"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    changes: dict[str, Any], error: str, voxtral: Path, tmp_path: Path
) -> None:
    model = copied(voxtral, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=error):
        open_checkpoint(str(model), mmproj=str(tmp_path / "mmproj-F16.gguf"))


def test_an_encoder_for_another_hidden_size_or_vocabulary_is_refused(voxtral: Path, tmp_path: Path) -> None:
    file = tmp_path / "mmproj.gguf"
    content = (voxtral.parent / "mmproj-F32.gguf").read_bytes()
    file.write_bytes(changed(content, "clip.audio.projection_dim", 65))
    with pytest.raises(CheckpointError, match="for a text model of hidden size 65, not 64"):
        open_checkpoint(str(voxtral), mmproj=str(file))
    file.write_bytes(changed(content, "clip.audio.projector.stack_factor", 8))
    with pytest.raises(CheckpointError, match=r"stack_factor 8 .* is not supported; only 4 is"):
        open_checkpoint(str(voxtral), mmproj=str(file))
    other = tmp_path / "text.gguf"
    other.write_bytes(voxtral.read_bytes().replace(b"[AUDIO]", b"[audio]"))
    with pytest.raises(CheckpointError, match=r"lacks \[AUDIO\], which sounds need"):
        open_checkpoint(str(other), mmproj=str(voxtral.parent / "mmproj-F32.gguf"))


def changed(content: bytes, key: str, value: int) -> bytes:
    """A GGUF file with another integer."""
    place = content.index(key.encode()) + len(key) + 4
    return content[:place] + value.to_bytes(4, "little") + content[place + 4 :]


@pytest.mark.parametrize("extra", ["a.blk.0.attn_sinks.weight", "mm.a.norm_pre.weight"])
def test_a_tensor_that_the_encoder_lacks_is_refused(extra: str, tmp_path: Path) -> None:
    made, model = sounds.make("Qwen2-Audio", tmp_path / "folder"), tmp_path / "text.gguf"
    write_with_sounds(made.folder, model, extra={extra: torch.ones(4)})
    with pytest.raises(CheckpointError, match=extra.replace(".", r"\.")):
        Looker(replace(made, folder=model), reference_ops())


def test_a_tensor_of_another_shape_or_none_is_refused(tmp_path: Path) -> None:
    made = sounds.make("Qwen2-Audio", tmp_path / "folder")
    write_with_sounds(made.folder, tmp_path / "text.gguf", extra={"a.conv1d.1.weight": torch.ones(32, 15, 3)})
    with pytest.raises(CheckpointError, match=r"conv1\.weight in .*mmproj-F32.gguf has the shape \[32, 15, 3\]"):
        Looker(replace(made, folder=tmp_path / "text.gguf"), reference_ops())
    content = (tmp_path / "mmproj-F32.gguf").read_bytes()
    (tmp_path / "mmproj-F32.gguf").write_bytes(content.replace(b"a.post_ln.bias", b"a.post_ln.biaz"))
    with pytest.raises(CheckpointError, match=r"mmproj-F32.gguf lacks the tensor a\.post_ln\.bias"):
        Looker(replace(made, folder=tmp_path / "text.gguf"), reference_ops())


@pytest.mark.parametrize("name", ["Voxtral", "Qwen2.5-Omni", "Qwen3-Omni"])
def test_whatever_the_settings_of_an_encoder_say_the_file_is_refused_or_the_model_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting in turn is nonsense; nothing of a size that it names is allocated."""
    made, model = make(name, tmp_path / "folder", monkeypatch), tmp_path / "text.gguf"
    write_with_sounds(made.folder, model)
    file = tmp_path / "mmproj-F32.gguf"
    content = file.read_bytes()
    keys = [key for key in open_gguf(file, ("mmproj",)).metadata.below("clip.audio.") if key != "projector_type"]
    assert len(keys) >= 7
    for key in keys:
        for nonsense in (0, 1, 3, 2**20, 2**31, 2**32 - 1):
            file.write_bytes(changed(content, f"clip.audio.{key}", nonsense))
            try:
                facts = read_facts(open_checkpoint(str(model), mmproj=str(file)))
            except CheckpointError:
                continue
            assert "sound" in facts.towers, "as the user named the file"
            assert facts.towers["sound"].max_tokens > 0, (key, nonsense)


def test_an_audio_encoder_of_another_kind_beside_a_vision_tower_is_skipped_and_named(tmp_path: Path) -> None:
    folder, model = make_vision("Gemma 4", tmp_path / "folder").folder, tmp_path / "text.gguf"
    write_with_vision(folder, model, extra={"a.blk.0.ln1.weight": torch.ones(4)}, audio="gemma4a")
    checkpoint = open_checkpoint(str(model))
    assert list(read_facts(checkpoint).towers) == ["image"]
    assert unsupported_encoder(checkpoint) == "gemma4a"
