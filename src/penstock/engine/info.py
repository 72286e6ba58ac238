"""What an engine reports to the front end: facts of the model at start, counters as it runs."""

from dataclasses import dataclass

from penstock.adapters.folder import Adaptable
from penstock.checkpoint import GenerationDefaults
from penstock.config import Role
from penstock.core.block_writer import TierStats
from penstock.core.plan import StepTrace
from penstock.encoder_config import EncoderConfig


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What accepting a request depends on; sent once, when the engine is ready."""

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
    """TGI's control, where it is set: a request beyond it alone could never be admitted."""
    device: str = "cpu"
    dtype: str = "float32"
    """Of the arithmetic."""
    max_num_batched_tokens: int = 512
    adaptable: Adaptable | None = None
    """What adapters may add to; None: no memory is planned for any."""
    max_adapter_elements: int = 0
    """Of the weights of those that are in memory at one time."""
    max_adapters: int = 0
    """In memory at one time, if their weights fit."""
    arithmetic: str = ""
    """Equal for engines that give equal answers, to the bit (`engine.fingerprint`)."""
    encoder: EncoderConfig | None = None
    """How texts become vectors or scores; None: the model generates."""
    role: Role = "any"


@dataclass(slots=True)
class StepRecord:
    """One step: when, how long each part of it took, and its account."""

    began: float
    """Seconds of `time.monotonic()`."""
    schedule: float
    """Seconds, as the next two."""
    execute: float
    update: float
    trace: StepTrace
    place: int = 0
    """Of the engine in its fleet; the front end fills it in."""

    @property
    def seconds(self) -> float:
        return self.schedule + self.execute + self.update


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment and counters since the start."""

    num_running: int
    num_waiting: int
    blocks_held: int
    blocks_cached: int
    """Idle in the prefix cache: free to take, but still a possible hit."""
    blocks_free: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    steps: int
    scheduled_tokens: int
    drafted_tokens: int = 0
    """Guessed beforehand and computed, and how many of them were right."""
    accepted_tokens: int = 0
    adapters_loaded: int = 0
    """In memory."""
    tier: TierStats | None = None
    """Of the blocks that are kept in a file, or fetched from other engines."""
