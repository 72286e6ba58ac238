"""The calibration file: step costs, and the limits of the engine on which they were measured."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.config.memory import LayerGroup, MemoryPlan
from penstock.config.settings import Settings
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.simulator.costs import MeasuredCosts

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostFile:
    """Step costs, and the engine that they were measured on."""

    costs: MeasuredCosts
    settings: Settings
    median_error: float
    """Relative error on steps that were left out of the fit."""
    num_steps: int

    def describe(self) -> str:
        """One line for the terminal."""
        s, costs = self.settings, self.costs
        shown = ", ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in costs.base)
        context = 1e9 * (costs.per_key + costs.per_pair)
        return (
            f"{s.model_name} on {s.device}, {s.threads} threads: {self.num_steps:,} steps, median error "
            f"{100 * self.median_error:.1f} %; ms by tokens {shown}; besides {context:.1f} ns a token of context, "
            f"{1e6 * costs.per_sample:.1f} µs a sample"
        )

    def write(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the file cannot be written.
        """
        s, costs = self.settings, self.costs
        content = {
            "format": FORMAT,
            "model": s.model_name,
            "device": s.device,
            "threads": s.threads,
            "dtype": s.dtype,
            "quantization": s.quantization,
            "steps": self.num_steps,
            "median_error": round(self.median_error, 4),
            "seconds": {
                "base": [[tokens, seconds] for tokens, seconds in costs.base],
                "per_key": costs.per_key,
                "per_pair": costs.per_pair,
                "per_sample": costs.per_sample,
            },
            "engine": {
                "max_model_len": s.max_model_len,
                "max_num_seqs": s.max_num_seqs,
                "max_num_batched_tokens": s.max_num_batched_tokens,
                "block_size": s.memory.block_size,
                "blocks": [[group.num_blocks, group.window, group.checkpoint_every] for group in s.memory.groups],
            },
        }
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the costs cannot be written to {path}: {error}") from None


def read_cost_file(path: Path) -> CostFile:
    """
    Raises:
        ConfigError: the file cannot be read, or is not a calibration.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, not {FORMAT}")
        return CostFile(
            _costs(content["seconds"]), _settings(content), float(content["median_error"]), int(content["steps"])
        )
    except OSError as error:
        raise ConfigError(f"the file of costs {path} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of costs written by `penstock simulate --calibrate`: {type(error).__name__}: {error}"
        ) from None


def _costs(seconds: dict[str, Any]) -> MeasuredCosts:
    base = tuple((int(tokens), float(value)) for tokens, value in seconds["base"])
    if not base or base[0][0] < 1 or any(a[0] >= b[0] for a, b in pairwise(base)):
        raise ValueError("base must be a list of [tokens, seconds] by ascending tokens")
    others = [float(seconds[name]) for name in ("per_key", "per_pair", "per_sample")]
    if min(*others, *(value for _, value in base)) < 0:
        raise ValueError("no cost may be below 0")
    return MeasuredCosts(base, *others)


def _settings(content: dict[str, Any]) -> Settings:
    engine = content["engine"]
    limits: dict[str, Any] = {
        name: int(engine[name]) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    }
    groups = [
        LayerGroup((), _optional(window), int(count), _optional(every)) for count, window, every in engine["blocks"]
    ]
    block_size = int(engine["block_size"])
    if min(*limits.values(), block_size, *(group.num_blocks for group in groups)) < 1:
        raise ValueError("no limit of the engine may be below 1")
    if limits["max_num_batched_tokens"] < limits["max_num_seqs"]:
        raise ValueError("max_num_batched_tokens is below max_num_seqs")
    return Settings(
        model_name=str(content["model"]),
        dtype=content["dtype"],
        kv_cache_dtype=content["dtype"],
        quantization=content["quantization"],
        packed_cache=None,
        device=str(content["device"]),
        threads=int(content["threads"]),
        seed=None,
        enable_prefix_caching=True,
        policy="fair",
        admission=None,
        speculation=None,
        memory=MemoryPlan(0, 0, 0, tuple(groups), block_size),
        **limits,
    )


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
