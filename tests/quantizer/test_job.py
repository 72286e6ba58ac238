"""`penstock quantize`: what it writes loads here and in transformers, a killed call goes on, mistakes are told."""

import errno
import json
import os
import random
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cli import main
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.tables import make_ops
from penstock.models.registry import read_spec
from penstock.quantizer.job import Job
from penstock.quantizer.layerwise import Layerwise
from tests.support.checkpoints import write_random, write_tiny_llama
from tests.support.families import CASES, SHAPE
from tests.support.gguf_files import write_gguf
from tests.support.stepping import Stepper

TEXT = list(range(5, 45))
OPS = make_ops(torch.device("cpu"))


def some_texts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(384) for _ in range(48)] for _ in range(20)]


def job(source: Path, out: Path, recipe: str = "int4") -> Job:
    checkpoint = open_checkpoint(str(source))
    return Job(checkpoint, read_spec(checkpoint), recipe, out, None)


def run(made: Job, stop_after: int | None = None) -> None:
    made.check()
    with made.begin():
        for index in made.layers(made.texts(some_texts), OPS):
            if index == stop_after:
                return
        made.finish()


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("recipe", "most"), [("int4", 0.6), ("int6", 0.3), ("w4a16", 0.7)])
def test_a_quantized_checkpoint_answers_nearly_as_the_original(tmp_path: Path, recipe: str, most: float) -> None:
    source = write_tiny_llama(tmp_path / "m", seed=3)
    run(job(source, tmp_path / "out", recipe))
    assert not (tmp_path / "out.partial").exists()
    exact = Stepper(source, 1).step({0: TEXT})[0]
    ours = Stepper(tmp_path / "out", 1).step({0: TEXT})[0]
    assert 0 < (ours - exact).std() / exact.std() < most


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, within compressed-tensors
@pytest.mark.parametrize("recipe", ["int4", "int6", "w4a16"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_same_matrices(tmp_path: Path, recipe: str, tied: bool) -> None:
    import transformers

    source = write_tiny_llama(tmp_path / "m", tie_word_embeddings=tied)
    run(job(source, tmp_path / "out", recipe))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([TEXT])).logits[0]
    ours = Stepper(tmp_path / "out", 1).step({0: TEXT})[0]
    assert (ours - wanted).std() / wanted.std() < 0.25  # activations and embeddings are rounded here only


@pytest.mark.parametrize("name", ["bloom", "opt"])
def test_a_walk_begins_with_embeddings_as_the_model_has_them(tmp_path: Path, name: str) -> None:
    """Normalized, or with positions added."""
    family, changes = CASES[name]
    model = write_random(tmp_path, family, **(SHAPE | changes))
    checkpoint = open_checkpoint(str(tmp_path))
    with torch.inference_mode():
        walk = Layerwise(checkpoint, read_spec(checkpoint), OPS, [TEXT, TEXT[::-1]])
        wanted = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[0][0]
    torch.testing.assert_close(walk.hidden[0], wanted)


def test_a_call_that_was_killed_is_gone_on_with_to_the_same_end(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "whole"))
    run(job(source, tmp_path / "halved"), stop_after=0)
    first = tmp_path / "halved.partial" / "layer-00000.safetensors"
    written = first.stat().st_mtime_ns
    run(job(source, tmp_path / "halved"))
    assert (tmp_path / "halved" / first.name).stat().st_mtime_ns == written
    assert files(tmp_path / "halved") == files(tmp_path / "whole")


def test_what_is_left_of_another_call_is_not_gone_on_with(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "out"), stop_after=0)
    with pytest.raises(ConfigError, match=r"out\.partial is left from another call"):
        run(job(source, tmp_path / "out", "int6"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_what_is_left_of_a_model_that_has_changed_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "out"), stop_after=0)
    content = (source / name).read_text()
    (source / name).write_text(content + " ")
    with pytest.raises(ConfigError, match="or the model has changed since; remove it"):
        run(job(source, tmp_path / "out"))
    (source / name).write_text(content)
    run(job(source, tmp_path / "out"))


@pytest.mark.parametrize("name", ["layer-00000.safetensors", "calibration.json"])
@pytest.mark.parametrize("size", [0, 100])
def test_what_is_left_damaged_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, size: int
) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "whole"))
    run(job(source, tmp_path / "out"), stop_after=0)
    os.truncate(tmp_path / "out.partial" / name, size)
    run(job(source, tmp_path / "out"))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert f"{name} is damaged and will be computed again" in caplog.text


