"""`penstock serve`: starts and stops engine processes and the HTTP server.

The engines are launched first, so that they load the model while this process imports the server.
"""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import __version__
from penstock.checkpoint.added import Added, AddedFile, held_by_server
from penstock.checkpoint.checkpoint import describe, open_model
from penstock.config.engine_config import EngineConfig
from penstock.dataclass import dataclass
from penstock.errors import ConfigError, EngineDeadError, PenstockError, ShuttingDownError
from penstock.fleet.cluster.resources import resources_for
from penstock.fleet.launch import launch_engines, with_roles
from penstock.fleet.link import Link
from penstock.server.added_models import AddedModels, added_file
from penstock.server.config import ServerConfig, seconds_of
from penstock.server.listener import address_of, bound, is_open_to_others
from penstock.system.host import importing, shorten_pauses

if TYPE_CHECKING:
    from penstock.fleet.fleet import Fleet
    from penstock.fleet.model_broker import ModelBroker, PlanModel
    from penstock.frontend.client import AsyncEngine, Beside
    from penstock.frontend.recovery.journal import Journal
    from penstock.frontend.served_models import ServedModels
    from penstock.server.http import HttpServer
    from penstock.server.keys import KeyRing
    from penstock.server.model_list import ListedModel
    from penstock.server.serving import Serving
    from penstock.server.tracing import CallTracer

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RELOAD, GROW, SHRINK = signal.SIGUSR1, signal.SIGTTIN, signal.SIGTTOU
"""Signals to replace all engines, to add one, and to drain the newest."""
SHUTTING_DOWN = "the server is shutting down"
RETRY_AFTER = 5.0
"""`Retry-After` of a server that is shutting down: seconds after which its replacement may be up."""
OTHER_FILES = 256
"""File descriptors besides connections: sockets to the engine, the journal, pipes of helper processes."""
CLOSING_SECONDS = 5
"""Maximum time for connections to close after their requests were ended."""
LOADING_SECONDS = 5.0
"""Interval of log lines while the engines load."""
AT_ONCE_SECONDS = 1.0
"""The same for an immediate stop: enough for an open stream's last event."""

logger = logging.getLogger("penstock.server")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code: 0, or 1 if the engine could not be kept alive.

    Raises:
        ConfigError: options, checkpoint or address are invalid; no process is left.
        EngineDeadError: the engine could not start for another reason.
    """
    stop = _Stop()
    for number in SIGNALS:  # until the event loop handles them; an exception could be lost during imports
        signal.signal(number, stop.on_signal)
    _allow_files(server_config.call_limits.max_connections + OTHER_FILES)
    # All that can be wrong without the model is checked before engines start.
    _check_tls_files(server_config)
    file = added_file(server_config)
    added = Added() if file is None else file.read()
    models = _planned(engine_config, server_config, added)
    if models is not None:
        engine_config = models.models[0].config  # of the one that is loaded first
    # The address first: a port in use is no reason to load a model. Connections wait in its backlog.
    with bound(server_config) as listener, held_by_server(file), _launched(engine_config, server_config, stop) as links:
        return _run(links, engine_config, server_config, listener, stop, models, added)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Several models, or one that is unloaded when idle."""

    models: "Sequence[ListedModel]"
    broker: "ModelBroker"
    plan: "PlanModel"
    """Plans a model that is added."""
    warnings: list[str]


def _planned(engine_config: EngineConfig, config: ServerConfig, added: Added) -> _Planned | None:
    """The models and the broker of their memory; None for a single model that stays loaded.

    Args:
        added: what was added to an earlier server.

    Raises:
        ConfigError: the options for models contradict each other.
    """
    if config.models_dir is None and config.keep_alive is None and "=" not in (engine_config.model.model or ""):
        return None
    from penstock.server.model_list import listed_models, serves_several, with_added, with_broker

    if not serves_several(engine_config, config):
        return None
    models, warnings = with_added(listed_models(engine_config, config), added, engine_config, config)
    return _Planned(*with_broker(models, config), warnings)


@contextlib.contextmanager
def _launched(engine_config: EngineConfig, config: ServerConfig, stop: "_Stop") -> Iterator[Sequence[Link]]:
    """Engines, on this machine or in a cluster, that end with the context."""
    cluster, links = None, list[Link]()
    try:
        if config.cluster is None:
            links += _launch(engine_config, config)
        else:
            from penstock.fleet.cluster.ray_cluster import RayCluster

            resources = resources_for(config.resources, engine_config, config.nodes_per_engine)
            cluster = RayCluster(config.cluster, resources, config.cluster_host, config.nodes_per_engine)
            for number in SIGNALS:  # replaced by Ray
                signal.signal(number, stop.on_signal)
            configs = with_roles([engine_config] * config.engines, config.prefill_engines, config.transfer)
            links += cluster.launch(configs)
        yield links
    finally:
        for link in links:
            link.destroy()
        if cluster is not None:
            cluster.close()


