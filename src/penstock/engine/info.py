"""What an engine reports to the front end: model facts at startup, counters while it runs."""

from penstock.checkpoint.adapters.adaptable import Adaptable
from penstock.checkpoint.encoder_config import EncoderConfig
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.config.audio_input import AudioInput
from penstock.config.engine_config import Role
from penstock.config.image_input import ImageInput
from penstock.config.sound_input import SoundInput
from penstock.core.block_writer import TierStats
from penstock.core.plan import StepTrace
from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts needed to validate requests; sent once, when the engine is ready."""

    model_name: str
    model_path: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    seed: int | None
    defaults: GenerationDefaults
    memory_plan: str
    num_blocks: int
    block_size: int
    max_batch_total_tokens: int | None = None
    """TGI's limit, if set: a larger request could never be admitted."""
    device: str = "cpu"
    dtype: str = "float32"
    """Compute dtype."""
    max_num_batched_tokens: int = 512
    adaptable: Adaptable | None = None
    """The linear maps that adapters can modify; None: the memory plan has no room for adapters."""
    max_adapter_elements: int = 0
    """Maximum total weight elements of the adapters in memory."""
    max_adapters: int = 0
    """Maximum number of adapters in memory, if their weights fit."""
    arithmetic: str = ""
    """Fingerprint, equal for engines whose answers are equal bit for bit (`runner.fingerprint`)."""
    encoder: EncoderConfig | None = None
    """Settings of an encoder; None: the model is generative."""
    role: Role = "any"
    hf_overrides: str | None = None
    """JSON object that replaces settings of the model's config.json."""
    image_input: ImageInput | None = None
    """How the model takes images; None: it takes none."""
    audio_input: AudioInput | None = None
    """How the model transcribes; None: it does not."""
    sound_input: SoundInput | None = None
    """How the model takes sounds in prompts; None: it takes none."""
    unsupported_encoder: str | None = None
    """The kind of the checkpoint's audio encoder, if it is not supported."""
    memory_bytes: int = 0
    """Bytes of the memory plan."""
    image_pixels: int = 0
    """Maximum bytes of the images of open requests, by the memory plan; 0: no maximum."""
    model_version: str = ""
    """`version_of` the model at the path."""

    @property
    def encoder_note(self) -> str:
        """Suffix for messages about the model's inputs: its audio encoder is not supported; empty if it is."""
        kind = self.unsupported_encoder
        return "" if kind is None else f"; its audio encoder ({kind}) is not supported"

    @property
    def model_identity(self) -> str:
        """Identity of the model for which requests were accepted: its path, version and `hf_overrides`."""
        return identity_of(self.model_path, self.model_version, self.hf_overrides)


def identity_of(path: str, version: str, hf_overrides: str | None) -> str:
    """See `EngineInfo.model_identity`."""
    return f"{path}{version}" if hf_overrides is None else f"{path}{version} {hf_overrides}"


@dataclass(slots=True)
class StepRecord:
    """One step: start, durations of its parts, and its trace."""

    began: float
    """Seconds of `time.monotonic()`."""
    schedule: float
    """Seconds, like the next two."""
    execute: float
    update: float
    trace: StepTrace
    replica: int = 0
    """The engine's replica in the fleet; set by the front end."""

    @property
    def seconds(self) -> float:
        return self.schedule + self.execute + self.update


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current gauges, and counters since the start."""

    num_running: int
    num_waiting: int
    blocks_held: int
    blocks_cached: int
    """Idle in the prefix cache: allocatable, and still a possible hit."""
    blocks_free: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    steps: int
    scheduled_tokens: int
    drafted_tokens: int = 0
    """Drafted tokens that were verified, and how many were accepted."""
    accepted_tokens: int = 0
    encoded_images: int = 0
    """Images that the vision tower has encoded."""
    adapters_loaded: int = 0
    """Adapters in memory."""
    tier: TierStats | None = None
    """Counters of blocks stored in a file or fetched from other engines."""
