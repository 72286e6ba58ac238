"""Sound files as samples."""

import errno
import io
import struct
import sys
import wave
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest

from penstock.config.sound_input import SoundInput
from penstock.frontend.audio.sounds import LongestSound, SoundError, count_samples, read_sound, resample
from penstock.frontend.audio.worker import answer
from penstock.frontend.decoder_frames import REFUSED, pack
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
    found = read_sound(riff(kind, bits, 1, 16_000, pack(samples)), LongestSound(10))
    np.testing.assert_allclose(found, samples, atol=error)


def test_channels_are_mixed_and_the_length_of_a_streamed_file_is_that_of_its_data():
    left, right = tone(16_000), np.zeros(16_000)
    data = np.stack((left, right), 1).astype("<f4").tobytes()
    for size in (None, 0xFFFFFFFF, 0):
        found = read_sound(riff(3, 32, 2, 16_000, data, size=size), LongestSound(10))
        np.testing.assert_allclose(found, left / 2, atol=1e-7)


def test_data_of_length_0_before_another_chunk_is_an_empty_sound():
    with pytest.raises(SoundError, match="empty"):
        read_sound(riff(3, 32, 1, 16_000, b"LIST" + struct.pack("<I", 8) + b"INFO1234", size=0), LongestSound(10))


def test_files_of_pythons_wave_module_are_read():
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes((tone(16_000) * 32767).astype("<i2").tobytes())
    np.testing.assert_allclose(read_sound(file.getvalue(), LongestSound(10)), tone(16_000), atol=1e-4)


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000])
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
        (riff(1, 16, 17, 16_000, b"1" * 34), "17 channels"),
        (riff(3, 32, 1, 16_000, struct.pack("<f", float("nan"))), "finite"),
        (b"RIFF1234WAVEfmt ", "damaged"),
        (wav_of(a_sound(3.0)), "longer than 2 s"),
    ],
)
def test_what_is_no_sound_of_the_allowed_length_is_refused_by_name(data, words):
    with pytest.raises(SoundError, match=words):
        read_sound(data, LongestSound(2))


def recording(codec, form, rate, channels=1, seconds=2.0):
    """A tone, as phones and browsers record it."""
    av = pytest.importorskip("av")
    file, layout = io.BytesIO(), "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format=form) as writer:
        stream = writer.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(
            np.tile(tone(rate, seconds).astype(np.float32), (channels, 1)), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in (*stream.encode(frame), *stream.encode(None)):
            writer.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "form", "rate", "channels"),
    [
        ("aac", "mp4", 44_100, 2),
        ("alac", "ipod", 16_000, 1),
        ("libopus", "webm", 48_000, 1),
        ("pcm_s16le", "mov", 32_000, 2),
    ],
)
def test_recordings_of_phones_and_browsers_are_read(codec, form, rate, channels):
    found = read_sound(recording(codec, form, rate, channels), LongestSound(5))
    assert 32_000 <= len(found) < 32_500  # the last frame is whole
    np.testing.assert_allclose(found[3000:29_000], tone(16_000, 2.0)[3000:29_000], atol=0.15)


def test_containers_of_other_codecs_lengths_and_contents_are_refused_by_name(monkeypatch):
    sound = recording("aac", "mp4", 16_000)
    with pytest.raises(SoundError, match="longer than 1 s"):
        read_sound(sound, LongestSound(1))
    with pytest.raises(SoundError, match="codec ac3"):
        read_sound(recording("ac3", "mp4", 48_000), LongestSound(5))
    for damaged in (sound[:60], b"\x1aE\xdf\xa3" + bytes(100), sound[:4] + b"moov" + sound[8:]):
        with pytest.raises(SoundError, match=r"damaged: Invalid data found when processing input$|no audio"):
            read_sound(damaged, LongestSound(5))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(SoundError, match="PyAV"):
        read_sound(sound, LongestSound(5))