def _launch(engine_config: EngineConfig, config: ServerConfig) -> Sequence[Link]:
    return launch_engines(
        engine_config, config.engines, num_prefill=config.prefill_engines, kv_transfer=config.transfer
    )


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files to `count`; a common default is 1,024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < count:
        names = "max_connections and max_concurrent_requests"
        lower = f", or lower {names} to {most - OTHER_FILES}" if most > OTHER_FILES else ""
        raise ConfigError(
            f"this process may open {most} files, and max_connections needs {count}: raise the limit (ulimit -Hn)"
            + lower
        )
    if now != resource.RLIM_INFINITY and now < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))


def _check_tls_files(config: ServerConfig) -> None:
    """Try the TLS files before a model is loaded."""
    options = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
    files = {name: path for name, path in options.items() if path is not None}
    if not files:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for path in files.values():
            Path(path).read_bytes()  # as an error of the calls below does not name the file
        context.load_cert_chain(files["tls_cert"], files.get("tls_key"))
        if "tls_client_ca" in files:
            context.load_verify_locations(files["tls_client_ca"])
    except OSError as error:  # or ssl.SSLError
        given = ", ".join(f"{name} {path}" for name, path in files.items())
        raise ConfigError(f"the TLS files cannot be used ({given}): {error}") from None


def _run(
    links: Sequence[Link],
    engine_config: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    stop: "_Stop",
    models: _Planned | None,
    added: Added,
) -> int:
    # These imports take most of a second, while the launched engine loads its model.
    with importing():
        from penstock.frontend.client import AsyncEngine
        from penstock.frontend.recovery.journal import Journal
        from penstock.server.app import create_app
        from penstock.server.http import HttpServer
        from penstock.server.keys import load_keys
        from penstock.server.logs import logging_to

    keys = load_keys(config.api_key, config.api_keys, private_cache=config.private_cache)
    warnings = [*_access_warnings(engine_config, config, listener, keys), *_unserved(models, added, engine_config)]
    file = added_file(config)

    def make_server(engine: "AsyncEngine | ServedModels") -> HttpServer:
        first, served = (engine, None) if isinstance(engine, AsyncEngine) else (engine.main, engine)
        app = create_app(first, config, keys, tracer, served, AddedModels(file))
        if served is None:
            _add_names(app.state.serving, added)
        names = [app.state.serving.names] if served is None else [model.names for model in served.served]
        announce = functools.partial(
            _announce, first, ",".join(each.all[0] for each in names), listener, config, warnings
        )
        if file is not None:
            _tell_restored(file, models, app.state.serving, added)
        return HttpServer(app, announce, 2 * CLOSING_SECONDS, config)

    with (
        logging_to(sys.stderr, config.log_level, as_json=config.log_format == "json"),
        _tracing_to(config.otlp_endpoint) as tracer,
    ):
        logger.info("penstock %s: loading %s", __version__, _described(engine_config))
        journal = None if config.journal is None else Journal(Path(config.journal))  # may log damage
        start_engine = functools.partial(
            AsyncEngine.start,
            step_deadline=config.step_deadline,
            limits=config.queue,
            journal=journal,
            router=config.router,
            default_sampling=config.sampling_defaults,
            image_urls=config.listed_image_urls,
        )
        start: Callable[[], Coroutine[Any, Any, AsyncEngine | ServedModels]]
        if models is None:
            start = functools.partial(_start_one, functools.partial(start_engine, engine_config, links), added, config)
        else:
            start = functools.partial(_start_models, models, start_engine, links, config, journal)
        return asyncio.run(_serve(start, make_server, listener, stop, config))


async def _start_one(
    start_engine: "Callable[[], Coroutine[Any, Any, AsyncEngine]]", added: Added, config: ServerConfig
) -> "AsyncEngine":
    """Start the engine of a single model, with the adapters that were added to it."""
    engine = await start_engine()
    try:
        names = config.served_model_names or [engine.info.model_name]
        for name, path in added.adapters_of(names[0]).items():
            if name not in names:
                await engine.adapters.add_usable(name, path, names[0], lambda: True)
    except BaseException:
        await engine.close()
        raise
    return engine


def _add_names(serving: "Serving", added: Added) -> None:
    """Give a single model the names that were added to it."""
    for name in added.names_of(serving.names.own):
        if serving.engine.adapters.find(name) is None:
            serving.names.add(name)


