"""Complete servers behind Ray Serve's HTTP proxies: cells, each with its own engines on its node (docs/scaling.md).

    client ──HTTP──> Ray's proxy, on any node ──> Cell: a replica with AsyncEngine and the application ──> its engines

    serve run penstock.server.ray_serve:cells model=/shared/model threads=8

A lost cell breaks its connections; any other cell resumes a stream from the id of its last event.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError, EngineDeadError
from penstock.fleet.cluster.host import cpus_of_this_node, leave_niceness, share_memory
from penstock.fleet.cluster.resources import resources_for
from penstock.fleet.launch import launch_engines
from penstock.frontend.client import AsyncEngine
from penstock.server.app import create_app
from penstock.server.config import ServerConfig, iter_server_options
from penstock.server.keys import load_keys
from penstock.server.logs import logging_to

OF_SERVE = "is Ray Serve's affair: set it in its own configuration"
REFUSED = {
    **dict.fromkeys(("host", "port", "uds", "root_path", "tls_cert", "tls_key", "tls_client_ca"), OF_SERVE),
    **dict.fromkeys(("resources", "max_engines", "upscale_delay", "downscale_delay"), OF_SERVE),
    **dict.fromkeys(
        ("cluster", "cluster_host", "nodes_per_engine"),
        "is for a server with engines on other nodes, and a cell has its own",
    ),
    "journal": "is for one server, and streams of a cell that is lost go on in others by the ids of their events",
    "otlp_endpoint": "is not for cells: Ray Serve has traces of its own",
}
"""Options of `penstock serve` that cells do not support, and why."""


class Cell:
    """One server, as a replica of a deployment, with the application of `penstock serve`."""

    def __init__(self, options: dict[str, Any]) -> None:
        """
        Args:
            options: options of `penstock serve`, by name.
        """
        self._options = options
        self._engine: AsyncEngine | None = None
        self._left = contextlib.ExitStack()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Start the engines, which divide the CPUs and GPUs reserved for the replica; called once by Serve.

        Raises:
            ConfigError: options or checkpoint are invalid.
            EngineDeadError: an engine could not start for another reason.
        """
        config, engine_config = read_options(self._options)
        with contextlib.ExitStack() as stack:
            stack.enter_context(logging_to(sys.stderr, config.log_level, as_json=config.log_format == "json"))
            leave_niceness()
            keys = load_keys(config.api_key, config.api_keys, private_cache=config.private_cache)
            links = launch_engines(_fit(engine_config, config.engines), config.engines)
            for link in links:
                stack.callback(link.destroy)
            self._engine = await AsyncEngine.start(
                engine_config,
                links,
                config.step_deadline,
                config.queue,
                router=config.router,
                default_sampling=config.sampling_defaults,
                image_urls=config.listed_image_urls,
            )
            self._left = stack.pop_all()
        return create_app(self._engine, config, keys)

    async def check_health(self) -> None:
        """Health check called by Serve, which replaces an unhealthy replica.

        Raises:
            EngineDeadError: there is no engine left, and none will be started.
        """
        if self._engine is not None and self._engine.given_up.is_set():
            raise EngineDeadError("no engine of this cell can be started again")

    async def __del__(self) -> None:  # awaited by Serve when the replica's open calls have ended
        if self._engine is not None:
            await self._engine.close()
        self._left.close()


def cells(options: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and Serve's configuration files; the deployment is called Cell.

    Args:
        options: options of `penstock serve`, by name. Streams can be resumed unless `resumable_streams` is false.

    Raises:
        ConfigError: an option is unknown, invalid, or not supported in cells.
    """
    config, engine_config = read_options(options)
    each = resources_for(None, engine_config)
    deployment = serve.deployment(
        serve.ingress()(Cell),
        name="Cell",
        ray_actor_options={"num_cpus": each["CPU"] * config.engines, "num_gpus": each.get("GPU", 0) * config.engines},
        max_ongoing_requests=config.call_limits.max_connections,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    return deployment.bind(options)


def read_options(options: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """The validated options of a cell.

    Raises:
        ConfigError: an option is unknown, invalid, or not supported in cells.
    """
    for name in options:
        if name in REFUSED:
            raise ConfigError(f"{name} {REFUSED[name]}")
    of_server = {f.name for _, f in iter_server_options()}
    given = {"resumable_streams": True, **options}
    config = ServerConfig.from_options(**{name: value for name, value in given.items() if name in of_server})
    if config.prefill_engines:
        raise ConfigError("prefill_engines is not for cells: leave it out")
    return config, EngineConfig.from_options(**{name: value for name, value in given.items() if name not in of_server})


def _fit(config: EngineConfig, engines: int) -> EngineConfig:
    """Limit each of a cell's engines to its share of the replica's resources."""
    num_cpus = float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)) / engines
    threads = config.model.threads or max(1, int(num_cpus))
    config = replace(config, model=replace(config.model, threads=threads))
    return share_memory(config, num_cpus, cpus_of_this_node())
