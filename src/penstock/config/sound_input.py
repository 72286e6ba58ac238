"""How a checkpoint takes sounds in prompts: the features of sounds, and the tokens that stand for them. Plain data."""

from penstock.dataclass import dataclass

STRIDE = 2
"""Frames of a position of an audio encoder."""


@dataclass(frozen=True, slots=True)
class SoundInput:
    """Settings of a checkpoint's processor of sounds.

    The front end makes log-mel features of sounds, cuts them into windows, and expands placeholders by it.
    """

    num_mels: int
    window_frames: int
    """Frames of a window, the most that the encoder takes at a time."""
    group: int
    """Positions of the encoder of a feature vector."""
    placeholder: int
    """Token id that stands for one feature vector."""
    filled: bool = False
    """Whether silence fills a sound's last window."""
    margin: int = 0
    """Frames after a window that it has, too, of the silence that fills it up to its full length; the features of
    each window are then made apart from those of the others."""
    chunk: int = 0
    """Frames that the encoder convolves at a time, over mels, too, with an eighth as many positions, rounded up; 0: it
    has convolutions over frames alone."""
    bare: bool = False
    """Whether no silence follows a sound, whose last, incomplete frame is left out."""
    begin: str = ""
    """Text of the token before a sound, which chat templates write, but for those that do not know sounds."""
    end: str = ""
    """As `begin`, of the token after a sound."""
    max_frames: int | None = None
    """Frames of the longest sound that the model takes; None: it does not limit them."""

    def num_tokens(self, num_frames: int) -> int:
        """Feature vectors of a window of so many frames, its margin included."""
        if self.chunk:
            chunks, rest = divmod(num_frames, self.chunk)
            return chunks * -(-self.chunk // 8) + -(-rest // 8)
        return -(-(num_frames - self.margin) // STRIDE) // self.group

    def padded(self, num_frames: int) -> int:
        """Frames to compute features of, for a sound of `num_frames`, or a window that is computed apart.

        The silence after a sound is part of its last frames, and of the loudness that all are compared with.
        """
        if self.bare:
            return 0
        if self.filled:
            return -(-num_frames // self.window_frames) * self.window_frames
        most = self.window_frames if self.margin else self.max_frames
        return num_frames + _EDGE if most is None else min(num_frames + _EDGE, most)


_EDGE = 2
"""Frames beyond the end of a sound that have samples of it."""