def _unserved(models: _Planned | None, added: Added, engine_config: EngineConfig) -> Sequence[str]:
    """Warnings about models that were added, and are not served."""
    if models is not None:
        return models.warnings
    names = ", ".join(name for name in added.models if name != engine_config.model.model)
    if not names:
        return []
    return [
        f"this server serves one model alone, and not those that were added to an earlier one: {names}; with "
        "--keep-alive or --models-dir it has them again"
    ]


def _tell_restored(file: AddedFile, models: _Planned | None, serving: "Serving", added: Added) -> None:
    """Log the models, names and adapters that this server has since clients added them to an earlier one."""
    restored = (
        [] if models is None else [model.name for model in models.models if model.is_added and model.has_own_name]
    )
    each: Sequence[Serving | ListedModel] = [serving] if models is None else models.models
    others = (name for model in each for name in model.all_names)
    restored += [name for name in others if name in added.names or name in added.adapters]
    if restored:
        logger.info(
            "clients added to an earlier server, and are served again: %s (%s; --added-models none leaves them out)",
            ", ".join(restored),
            file.path,
        )


async def _start_models(
    models: _Planned,
    start_engine: "Callable[..., Coroutine[Any, Any, AsyncEngine]]",
    links: Sequence[Link],
    config: ServerConfig,
    journal: "Journal | None",
) -> "ServedModels":
    """Load the first model, whose engines have been launched; the others are launched when they are used."""
    from penstock.frontend.served_models import ServedModels

    launched = [links]

    def start(engine_config: EngineConfig, beside: "Beside") -> "Coroutine[Any, Any, AsyncEngine]":
        own = launched.pop() if launched else _launch(engine_config, config)
        return start_engine(engine_config, own, beside=beside)

    served = ServedModels(
        [model.served() for model in models.models],
        models.broker,
        start,
        config.queue,
        journal,
        plan=models.plan,
        load_timeout=seconds_of(config.load_timeout),
    )
    await served.open()
    return served


def _described(config: EngineConfig) -> str:
    """Describe the model; only its name if it is not on this machine or has errors, which the engines report."""
    model = config.model.model
    if model is not None and not os.path.exists(os.path.expanduser(model)):
        return model
    try:
        return describe(open_model(config.model))
    except PenstockError:
        return str(model)


@contextlib.contextmanager
def _tracing_to(endpoint: str | None) -> "Iterator[CallTracer | None]":
    if endpoint is None:
        yield None
        return
    try:
        from penstock.server.tracing import CallTracer
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry: pip install '.[otel]' in Penstock's source folder ({error})"
        ) from None
    tracer = CallTracer(endpoint)
    try:
        yield tracer
    finally:
        tracer.close()


def _access_warnings(
    engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, keys: "KeyRing"
) -> Iterator[str]:
    """Warnings for the operator about access to the server."""
    if is_open_to_others(listener) and not keys and config.tls_client_ca is None:
        yield (
            "no API key is set, so anyone who can reach this address may use the model: set one with --api-key (or "
            f"PENSTOCK_API_KEY), or listen on 127.0.0.1 instead of {config.host}"
        )
    if keys.num_sharing > 1 and engine_config.cache.enable_prefix_caching:
        yield (
            f"{keys.num_sharing} API keys share one prefix cache: a short time to the first token reveals that another "
            "key has sent the same beginning of a prompt; --private-cache gives each key its own"
        )


def _announce(
    engine: "AsyncEngine", model_name: str, listener: socket.socket, config: ServerConfig, warnings: Sequence[str]
) -> None:
    """Log the memory plan, the warnings, and the model with its address."""
    replicas = engine.fleet.replicas
    for number, replica in replicas.items():
        logger.info("%s%s", f"engine {number}: " if len(replicas) > 1 else "", replica.info.memory_plan)
    for warning in warnings:
        logger.warning("%s", warning)
    address, prefix = address_of(listener, tls=config.tls_cert is not None), config.prefix
    proxied = f"; behind a proxy at {prefix}" if prefix else ""
    logger.info("serving %s at %s (its API: %s/docs%s)", model_name, address, prefix, proxied)


async def _serve(
    start: "Callable[[], Coroutine[Any, Any, AsyncEngine | ServedModels]]",
    make_server: Callable[["AsyncEngine | ServedModels"], "HttpServer"],
    listener: socket.socket,
    stop: "_Stop",
    config: ServerConfig,
) -> int:
    with _listening_to_signals(stop):
        engine = await _unless(stop.asked, _timed(start()))
        if engine is None:
            logger.info("stopped before the engines were ready")
            return 0
        shorten_pauses()
        try:
            with _changing_by_signals(engine), _scaling(engine, config):
                await _answer_http(engine, make_server(engine), listener, stop, config.drain_timeout)
        finally:
            await engine.close()
            logger.info("stopped")
    return int(engine.given_up.is_set())


