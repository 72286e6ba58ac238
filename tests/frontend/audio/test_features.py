"""Log-mel features against `transformers`."""

import numpy as np
import pytest
import transformers

from penstock.frontend.audio.features import log_mel
from tests.support.hearing import a_sound


@pytest.mark.parametrize(("seconds", "mels"), [(1.3, 80), (2.0, 128), (5.317, 80)])
def test_features_equal_those_of_transformers_for_a_window_and_for_all_of_a_longer_sound(seconds, mels):
    extractor, samples = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=2), a_sound(seconds)
    how = {"truncation": False, "padding": "longest"} if seconds > 2 else {}
    expected = extractor(samples, sampling_rate=16_000, **how).input_features[0]
    found = log_mel(samples, mels, 200)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=5e-5)


def test_silence_has_features_that_are_finite():
    assert np.isfinite(log_mel(np.zeros(100, np.float32), 80, 200)).all()
