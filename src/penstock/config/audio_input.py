"""How a checkpoint transcribes: the features of its windows of audio, and the tokens that control it. Plain data."""

from penstock.dataclass import dataclass

SAMPLE_RATE = 16_000
"""Samples a second of the audio that features are made of."""
HOP = 160
"""Samples between two frames of features."""
FRAMES_PER_SECOND = SAMPLE_RATE // HOP


@dataclass(frozen=True, slots=True)
class AudioInput:
    """Settings of a checkpoint that transcribes, of `config.json` and `generation_config.json`."""

    num_mels: int
    num_frames: int
    """Frames of a window."""
    frames_per_step: int
    """Frames between two timestamps that follow one another."""
    num_positions: int
    """Positions of a window that the text model attends to."""
    start: int
    """Token that begins an answer's prompt."""
    end: int
    """Token that ends an answer."""
    no_timestamps: int
    """Token of a prompt whose answer has no timestamps. Those above it are timestamps, from 0 seconds on."""
    previous: int | None = None
    """Token before earlier text in a prompt; None: the model takes none."""
    languages: tuple[tuple[str, int], ...] = ()
    """Codes of the languages and their tokens; (): the model knows English alone, and prompts name no language."""
    transcribe: int | None = None
    """Tokens of the two tasks; None: the model has one task."""
    translate: int | None = None
    begin_suppress: tuple[int, ...] = ()
    """Tokens that begin no answer."""
    max_initial_timestamp: int | None = None
    """Highest first timestamp, in steps."""

    @property
    def first_timestamp(self) -> int:
        """The token of 0 seconds."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """Whisper's no-speech token: its probability after `start` is that of silence."""
        return self.no_timestamps - 1

    @property
    def step_seconds(self) -> float:
        """Seconds between two timestamps that follow one another."""
        return self.frames_per_step / FRAMES_PER_SECOND