async def _timed(starting: Coroutine[Any, Any, T]) -> T:
    """Start the engines; logs progress and the duration."""
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await asyncio.sleep(LOADING_SECONDS)
            logger.info("loading for %.0f s", time.monotonic() - began)

    telling = asyncio.ensure_future(tell())
    try:
        engine = await starting
    finally:
        telling.cancel()
    logger.info("ready in %.1f s", time.monotonic() - began)
    return engine


async def _answer_http(
    engine: "AsyncEngine | ServedModels",
    server: "HttpServer",
    listener: socket.socket,
    stop: "_Stop",
    drain_timeout: float,
) -> None:
    """Serve until a signal or the loss of all engines; then end every request and close the connections."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await _first_of(serving, stop.asked.wait(), engine.given_up.wait())
    engine.refuse(ShuttingDownError(SHUTTING_DOWN, RETRY_AFTER))
    if not stop.at_once.is_set():
        logger.info(
            "draining: open requests may run for %g s; another signal (Ctrl-C) stops the server now", drain_timeout
        )
        await _first_of(serving, stop.at_once.wait(), engine.drained(), timeout=drain_timeout)
    if stop.at_once.is_set():
        engine.fail_all(EngineDeadError(SHUTTING_DOWN))
    else:
        engine.abort_all(SHUTTING_DOWN)
    # Only now does uvicorn close the listener: during the drain, `/health` still answers.
    server.should_exit = True
    await _first_of(serving, stop.at_once.wait(), timeout=CLOSING_SECONDS)
    await _first_of(serving, timeout=AT_ONCE_SECONDS)
    server.cut_connections()
    await serving


class _Stop:
    """Received signals, SIGTERM or SIGINT: the first drains open requests, the second stops at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()


@contextlib.contextmanager
def _listening_to_signals(stop: _Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _changing_by_signals(engine: "AsyncEngine | ServedModels") -> Iterator[None]:
    """Handle the signals that replace engines, of all loaded models, or add or drain one of a single model."""
    from penstock.fleet.model_broker import FIXED_ENGINES
    from penstock.frontend.client import AsyncEngine  # loaded already: a server's own imports come after its launch

    loop, changes = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def change(work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except PenstockError as error:
            logger.error("the engines stay as they are: %s", error)

    def on_signal(make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = asyncio.ensure_future(change(make()))
        changes.add(task)
        task.add_done_callback(changes.discard)

    def of_one() -> "Fleet":
        if not isinstance(engine, AsyncEngine):
            raise ConfigError(FIXED_ENGINES)
        return engine.fleet

    async def reload() -> None:
        with engine.kept_loaded() as fleets:
            for fleet in fleets:
                await fleet.reload()

    async def grow() -> None:
        await of_one().grow()

    async def shrink() -> None:
        fleet = of_one()
        await fleet.retire(max(fleet.replicas))

    for number, make in ((RELOAD, reload), (GROW, grow), (SHRINK, shrink)):
        loop.add_signal_handler(number, on_signal, make)
    try:
        yield
    finally:
        for number in (RELOAD, GROW, SHRINK):
            loop.remove_signal_handler(number)
        for task in changes:
            task.cancel()


@contextlib.contextmanager
def _scaling(engine: "AsyncEngine | ServedModels", config: ServerConfig) -> Iterator[None]:
    """Run the autoscaler, if it is enabled."""
    if config.max_engines is None:
        yield
        return
    from penstock.fleet.autoscaler import Autoscaler, FleetScaler

    autoscaler = Autoscaler(config.engines, config.max_engines, config.upscale_delay, config.downscale_delay)
    with engine.kept_loaded() as fleets:
        (fleet,) = fleets  # several models do not run in a cluster
    scaling = asyncio.ensure_future(FleetScaler(fleet, autoscaler).run())
    try:
        yield
    finally:
        scaling.cancel()


async def _first_of(
    task: "asyncio.Task[None]", *others: "Coroutine[Any, Any, Any]", timeout: float | None = None
) -> None:
    """Wait until the task or one of the others is done, or for `timeout` seconds. The others continue."""
    waiting = [asyncio.ensure_future(other) for other in others]
    await asyncio.wait([task, *waiting], return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
    for other in waiting:
        other.cancel()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if `stop` is set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    # Cancelled work may still end processes that it has started.
    await asyncio.wait({working})
    return None
