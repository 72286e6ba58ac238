"""A tiny random Whisper with windows of two seconds, made by `transformers`, and sounds for it."""

import io
import json
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken

from tests.support.tokenizers_for_tests import byte_level_bpe

TEXT = 300
"""Number of text tokens; the special ones follow."""
SPECIAL = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev")
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE = range(TEXT, TEXT + 6)
NO_TIMESTAMPS = TEXT + 9
POSITIONS, CONTEXT, MELS = 100, 64, 80
SECONDS = POSITIONS / 50

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Hearing:
    """A checkpoint in a folder, and its model of `transformers`."""

    folder: Path
    model: Any

    def features(self, samples: Samples) -> torch.Tensor:
        """As the feature extractor makes them: one window, or all of a longer sound."""
        extractor = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=int(SECONDS))
        if len(samples) > SECONDS * 16_000:
            made = extractor(samples, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest")
        else:
            made = extractor(samples, sampling_rate=16_000, return_tensors="pt")
        return made.input_features

    def generate(self, samples: Samples, **options: Any) -> list[int]:
        """The answer's tokens by `generate`."""
        torch.set_num_threads(1)  # tests run side by side
        return self.model.generate(self.features(samples), **options)[0].tolist()


def make_hearing(folder: Path, *, multilingual: bool = True) -> Hearing:
    """Write the checkpoint to `folder`."""
    torch.manual_seed(5)
    vocab = NO_TIMESTAMPS + 1 + POSITIONS + 1
    tokens = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    config = transformers.WhisperConfig(
        vocab_size=vocab,
        num_mel_bins=MELS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        max_source_positions=POSITIONS,
        max_target_positions=CONTEXT,
        **tokens,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    languages = {"is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN}}
    languages["task_to_id"] = {"translate": TRANSLATE, "transcribe": TRANSCRIBE}
    model.generation_config = transformers.GenerationConfig(
        **tokens,
        **(languages if multilingual else {"is_multilingual": False}),
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=TEXT + 7,
        max_initial_timestamp_index=20,
        suppress_tokens=[7, 8, START, TRANSLATE, TRANSCRIBE, TEXT + 6, TEXT + 7, TEXT + 8],
        begin_suppress_tokens=[30, END],
        max_length=CONTEXT,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    tokenizer = byte_level_bpe(TEXT)
    names = [*SPECIAL, "nospeech", "notimestamps", *(f"{step / 50:.2f}" for step in range(POSITIONS + 1))]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    assert tokenizer.get_vocab_size() == vocab
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Hearing(folder, model)


def a_sound(seconds: float, seed: int = 1) -> Samples:
    """Tones that change, with noise."""
    rng, count = np.random.default_rng(seed), int(seconds * 16_000)
    pitches = np.repeat(rng.uniform(100, 2000, -(-count // 3000)), 3000)[:count]
    wave = np.sin(2 * np.pi * np.cumsum(pitches) / 16_000) * 0.3 + rng.normal(0, 0.02, count)
    return wave.astype(np.float32)


def wav_of(samples: Samples) -> bytes:
    """A WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(np.round(np.clip(samples, -1, 1 - 2**-15) * 32768).astype("<i2").tobytes())
    return file.getvalue()
