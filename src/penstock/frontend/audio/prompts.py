"""Sounds for `penstock.frontend.images.prompts`: how they are read, and the tokens that stand for them."""

from dataclasses import asdict

from penstock.api.request import Image
from penstock.config.engine_config import AudioConfig
from penstock.config.sound_input import SoundInput
from penstock.frontend.audio.limits import CPU_SECONDS, MEMORY_BYTES
from penstock.frontend.decoders import DecoderKind
from penstock.frontend.images.placeholders import Expansion, MediaTokens
from penstock.frontend.images.reader import KeptPictures, MediaReader, Part, Picture, ReadingLimits
from penstock.text.tokenizer import Tokenizer

_DECODER = DecoderKind("penstock.frontend.audio.worker", "sound", CPU_SECONDS)
_FLOAT_BYTES = 4


class PromptSoundReader(MediaReader):
    """Reads sounds of prompts for one model."""

    def __init__(self, about: SoundInput, limits: AudioConfig, kept: KeptPictures) -> None:
        header = {"sound_input": asdict(about), "max_seconds": limits.max_audio_seconds}
        most = limits.max_audio_bytes
        super().__init__(_DECODER, header, ReadingLimits("max_audio_bytes", most, MEMORY_BYTES, _FLOAT_BYTES), kept)


class SoundTokens(MediaTokens):
    """The tokens of sounds for one model: placeholders alone, as the chat template writes what is around them.

    A template that does not know sounds, as some GGUF files have, gets both as text.
    """

    kind = "sound"

    def __init__(self, about: SoundInput, tokenizer: Tokenizer) -> None:
        """
        Raises:
            CheckpointError: the tokenizer lacks the placeholder.
        """
        super().__init__(about.placeholder, tokenizer)
        self._about, source = about, tokenizer.chat_template_source
        if "audio" not in source and self.placeholder not in source:
            self.in_message = about.begin + self.placeholder + about.end

    def expanded(self, picture: Picture) -> Expansion:
        made = Expansion()
        for part in picture.parts:
            made.starts.append(len(made.token_ids))
            made.token_ids += [self.id_of_placeholder] * self._about.num_tokens(part.width)
        return made

    def image(self, part: Part, start: int) -> Image:
        count = self._about.num_tokens(part.width)
        return Image(
            start=start,
            count=count,
            rows=1,
            columns=count,
            height=part.height,
            width=part.width,
            digest=part.digest,
            pixels=part.pixels,
            is_sound=True,
        )
