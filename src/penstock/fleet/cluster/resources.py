"""Resources that each engine reserves on each of its nodes: CPU=4,GPU=1,memory=16GiB,accelerator_type:H100=0.001"""

from math import ceil

from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError


def resources_for(given: str | None, config: EngineConfig, num_nodes: int = 1) -> dict[str, float]:
    """An engine's resources by Ray's names; by default one CPU for each thread, and one GPU for each rank on GPUs.

    Args:
        num_nodes: nodes of each engine; the resources are those of one node.

    Raises:
        ConfigError: the text is not a list of NAME=COUNT, or reserves nothing, or the ranks do not divide evenly
            among the nodes.
    """
    ranks = config.model.tensor_parallel_size
    if ranks % num_nodes:
        raise ConfigError(
            f"nodes_per_engine={num_nodes} must divide tensor_parallel_size ({ranks}): each node has as many ranks"
        )
    if given is None:
        gpus = {"GPU": float(ranks // num_nodes)} if config.model.device.startswith("cuda") else {}
        return {"CPU": float(ceil((config.model.threads or ranks) / num_nodes))} | gpus
    return parse_resources(given)


def parse_resources(text: str) -> dict[str, float]:
    """Parse resources by name.

    Raises:
        ConfigError: the text is not a list of NAME=COUNT, or reserves nothing.
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