def test_a_second_call_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    late = job(source, tmp_path / "out")
    late.check()
    with job(source, tmp_path / "out").begin(), pytest.raises(ConfigError, match="another call of quantize is writing"):
        run(late)
    run(job(source, tmp_path / "out"))
    with pytest.raises(ConfigError, match="out exists"), late.begin():
        pass


def test_a_disk_that_fills_up_is_told_and_gone_on_with(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    made, limits = job(source, tmp_path / "out"), resource.getrlimit(resource.RLIMIT_FSIZE)
    made.check()
    with made.begin():
        texts = made.texts(some_texts)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"layer-00000\.safetensors cannot be written: .*File too large"):
                next(made.layers(texts, OPS))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(files(tmp_path / "out.partial")) == ["calibration.json", "job.json"]
    run(job(source, tmp_path / "out"))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = write_tiny_llama(tmp_path / "m")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ConfigError, match=r"job\.json cannot be written: .*Input/output error"):
        run(job(source, tmp_path / "out"))
    assert files(tmp_path / "out.partial") == {}


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    with pytest.raises(ConfigError, match="m exists"):
        job(source, source).check()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link exists"):
        job(source, tmp_path / "link").check()
    with pytest.raises(ConfigError, match=r"nowhere/\.\. cannot be written; give the name of a new folder"):
        job(source, tmp_path / "nowhere" / "..").check()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    with pytest.raises(ConfigError, match="the folder /proc/nowhere cannot be made: No such file"):
        job(source, Path("/proc/nowhere/out")).check()
    with pytest.raises(ConfigError, match="cannot be made: File name too long"):
        run(job(source, tmp_path / ("x" * 250)))


def test_no_threads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "nowhere", str(tmp_path / "out"), "--threads", "0"]) == 2
    assert "threads must be at least 1, not 0" in capsys.readouterr().err


def test_a_full_disk_is_told_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match="has 0 MiB free"):
        job(source, tmp_path / "out").check()


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight in .* not finite"):
        run(job(source, tmp_path / "out"))


def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "out"))
    with pytest.raises(CheckpointError, match="is quantized already"):
        job(tmp_path / "out", tmp_path / "again").check()


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", write_tiny_llama(tmp_path / "m"))
    with pytest.raises(CheckpointError, match=r"m\.gguf is a GGUF file; quantize needs a folder"):
        job(tmp_path / "m.gguf", tmp_path / "out").check()


def test_columns_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m", intermediate_size=104)
    with pytest.raises(CheckpointError, match="of 104: quantize needs a multiple of 8 rows, and of 32 columns"):
        job(source, tmp_path / "out").check()


def test_scales_that_another_program_wrote_are_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    run(job(source, tmp_path / "out"))
    file = tmp_path / "out" / "layer-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight_scale"] *= 1.01
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_\w+ in .* scales are not multiples of one power of two"):
        Stepper(tmp_path / "out", 1)


def test_the_command_writes_its_own_texts_and_takes_those_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny_llama(tmp_path / "m", num_hidden_layers=1, max_position_embeddings=32)
    assert main(["quantize", str(source), str(tmp_path / "own")]) == 0
    printed = capsys.readouterr()
    assert "calibration texts: 100%" in printed.err
    told = r"wrote (.*/own): [\d.]+ MiB, [\d.]+ bits a weight; try: penstock chat --model \1\n"
    assert re.fullmatch(told, printed.out)
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "own").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}, "as the umask says"
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    layers = {r".*\.(q|k|v|qkv)_proj": "int6", ".*": "int4"}
    assert config["penstock_quantization"] == {"layers": layers, "embeddings": "int5"}
    words = tmp_path / "words.txt"
    words.write_text("too short")
    assert main(["quantize", str(source), str(tmp_path / "file"), "--calibration", str(words)]) == 2
    assert "tokens; give at least" in capsys.readouterr().err
    words.write_text("the quick brown fox jumps over the lazy dog " * 100)
    assert main(["quantize", str(source), str(tmp_path / "file"), "--calibration", str(words)]) == 0
