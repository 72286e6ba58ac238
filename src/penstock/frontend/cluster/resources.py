"""What each engine reserves in a cluster: CPU=4,GPU=1,memory=16GiB,accelerator_type:H100=0.001"""

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.memory import parse_bytes


def resources_for(given: str | None, config: EngineConfig) -> dict[str, float]:
    """An engine's resources by Ray's names: those given, or one CPU a thread, and a GPU a rank if it needs any.

    Raises:
        ConfigError: the text is no list of NAME=COUNT, or reserves nothing.
    """
    if given is None:
        ranks = config.model.tensor_parallel_size
        gpus = {"GPU": float(ranks)} if config.model.device.startswith("cuda") else {}
        return {"CPU": float(config.model.threads or ranks)} | gpus
    return parse_resources(given)


def parse_resources(text: str) -> dict[str, float]:
    """Resources by their names.

    Raises:
        ConfigError: the text is no list of NAME=COUNT, or reserves nothing.
    """
    resources: dict[str, float] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        name = name.strip()
        try:
            resources[name] = float(parse_bytes(count)) if name == "memory" else float(count)
        except ValueError:
            name = ""
        if not name or not 0 < resources[name] < float("inf"):
            raise ConfigError(f"resources must be like CPU=4,GPU=1,memory=16GiB, each above 0, not {text!r}")
    return resources