def test_a_file_of_more_samples_than_a_decoder_has_time_for_is_refused_by_its_header():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros((4_800, 8), np.int16), 192_000, format="FLAC")
    silence = bytearray(file.getvalue())
    count = int.from_bytes(silence[21:26], "big") & ~(2**36 - 1) | 192_000 * 3_600  # an hour, it says
    silence[21:26] = count.to_bytes(5, "big")
    with pytest.raises(SoundError, match="samples: send it in parts"):
        read_sound(bytes(silence), LongestSound(7200))


def test_other_formats_need_soundfile_which_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(SoundError, match="soundfile"):
        read_sound(b"ID3\4", LongestSound(2))


def test_soundfile_reads_flac():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(44_100, 2.0), 44_100, format="FLAC")
    found = read_sound(file.getvalue(), LongestSound(5))
    np.testing.assert_allclose(found[200:-200], tone(16_000, 2.0)[200:-200], atol=2e-3)
    with pytest.raises(SoundError, match="longer"):
        read_sound(file.getvalue(), LongestSound(1))
    with pytest.raises(SoundError, match="no format that is read"):
        read_sound(b"nothing that is a sound", LongestSound(5))


def test_a_flac_stream_whose_header_has_no_length_is_read():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(16_000, 2.0), 16_000, format="FLAC")
    stream = bytearray(file.getvalue())
    stream[21:26] = (int.from_bytes(stream[21:26], "big") & ~(2**36 - 1)).to_bytes(5, "big")  # the number of samples
    np.testing.assert_array_equal(*(read_sound(bytes(data), LongestSound(5)) for data in (stream, file.getvalue())))
    with pytest.raises(SoundError, match="longer than 1 s"):
        read_sound(bytes(stream), LongestSound(1))


@pytest.mark.parametrize("seconds", [0.3337, 2.0])
@pytest.mark.parametrize("rate", [11_025, 16_000, 48_000])
def test_samples_are_counted_as_they_are_read(seconds, rate):
    soundfile = pytest.importorskip("soundfile")
    flac = io.BytesIO()
    soundfile.write(flac, tone(rate, seconds), rate, format="FLAC")
    wav = riff(3, 32, 1, rate, tone(rate, seconds).astype("<f4").tobytes())
    for data in (wav, flac.getvalue()):
        assert count_samples(data, LongestSound(5)) == len(read_sound(data, LongestSound(5)))


def test_samples_of_a_wav_file_are_counted_by_its_header():
    unreadable = riff(3, 32, 1, 16_000, struct.pack("<f", float("nan")))
    assert count_samples(unreadable, LongestSound(1)) == 1
    with pytest.raises(SoundError, match="empty"):
        count_samples(riff(3, 32, 1, 16_000, b""), LongestSound(1))


def test_a_sound_longer_than_the_model_takes_is_refused_before_it_is_decoded_whole(monkeypatch):
    soundfile = pytest.importorskip("soundfile")
    file, read, reads = io.BytesIO(), soundfile.SoundFile.read, []
    soundfile.write(file, tone(16_000, 95.0), 16_000, format="FLAC")
    unknown = bytearray(file.getvalue())
    unknown[21:26] = (int.from_bytes(unknown[21:26], "big") & ~(2**36 - 1)).to_bytes(5, "big")
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *given, **named: reads.append(0) or read(*given, **named))
    about = asdict(SoundInput(num_mels=16, window_frames=200, group=2, placeholder=0, max_frames=200))
    header = {"sound_input": about, "max_seconds": 3600, "is_base64": False, "wants_pixels": True}
    for data, blocks in ((file.getvalue(), 0), (bytes(unknown), 1)):
        reads.clear()
        assert answer(pack(header, data)) == (
            REFUSED + b"the audio is longer than the 2 s that this model takes: send it in parts"
        )
        assert len(reads) == blocks


def test_a_container_that_takes_too_much_memory_is_not_called_damaged(monkeypatch):
    av = pytest.importorskip("av")

    def fail(*_, **__):
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    sound = recording("aac", "mp4", 16_000)
    monkeypatch.setattr(av, "open", fail)
    with pytest.raises(MemoryError):
        read_sound(sound, LongestSound(5))
