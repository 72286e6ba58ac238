"""Step costs on other hardware by the roofline model, from its data sheet.

    overhead + max(weights / bandwidth, multiplications / FLOPS) + keys and values / bandwidth + attention / FLOPS

Data sheets state peaks. `MEMORY_SHARE` and `COMPUTE_SHARE` are the assumed fractions that good kernels reach; a
calibration on the hardware itself is more accurate.
"""

from penstock.config.image_settings import token_elements
from penstock.config.model_facts import KVSpec, ModelFacts, SharedKV, StateSpec
from penstock.config.settings import Settings
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.simulator.costs import StepShape

MEMORY_SHARE = 0.8
COMPUTE_SHARE = 0.5
STEP_OVERHEAD = 1e-3
"""Idle seconds of the device per step: scheduling, launches, transfer of tokens."""
SPLIT_SHARE = 0.9
"""Fraction of several devices' total speed that remains after communication."""

GB = 10**9


@dataclass(frozen=True, slots=True)
class Hardware:
    """The peak rates of one device."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """bfloat16 operations per second with float32 sums, without sparsity."""
    source: str

    def times(self, count: int) -> "Hardware":
        """Several of these devices as one, by tensor parallelism.

        Raises:
            ConfigError: `count` is less than one.
        """
        if count < 1:
            raise ConfigError(f"devices must be at least 1, not {count}")
        if count == 1:
            return self
        speed = count * SPLIT_SHARE
        name = f"{count} x {self.name}"
        return Hardware(name, count * self.memory, speed * self.bandwidth, speed * self.flops, self.source)


_TABLE = (
    Hardware("a100-80gb", 80 * GB, 2039 * GB, 312e12, "NVIDIA A100 datasheet, SXM"),
    Hardware("b200", 180 * GB, 8000 * GB, 2250e12, "NVIDIA DGX B200 datasheet, an eighth"),
    Hardware("h100-sxm", 80 * GB, 3350 * GB, 989e12, "NVIDIA H100 datasheet, SXM"),
    Hardware("h200", 141 * GB, 4800 * GB, 989e12, "NVIDIA H200 datasheet, SXM"),
    Hardware("l4", 24 * GB, 300 * GB, 121e12, "NVIDIA L4 datasheet"),
    Hardware("l40s", 48 * GB, 864 * GB, 362e12, "NVIDIA L40S datasheet"),
    Hardware("mi300x", 192 * GB, 5300 * GB, 1307e12, "AMD Instinct MI300X data sheet"),
)
HARDWARE = {hardware.name: hardware for hardware in _TABLE}


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """`StepCosts` of a model on hardware."""

    hardware: Hardware
    weight_seconds: float
    """Seconds to read all weights once."""
    per_token: float
    """Seconds to multiply a token with the layers' matrices."""
    per_sample: float
    """Seconds for the output projection, and to read and write a sequence's states."""
    per_key: float
    """Seconds to read one token's keys and values in all layers."""
    per_pair: float

    def seconds(self, shape: StepShape) -> float:
        products = self.per_token * shape.tokens + self.per_sample * shape.samples
        attention = self.per_key * shape.keys + self.per_pair * shape.pairs
        return STEP_OVERHEAD + max(self.weight_seconds, products) + attention


def roofline(facts: ModelFacts, settings: Settings, hardware: Hardware) -> RooflineCosts:
    """The costs of a model's steps with these settings.

    Sliding windows count as full, and all experts of a mixture as active. Recurrent layers count the traffic of their
    states, not their arithmetic.
    """
    bandwidth, flops = MEMORY_SHARE * hardware.bandwidth, COMPUTE_SHARE * hardware.flops
    output = sum(m.rows * m.columns for m in facts.matrices if m.multiplied and m.rows == facts.vocab_size)
    layers = token_elements(facts)
    attention = 4 * facts.hidden_size  # of a query and a key in a layer, if all heads are as wide as the model
    a_key = a_pair = window_keys = fixed = 0
    for kept in facts.caches:
        cache = facts.caches[kept.layer] if isinstance(kept, SharedKV) else kept
        if isinstance(cache, StateSpec):
            fixed += 2 * cache.block_bytes(1, settings.kv_cache_dtype)  # read and written
        elif isinstance(cache, KVSpec) and cache.window is not None:
            window_keys += cache.window
            fixed += cache.window * cache.block_bytes(1, settings.kv_cache_dtype)
        elif isinstance(cache, KVSpec):
            a_key += cache.block_bytes(1, settings.kv_cache_dtype)
            a_pair += attention
    return RooflineCosts(
        hardware=hardware,
        weight_seconds=settings.memory.weights / bandwidth,
        per_token=(2 * layers + attention * window_keys) / flops,
        per_sample=2 * output / flops + fixed / bandwidth,
        per_key=a_key / bandwidth,
        per_pair=a_pair / flops,
    )
