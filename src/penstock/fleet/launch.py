"""Launches the engines of one server, which share the machine's GPUs, cores, NUMA nodes and memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config.engine_config import EngineConfig, KVTransfer
from penstock.errors import ConfigError
from penstock.fleet.link import ENGINE_CORE, EngineLink
from penstock.system.extras import has_torch, require_torch
from penstock.system.host import UNBOUND, CpuBinding, cpu_bindings, free_memory, physical_cores


def launch_engines(
    config: EngineConfig,
    count: int,
    core: str = ENGINE_CORE,
    num_prefill: int = 0,
    kv_transfer: KVTransfer = "file",
) -> list[EngineLink]:
    """Start engine processes, each with its share of the machine; a single one has all of it.

    Args:
        num_prefill: number of prefill engines, the last ones; the others decode. 0: every engine does both.
        kv_transfer: how KV blocks get from prefill engines to the others.

    Raises:
        ConfigError: the engines do not fit the machine, or there is no room for a folder.
        EngineDeadError: a process cannot be started.
    """
    links: list[EngineLink] = []
    try:
        parts = divide(config, count)
        configs = with_roles([own for own, _ in parts], num_prefill, kv_transfer)
        for own, (_, binding) in zip(configs, parts, strict=True):
            links.append(EngineLink(own, core, binding))
    except BaseException:
        for link in links:
            link.destroy()
        raise
    return links


def with_roles(configs: Sequence[EngineConfig], num_prefill: int, kv_transfer: KVTransfer) -> list[EngineConfig]:
    """Make the engines' configurations, with their roles; the last ones are prefill engines. See `launch_engines`."""
    if not num_prefill:
        return list(configs)
    num_decode = len(configs) - num_prefill
    return [
        replace(config, role="decode" if index < num_decode else "prefill", kv_transfer=kv_transfer)
        for index, config in enumerate(configs)
    ]


def divide(
    config: EngineConfig,
    count: int,
    *,
    devices: Path = Path("/dev"),
    cores: Callable[[], int] = physical_cores,
    memory: Callable[[], int] = free_memory,
    find_bindings: Callable[[int], Sequence[CpuBinding]] = cpu_bindings,
) -> list[tuple[EngineConfig, CpuBinding]]:
    """Divide the machine: the configuration and binding of each of `count` engines. User settings apply to each engine.

    Raises:
        ConfigError: there are fewer GPUs than engines.
        MissingTorchError: they are to run on GPUs.
    """
    if config.model.device.startswith("cuda"):
        require_torch(f"device {config.model.device!r}")
    if count == 1:
        return [(config, UNBOUND)]
    num_gpus = len(list(devices.glob("nvidia[0-9]*"))) if has_torch() else 0
    if config.model.device == "cuda" or (config.model.device == "auto" and num_gpus):
        each = config.model.tensor_parallel_size
        if count * each > num_gpus:
            needed = "as many GPUs" if each == 1 else f"{each} GPUs each"
            raise ConfigError(f"{count} engines need {needed}, and this machine has {num_gpus}: lower engines")
        return [(_on_device(config, f"cuda:{index * each}"), UNBOUND) for index in range(count)]
    if config.model.device != "auto" and config.model.device.startswith("cuda"):
        raise ConfigError(f"{count} engines cannot share {config.model.device}: use cuda, and each takes its own")
    bindings, total, share = find_bindings(count), cores(), memory() // count
    configs = []
    for index, binding in enumerate(bindings):
        threads = len(binding.cpus) if binding.cpus else total // count + (index < total % count)
        model = replace(config.model, threads=config.model.threads or max(1, min(threads, total)))
        cache = replace(config.cache, max_memory=config.cache.max_memory or share)
        configs.append((replace(config, model=model, cache=cache), binding))
    return configs


def _on_device(config: EngineConfig, device: str) -> EngineConfig:
    return replace(config, model=replace(config.model, device=device))
