"""Models that see from GGUF files and their mmproj files: the answers of their folders."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.created import Recipe, name_created, remove_created, write_created
from penstock.checkpoint.gguf import mmproj
from penstock.checkpoint.gguf.file import Metadata, open_gguf
from penstock.checkpoint.gguf.header import TensorInfo
from penstock.checkpoint.gguf.keys import Keys
from penstock.checkpoint.gguf.mmproj_keys import GivenEncoder
from penstock.checkpoint.gguf.types import tensor_type
from penstock.checkpoint.image_input import read_image_input
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_facts, read_spec
from tests.support.gguf_files import finish
from tests.support.gguf_vision import write_with_vision
from tests.support.vision import FAMILIES, PLACEHOLDER, Looker, Seen, make

NAMES = [
    *("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5", "Gemma 3", "Gemma 4", "Idefics 3", "Pixtral", "Mistral 3"),
    *("LFM2-VL", "Llama 4", "InternVL"),
]
UNSAID: dict[str, dict[str, Any]] = {
    "Gemma 4": {"use_bidirectional_attention": None},
    "Llama 4": {"attn_scale": 0.1, "attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layer_interval": 4},
}
"""Settings of text models that files do not say, as the families' checkpoints have them: E-models of Gemma 4."""


def logits(seen: Seen) -> torch.Tensor:
    looker = Looker(seen, reference_ops())
    for image in seen.images:
        looker.encode(image)
    return looker.step(seen.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_with_its_vision_file_beside_it_answers_as_the_folder_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    if name in UNSAID:
        config = {**family.config, "text_config": family.config["text_config"] | UNSAID[name]}
        monkeypatch.setitem(FAMILIES, name, replace(family, config=config, joined=False))
    made = make(name, tmp_path / "folder")
    (tmp_path / "model").mkdir()
    model = tmp_path / "model" / "text-F32.gguf"
    write_with_vision(made.folder, model)
    torch.testing.assert_close(logits(replace(made, folder=model)), logits(made), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    model = folder / "text-F32.gguf"
    write_with_vision(make("Idefics 3", folder / "folder").folder, model, "tower.gguf")
    return model


def test_a_vision_file_of_any_name_is_given_as_an_option(smolvlm: Path) -> None:
    alone = open_checkpoint(str(smolvlm))
    assert alone.media is None
    assert read_image_input(alone) is None
    both = open_checkpoint(str(smolvlm), mmproj=str(smolvlm.parent / "tower.gguf"))
    taken = read_image_input(both)
    assert taken is not None
    assert (taken.processor, taken.placeholder, taken.tile_size, taken.size) == ("idefics3", PLACEHOLDER, 32, 64)
    assert read_spec(both).tower is not None
    assert both.mmproj == str(smolvlm.parent / "tower.gguf"), "other ranks need it, too"


def test_a_created_model_keeps_the_vision_file_of_its_base(smolvlm: Path, tmp_path: Path) -> None:
    model = tmp_path / smolvlm.name
    model.symlink_to(smolvlm)
    (tmp_path / "mmproj-tower.gguf").symlink_to(smolvlm.parent / "tower.gguf")
    folder = write_created(open_checkpoint(str(model)).files, Recipe(base="smolvlm"))
    name_created(folder, "eyes")
    try:
        created = open_checkpoint("eyes")
        assert created.media is not None
        assert set(created.files) == {model.name, "mmproj-tower.gguf"}, "for models made from it"
    finally:
        remove_created("eyes")


def test_a_vision_file_that_does_not_fit_is_refused(smolvlm: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not an mmproj file"):
        open_checkpoint(str(smolvlm), mmproj=str(smolvlm))
    with pytest.raises(ConfigError, match="mmproj is the vision tower or audio encoder of a GGUF model"):
        open_checkpoint(str(smolvlm.parent / "folder"), mmproj=str(smolvlm.parent / "tower.gguf"))
    made = make("Gemma 3", tmp_path / "gemma")
    write_with_vision(made.folder, tmp_path / "gemma.gguf")
    with pytest.raises(CheckpointError, match="for text models of Gemma3ForCausalLM, not LlamaForCausalLM"):
        open_checkpoint(str(smolvlm), mmproj=str(tmp_path / "mmproj-F32.gguf"))


def test_beside_a_vision_file_of_an_unknown_kind_the_model_takes_text_only_and_says_so_once(
    smolvlm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / smolvlm.name
    model.write_bytes(smolvlm.read_bytes())
    writer = GGUFWriter(None, "clip", use_temp_file=False)
    writer.add_clip_projector_type("resampler")
    finish(writer, tmp_path / "mmproj.gguf")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert open_checkpoint(str(model)).media is None
    (note,) = [record.message for record in caplog.records if "takes text only" in record.message]
    assert "resampler" in note


def test_of_several_vision_files_one_in_16_bits_is_taken() -> None:
    names = ["m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "mmproj-m-BF16.gguf", "mmproj-m-f16.gguf"]
    assert mmproj.choose_mmproj(names, names[0]) == "mmproj-m-f16.gguf"
    assert mmproj.choose_mmproj(names[:3], names[0]) == "mmproj-m-BF16.gguf"
    assert mmproj.choose_mmproj(names[:1], names[0]) is None


def test_a_tensor_that_the_tower_lacks_is_refused(tmp_path: Path) -> None:
    made, model = make("Idefics 3", tmp_path / "folder"), tmp_path / "text.gguf"
    write_with_vision(made.folder, model, extra={"v.blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"v\.blk\.0\.attn_sinks"):
        Looker(replace(made, folder=model), reference_ops())


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Gemma 3"])
def test_whatever_the_settings_of_a_vision_file_say_the_file_is_refused_or_the_model_planned(
    name: str, tmp_path: Path
) -> None:
    """Each setting in turn is nonsense; nothing of a size that it names is allocated."""
    made, model = make(name, tmp_path / "folder"), tmp_path / "text.gguf"
    write_with_vision(made.folder, model)
    vision = tmp_path / "mmproj-F32.gguf"
    content = vision.read_bytes()
    keys = [
        key for key in open_gguf(vision, ("mmproj",)).metadata.below("clip.vision.") if not key.startswith("image_")
    ]
    for key in keys:
        place = content.index(f"clip.vision.{key}".encode()) + len(f"clip.vision.{key}") + 4
        for nonsense in (0, 2**31, 2**32 - 1):
            vision.write_bytes(content[:place] + nonsense.to_bytes(4, "little") + content[place + 4 :])
            try:
                facts = read_facts(open_checkpoint(str(model), mmproj=str(vision)))
            except CheckpointError:
                continue
            assert "image" in facts.towers, "as the user named the file"
            assert facts.towers["image"].max_tokens > 0, (key, nonsense)


def test_a_count_of_blocks_beyond_the_number_of_tensors_is_refused() -> None:
    kind = tensor_type(0)
    assert kind is not None
    last = TensorInfo(Path("m.gguf"), f"v.blk.{2**26 - 1}.ln1.weight", kind, (1,), 0)
    metadata = Metadata(Path("m.gguf"), {"clip.vision.block_count": 2**26})
    given = GivenEncoder("vision", Keys(metadata, "clip"), metadata, {last.name: last}, {}, metadata)
    with pytest.raises(CheckpointError, match="fewer blocks"):
        given.num_layers()
