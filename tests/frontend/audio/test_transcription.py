"""Transcripts by `LLM.transcribe` against `transformers`' `generate`, and the parts of the algorithm."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoint.audio_input import read_audio_input
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import InvalidRequestError, WrongTaskError
from penstock.frontend import decoders
from penstock.frontend.audio.reader import SoundReader
from penstock.frontend.audio.transcription import Transcription, TranscriptOptions, cut_segments
from penstock.frontend.input_processor import ImagePrompt
from tests.support.hearing import CONTEXT, a_sound, make_hearing, wav_of


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    return make_hearing(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def llm(hearing):
    with LLM(str(hearing.folder), dtype="float32", kv_cache_memory="8MiB", max_audio_seconds=20) as llm:
        yield llm


def tokens_of(transcript):
    return [token for segment in transcript.segments for token in segment.tokens]


def without_repeats(tokens, about):
    """Without the second of two equal timestamps, as `generate` ends a window with both."""
    kept = [token for before, token in zip([None, *tokens], tokens, strict=False) if token != before]
    return [token for token in kept if token >= about.first_timestamp], [t for t in tokens if t < about.end]


@pytest.fixture(scope="module")
def about(hearing):
    return read_audio_input(open_checkpoint(str(hearing.folder)))


def test_a_window_without_timestamps_has_the_tokens_of_generate(llm, hearing):
    sound = a_sound(1.5, 4)
    found = llm.transcribe(sound, language="de", translate=True)
    assert tokens_of(found) == hearing.generate(sound, language="de", task="translate")


def test_windows_with_timestamps_have_the_tokens_of_generate(llm, hearing, about):
    sound = a_sound(5.3)
    found = llm.transcribe(sound, language="en", timestamps=True)
    assert len({segment.seek for segment in found.segments}) > 2
    expected = hearing.generate(sound, language="en", task="transcribe", return_timestamps=True)
    assert without_repeats(tokens_of(found), about) == without_repeats(expected, about)
    assert all(a.end <= b.start + 1e-9 for a, b in zip(found.segments, found.segments[1:], strict=False))


def test_the_language_is_the_likeliest_of_those_that_the_model_knows(llm, hearing):
    sound = a_sound(2.0, 3)
    heard = hearing.model.detect_language(hearing.features(sound))[0].item()
    assert llm.transcribe(sound).language == {302: "en", 303: "de"}[heard]


def test_a_file_gives_the_transcript_of_its_samples(llm, tmp_path):
    sound = np.round(a_sound(3.0) * 32768).astype(np.float32) / 32768
    file = tmp_path / "sound.wav"
    file.write_bytes(wav_of(sound))
    made = llm.transcribe(sound, language="en")
    assert llm.transcribe(file, language="en") == llm.transcribe(file.read_bytes(), language="en") == made
    assert made.seconds == pytest.approx(3.0)


def test_answers_are_the_same_alone_and_together_however_few_windows_fit(hearing, llm, about):
    """With `n` answers, sampled, about more windows than there is room for at a time."""
    sounds = [llm._need_sounds().read(a_sound(2.0, seed)) for seed in range(4)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=20)
    prompts = []
    for sound in sounds:
        options = TranscriptOptions(language="en", has_segments=True)
        asked = Transcription(sound, about, CONTEXT, options, lambda text: [], lambda tokens: "").next()[0]
        prompts.append(ImagePrompt(list(asked.prompt), asked.images))
        params = replace(params, transcript=asked.params.transcript)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    with LLM(str(hearing.folder), dtype="float32", kv_cache_memory="24KiB", max_memory="3.4MiB", block_size=2) as small:
        together = small.generate(prompts * 2, params)
        assert small._core.settings.memory.image_features == 3 * 70_400  # three windows, with their streams
        assert small.stats().preemptions > 0
    for one, found in zip(alone * 2, together, strict=True):
        assert [answer.token_ids for answer in one.outputs] == [answer.token_ids for answer in found.outputs]


def test_what_cannot_be_done_is_refused_by_name(llm):
    sound = a_sound(1.0)
    for options, word in (({"language": "xx"}, "language"), ({"prompt": "a b c d e f g h " * 20}, "prompt")):
        with pytest.raises(InvalidRequestError, match=word):
            llm.transcribe(sound, **options)
    with pytest.raises(InvalidRequestError, match="max_audio_seconds"):
        llm.transcribe(wav_of(a_sound(21.0)))
    with pytest.raises(InvalidRequestError, match="samples"):
        llm.transcribe(np.zeros((2, 100), np.float32))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        llm.transcribe("/nowhere.wav")
    with pytest.raises(WrongTaskError, match="transcribes"):
        llm.generate("Hello")


def test_the_task_is_checked_before_the_sound_is_read(llm):
    with pytest.raises(InvalidRequestError, match="language"):
        llm.transcribe("/nowhere.wav", language="xx")


def test_a_prompt_with_control_tokens_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="control tokens"):
        llm.transcribe(a_sound(1.0), language="en", prompt="a <|startoftranscript|>")


def test_samples_are_finite_floats_whose_features_are_finite(llm):
    for samples, words in (
        (np.ones(16_000, np.int16), "not int16"),
        (np.full(16_000, 1e300), "finite numbers"),
        (np.full(16_000, 1e30), "too large"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            llm.transcribe(samples, language="en")
    sound = a_sound(1.0)
    assert llm.transcribe(sound.astype(np.float64), language="en") == llm.transcribe(sound, language="en")


def test_a_file_whose_features_are_not_finite_is_refused(llm):
    data = np.full(16_000, 1e30, "<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, 16_000, 0, 0, 32)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    with pytest.raises(InvalidRequestError, match="too large"):
        llm.transcribe(b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks, language="en")


def test_a_decoding_process_has_its_processor_time_and_more(about, llm, monkeypatch):
    monkeypatch.setattr(decoders, "PATIENCE", 0.0)
    reader = SoundReader(about, llm._audio_limits)
    try:
        assert reader.read(wav_of(a_sound(1.0))).seconds == pytest.approx(1.0)
    finally:
        reader.close()


def test_a_model_of_english_alone_has_one_task(tmp_path):
    hearing = make_hearing(tmp_path, multilingual=False)
    sound = a_sound(2.0)
    with LLM(str(tmp_path), dtype="float32", kv_cache_memory="8MiB") as llm:
        found = llm.transcribe(sound, timestamps=True)
        assert found.language == "en"
        expected = hearing.generate(sound, return_timestamps=True)
        about = llm._need_sounds().about
        assert without_repeats(tokens_of(found), about) == without_repeats(expected, about)
        with pytest.raises(InvalidRequestError, match="translates nothing"):
            llm.transcribe(sound, translate=True)


def test_a_text_model_says_that_it_does_not_transcribe():
    with LLM(kv_cache_memory="8MiB") as llm, pytest.raises(InvalidRequestError, match="does not transcribe"):
        llm.transcribe(a_sound(1.0))


@pytest.mark.parametrize(
    ("answer", "segments", "advance"),
    [
        ([], [], 200),
        ([5, 6], [(0.0, 1.8)], 180),
        ([310, 5, 360], [(0.0, 1.0)], 180),
        ([310, 5, 330, 330, 6, 360], [(0.0, 0.4), (0.4, 1.0)], 180),
        ([310, 5, 330, 330, 6, 360, 360], [(0.0, 0.4), (0.4, 1.0)], 100),
        ([310, 5, 330, 340, 6], [(0.0, 0.4)], 40),
        ([310, 310], [(0.0, 0.0)], 180),
    ],
)
def test_windows_end_with_their_last_complete_segment(about, answer, segments, advance):
    frames = 200 if not answer else 180
    cuts, found = cut_segments(answer, frames, about)
    assert [(round(begin, 6), round(end, 6)) for begin, end, _ in cuts] == segments
    assert found == advance


def test_a_closed_reader_reads_nothing(about, llm):
    reader = SoundReader(about, llm._audio_limits)
    reader.close()
    with pytest.raises(Exception, match="closed"):
        reader.read(wav_of(a_sound(1.0)))
