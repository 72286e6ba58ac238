"""Models of packed weights that an earlier load kept: the same answers, even where the file was damaged."""

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.kernels.tables import make_ops
from penstock.models.loading import packed_key
from penstock.models.registry import load_model
from penstock.system import weight_cache
from penstock.system.packed_file import PackedFile
from penstock.system.start import Start
from penstock.system.weight_cache import WeightCache
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf
from tests.support.needs import needs_native
from tests.support.omni import make as make_omni
from tests.support.stepping import settings_for
from tests.support.vision import Looker, Seen, make

pytestmark = needs_native
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_key, "MIN_BYTES", 0)


def tokens(model: Path, cache: Path | str, **options: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    with LLM(str(model), kv_cache_memory="8MiB", threads=1, packed_cache=str(cache), **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(["ab", "a longer text"], params)]


def parameters_read(
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoders: tuple[str, ...] = ("image", "sound"),
    **options: object,
) -> int:
    """How many tensors a load with these encoders reads of the checkpoint."""
    from penstock.models.loading import loader

    read = []
    with monkeypatch.context() as patch:
        whole = loader._load_piece

        def noting(piece: loader.Piece, *rest: Any) -> None:
            read.append(piece.name)
            whole(piece, *rest)

        patch.setattr(loader, "_load_piece", noting)
        checkpoint, settings = settings_for(folder, packed_cache=str(cache), **options)
        if settings.images is not None:
            towers = {kind: tower for kind, tower in settings.towers.items() if kind in encoders}
            settings = replace(settings, images=replace(settings.images, towers=towers))
        load_model(checkpoint, settings, make_ops(CPU))
    return len(set(read))


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4", "dtype": "bfloat16"}],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_later_starts_read_nothing_and_answer_the_same(
    options: dict[str, str],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    cache = tmp_path / "cache"
    plain = tokens(tiny_llama, "off", **options)
    assert not cache.exists()
    assert [tokens(tiny_llama, cache, **options) for _ in range(3)] == [plain] * 3
    assert parameters_read(tiny_llama, cache, monkeypatch, **options) == 0
    assert len(list(cache.glob("*.packed"))) == 1
    said = re.findall(r"([\d.]+ MiB) of packed weights are cached in (\S+), now (\S+ \S+) of", caplog.text)
    assert len(said) == 1  # by the first start alone
    assert said[0][0] == said[0][2]
    assert said[0][1] == str(cache)


def assert_same_features(made: Seen, cache: Path) -> None:
    """The features of an image are the same with and without the packed cache."""
    found = []
    for options in ({"packed_cache": "off"}, {"packed_cache": str(cache)}):
        looker = Looker(made, make_ops(CPU), **options)
        looker.encode(made.images[0])
        found.append(looker.features(made.images[0])[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["InternVL", "Mistral 3"])
def test_later_starts_read_nothing_of_a_vision_tower(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even patches, biases, and scales of layers, which loading converts."""
    made, cache = make(name, tmp_path / "model"), tmp_path / "cache"
    assert parameters_read(made.folder, cache, monkeypatch) > 0
    assert parameters_read(made.folder, cache, monkeypatch) == 0
    assert_same_features(made, cache)


def test_a_file_made_without_encoders_gains_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, cache = make("InternVL", tmp_path / "model"), tmp_path / "cache"
    assert parameters_read(made.folder, cache, monkeypatch, ()) > 0
    assert parameters_read(made.folder, cache, monkeypatch) > 0
    for encoders in (("image",), (), ("image",)):
        assert parameters_read(made.folder, cache, monkeypatch, encoders) == 0
    assert [file.suffix for file in sorted(cache.iterdir())] == [".lock", ".packed"]
    assert_same_features(made, cache)


def test_each_kind_of_encoder_is_added_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = make_omni("Qwen2.5-Omni", tmp_path / "model").folder, tmp_path / "cache"
    assert parameters_read(model, cache, monkeypatch, ("sound",)) > 2
    assert parameters_read(model, cache, monkeypatch, ("image",)) > 2
    always = 2  # the convolutions of sounds, which are no linear maps
    for encoders in (("image", "sound"), ("sound",), ("image",)):
        assert parameters_read(model, cache, monkeypatch, encoders) == (always if "sound" in encoders else 0)


def test_a_file_is_not_completed_while_another_process_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cache = make("InternVL", tmp_path / "model"), tmp_path / "cache"
    parameters_read(made.folder, cache, monkeypatch, ())
    (file,) = cache.glob("*.packed")
    before = file.read_bytes()
    with WeightCache(cache).locked(file.stem), monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_LOCK_SECONDS", 0.1)
        assert parameters_read(made.folder, cache, monkeypatch) > 0
    assert file.read_bytes() == before


def test_encoders_that_another_process_has_added_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start at the same time may all find the file without encoders; one of them replaces it."""
    made, cache = make("InternVL", tmp_path / "model"), tmp_path / "cache"
    parameters_read(made.folder, cache, monkeypatch, ())
    (file,) = cache.glob("*.packed")
    lacking = PackedFile(file, file.stem)
    parameters_read(made.folder, cache, monkeypatch)
    written = file.stat().st_ino
    checkpoint, settings = settings_for(made.folder, packed_cache=str(cache))
    model = load_model(checkpoint, settings, make_ops(CPU), start=Start(found=lacking))
    assert file.stat().st_ino == written
    del lacking
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(cache) in line]
    assert mapped
    assert not [line for line in mapped if line.endswith("(deleted)")], "the file without encoders is in memory, too"
    del model


def test_files_of_gguf_are_kept_too(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(file, tiny_llama, "Q8_0")
    assert tokens(file, "off") == tokens(file, cache) == tokens(file, cache)
    assert parameters_read(file, cache, monkeypatch) == 0


def test_weights_recipe_and_dtype_have_models_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = write_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    assert parameters_read(folder, cache, monkeypatch) > 0
    for options in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        assert parameters_read(folder, cache, monkeypatch, **options) > 0
    changed = write_tiny_llama(tmp_path / "other", seed=1) / "model.safetensors"
    before = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(changed.read_bytes())
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert parameters_read(folder, cache, monkeypatch) > 0  # of the same length and time
    assert len(list(cache.glob("*.packed"))) == 4


def test_a_damaged_file_is_made_anew(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    plain = tokens(tiny_llama, cache)
    (file,) = cache.glob("*.packed")
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)
    assert tokens(tiny_llama, cache) == plain
    assert len(list(cache.glob("*.damaged"))) == 1
    assert parameters_read(tiny_llama, cache, monkeypatch) == 0


def test_a_weight_that_the_file_lacks_is_read_from_the_checkpoint(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    plain = tokens(tiny_llama, cache)
    whole = PackedFile.get
    monkeypatch.setattr(PackedFile, "get", lambda self, name: None if "layers.1" in name else whole(self, name))
    assert parameters_read(tiny_llama, cache, monkeypatch) == 9
    assert tokens(tiny_llama, cache) == plain


def test_small_models_and_other_devices_are_not_kept(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, settings = settings_for(tiny_llama)
    assert packed_key.packed_key(checkpoint, settings) is not None
    monkeypatch.setattr(packed_key, "MIN_BYTES", 10**12)
    assert packed_key.packed_key(checkpoint, settings) is None
    _, off = settings_for(tiny_llama, packed_cache="off")
    assert packed_key.packed_cache(off) is None
    monkeypatch.setenv("PENSTOCK_ISA", "reference")
    assert packed_key.packed_cache(settings) is None


PROGRAM = """
import sys
from penstock.models.loading import packed_key
packed_key.MIN_BYTES = 0
from penstock import LLM, SamplingParams
from penstock.system import packed_file
assert "torch" not in sys.modules
opened = []
whole = packed_file.PackedFile.begin_check
packed_file.PackedFile.begin_check = lambda self: (opened.append("torch" in sys.modules), whole(self))
copied = []
write = packed_file._write_all
def noting(file, offset, part):
    if offset >= packed_file.HEADER_BYTES:
        copied.append(part.nbytes)
    write(file, offset, part)
packed_file._write_all = noting
with LLM(sys.argv[1], kv_cache_memory="8MiB", packed_cache=sys.argv[2]) as llm:
    llm.generate(["a"], SamplingParams(max_tokens=1))
    weights = sum(
        int(line.split()[1])
        for part in open("/proc/self/smaps").read().split("VmFlags")
        if ".packed" in part
        for line in part.splitlines()
        if line.startswith("Rss:")
    )
    print(opened, sum(copied) // 1024, weights)
"""


def test_a_fresh_process_finds_it_before_torch_is_there_and_maps_it(tiny_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_llama), str(tmp_path / "cache")]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert [re.sub(r"\d+", "N", line).strip() for line in said] == ["[] N N", "[False] N N"]
    for line in said:
        copied, mapped = map(int, line.split()[-2:])
        assert mapped > 300  # KiB: the first start, too, holds what it wrote
        assert copied < 0.1 * mapped  # packed into the file's pages


def test_the_checkpoint_of_a_key_is_known_by_its_whole_config(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    key = packed_key.packed_key(*settings_for(folder))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("1e-05", "1e-06"))
    assert packed_key.packed_key(open_checkpoint(str(folder)), settings_for(folder)[1]) != key


def test_overrides_of_the_config_are_part_of_the_key(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    settings = settings_for(folder)[1]
    keys = {
        packed_key.packed_key(open_checkpoint(str(folder), hf_overrides=overrides), settings)
        for overrides in (None, '{"rms_norm_eps": 1e-06}', '{"rms_norm_eps": 1e-04}')
    }
    assert len(keys) == 3
