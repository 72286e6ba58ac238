"""Sound files as samples."""

import io
import struct
import sys
import wave

import numpy as np
import pytest

from penstock.frontend.audio.sounds import SoundError, read_sound, resample
from tests.support.hearing import a_sound, wav_of


def riff(kind, bits, channels, rate, data, *, size=None):
    form = struct.pack("<HHIIHH", kind, channels, rate, 0, 0, bits)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def tone(rate, seconds=1.0):
    return np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize(
    ("kind", "bits", "pack", "error"),
    [
        (1, 8, lambda x: np.round(x * 127 + 128).astype("u1").tobytes(), 2e-2),
        (1, 16, lambda x: np.round(x * 32767).astype("<i2").tobytes(), 1e-4),
        (1, 24, lambda x: b"".join(int(v * (2**23 - 1)).to_bytes(3, "little", signed=True) for v in x), 1e-6),
        (1, 32, lambda x: np.round(x * (2**31 - 1)).astype("<i4").tobytes(), 1e-6),
        (3, 32, lambda x: x.astype("<f4").tobytes(), 1e-7),
        (3, 64, lambda x: x.astype("<f8").tobytes(), 1e-7),
    ],
)
def test_wav_files_of_integers_and_floats_are_read(kind, bits, pack, error):
    samples = tone(16_000)
    np.testing.assert_allclose(read_sound(riff(kind, bits, 1, 16_000, pack(samples)), 10), samples, atol=error)


def test_channels_are_mixed_and_the_length_of_a_streamed_file_is_that_of_its_data():
    left, right = tone(16_000), np.zeros(16_000)
    data = np.stack((left, right), 1).astype("<f4").tobytes()
    for size in (None, 0xFFFFFFFF, 0):
        found = read_sound(riff(3, 32, 2, 16_000, data, size=size), 10)
        np.testing.assert_allclose(found, left / 2, atol=1e-7)


def test_data_of_length_0_before_another_chunk_is_an_empty_sound():
    with pytest.raises(SoundError, match="empty"):
        read_sound(riff(3, 32, 1, 16_000, b"LIST" + struct.pack("<I", 8) + b"INFO1234", size=0), 10)


def test_files_of_pythons_wave_module_are_read():
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes((tone(16_000) * 32767).astype("<i2").tobytes())
    np.testing.assert_allclose(read_sound(file.getvalue(), 10), tone(16_000), atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_at_another_rate_becomes_the_same_tone(rate):
    found = resample(tone(rate, 40.0).astype(np.float32), rate)
    expected = tone(16_000, 40.0)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=2e-3)


def test_frequencies_that_the_rate_does_not_hold_are_taken_out():
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resample(high, 48_000)[200:-200]).max() < 0.01


def test_resampling_in_blocks_gives_the_same_samples():
    from penstock.frontend.audio.sounds import _resampled

    sound = a_sound(3.0)
    parts = np.array_split(sound, [1, 10, 5000, 30_000])
    np.testing.assert_allclose(np.concatenate([*_resampled(iter(parts), 44_100)]), resample(sound, 44_100), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (riff(1, 16, 1, 16_000, b""), "empty"),
        (riff(1, 12, 1, 16_000, b"1234"), "12 bits"),
        (riff(1, 16, 0, 16_000, b"1234"), "0 channels"),
        (riff(1, 16, 1, 0, b"1234"), "0 samples a second"),
        (riff(1, 16, 1, 400_000, b"1234"), "400000 samples"),
        (riff(3, 32, 1, 16_000, struct.pack("<f", float("nan"))), "finite"),
        (b"RIFF1234WAVEfmt ", "damaged"),
        (wav_of(a_sound(3.0)), "longer than 2 s"),
    ],
)
def test_what_is_no_sound_of_the_allowed_length_is_refused_by_name(data, words):
    with pytest.raises(SoundError, match=words):
        read_sound(data, 2)


def test_other_formats_need_soundfile_which_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(SoundError, match="soundfile"):
        read_sound(b"ID3\4", 2)


def test_soundfile_reads_flac():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(44_100, 2.0), 44_100, format="FLAC")
    np.testing.assert_allclose(read_sound(file.getvalue(), 5)[200:-200], tone(16_000, 2.0)[200:-200], atol=2e-3)
    with pytest.raises(SoundError, match="longer"):
        read_sound(file.getvalue(), 1)
    with pytest.raises(SoundError, match="no format that is read"):
        read_sound(b"nothing that is a sound", 5)
