"""The features of sounds in prompts, against `transformers`' feature extractor."""

from dataclasses import replace

import numpy as np
import pytest
import transformers

from penstock.config.sound_input import SoundInput
from penstock.frontend.audio.sounds import LongestSound, SoundError
from penstock.frontend.audio.windows import longest_sound, sizes_of, windows_of
from tests.support.hearing import a_sound

ONE = SoundInput(num_mels=16, window_frames=200, group=2, placeholder=0, margin=2, max_frames=200)
FILLED = SoundInput(num_mels=16, window_frames=200, group=4, placeholder=0, filled=True)
BARE = SoundInput(num_mels=16, window_frames=200, group=1, placeholder=0, chunk=100, bare=True)
CUT = SoundInput(num_mels=16, window_frames=200, group=2, placeholder=0, max_frames=400)


def features(windows):
    return [
        np.frombuffer(content, np.float32).reshape(size)
        for size, content in zip(windows.sizes, windows.features, strict=True)
    ]


@pytest.mark.parametrize("seconds", [0.5, 1.3337, 1.9957, 2.0])
def test_a_sound_in_one_window_has_the_features_of_the_silence_after_it(seconds):
    sound = a_sound(seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    made = extractor(sound, sampling_rate=16_000, padding="max_length", return_attention_mask=True)
    count = int(made.attention_mask[0].sum())
    (found,) = features(windows_of(sound, ONE))
    assert found.shape == (16, count + 2)
    expected = np.pad(made.input_features[0], ((0, 0), (0, 2)))[:, : count + 2]
    np.testing.assert_allclose(found, expected, atol=5e-5)


def test_features_of_windows_with_a_margin_are_made_apart():
    sound, about = a_sound(3.3), SoundInput(16, 200, 2, 0, margin=2, max_frames=600)
    first, second = features(windows_of(sound, about))
    for found, part in ((first, sound[:32_000]), (second, sound[32_000:])):
        np.testing.assert_array_equal(found, features(windows_of(part, ONE))[0])


def test_a_filled_window_ends_with_silence():
    sound = a_sound(2.7)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    made = extractor(sound, sampling_rate=16_000, truncation=False, padding=True, pad_to_multiple_of=32_000)
    found = features(windows_of(sound, FILLED))
    assert [one.shape for one in found] == [(16, 200)] * 2
    np.testing.assert_allclose(np.concatenate(found, 1), made.input_features[0], atol=5e-5)


def test_windows_without_a_token_are_left_out():
    assert windows_of(a_sound(2.02), CUT).sizes == [(16, 200)]
    assert windows_of(a_sound(2.03), CUT).sizes == [(16, 200), (16, 3)]


@pytest.mark.parametrize("about", [ONE, FILLED, CUT, BARE, replace(ONE, max_frames=600)])
@pytest.mark.parametrize("seconds", [0.08, 0.5, 1.3337, 1.9957, 2.0])
def test_the_sizes_of_windows_are_known_without_features(about, seconds):
    sound = a_sound(seconds)
    windows = windows_of(sound, about)
    assert windows.sizes == sizes_of(len(sound), about)
    assert [4 * mels * frames for mels, frames in windows.sizes] == [len(content) for content in windows.features]


def test_the_longest_sound_is_the_models_or_that_of_the_option():
    assert longest_sound(3, ONE) == LongestSound(2, is_models=True)
    assert longest_sound(1, ONE) == LongestSound(1)
    assert longest_sound(3, FILLED) == LongestSound(3)


@pytest.mark.parametrize(
    ("sound", "about", "word"),
    [
        (a_sound(0.01), ONE, "shorter than a token"),
        (np.full(1600, 3e38, np.float32), FILLED, "too large"),
    ],
)
def test_what_has_no_features_is_refused(sound, about, word):
    with pytest.raises(SoundError, match=word):
        windows_of(sound, about)
