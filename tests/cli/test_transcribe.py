"""`penstock transcribe`."""

from pathlib import Path

import pytest

from penstock import LLM
from penstock.cli import main
from tests.support.hearing import a_sound, make_hearing, wav_of


def test_sounds_become_text_or_subtitles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hearing(tmp_path / "model")
    sound = tmp_path / "a.wav"
    sound.write_bytes(wav_of(a_sound(3.0)))
    flags = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--kv-cache-memory", "8MiB"]
    with LLM(str(tmp_path / "model"), dtype="float32", kv_cache_memory="8MiB") as llm:
        expected = llm.transcribe(sound, language="de", timestamps=True)
    capsys.readouterr()
    assert main(["transcribe", *flags, "--language", "de", str(sound), str(sound)]) == 0
    assert capsys.readouterr().out == f"{expected.text}\n" * 2
    assert main(["transcribe", *flags, "--language", "de", "--format", "srt", str(sound)]) == 0
    assert capsys.readouterr().out.count(" --> ") == len(expected.segments)
    assert main(["transcribe", *flags, str(tmp_path / "none.wav")]) == 2
    assert "cannot be read" in capsys.readouterr().err
