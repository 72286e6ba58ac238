"""The asynchronous client of the engines: requests in, streams of text out, across restarts of engine processes.

    accept_request() ──Accepted──> open() ──RequestStream──> async for deltas ...       (one consumer per call)
                                      │ OpenRequests: Add, Finish    ▲ CompletionDelta
                                      ▼                              │
                                    Fleet ───────StepOutputs──> one OutputProcessor per request

Tokens become text as they arrive, whether or not they are read: a stop string ends its sequence at once, and a slow
consumer gets everything that arrived meanwhile in one delta. When an engine dies, its successor or another engine gets
each unfinished request with the tokens computed so far; prompt, parameters and seed being the same, the answer
continues unchanged.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.api.request import Adapter, Image
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import resolve_path
from penstock.config.engine_config import EngineConfig, ModelConfig
from penstock.dataclass import dataclass
from penstock.engine.protocol import FromEngine, HandedOver, Pong, StepOutputs
from penstock.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    PenstockError,
    QuarantinedError,
    ShuttingDownError,
)
from penstock.fleet.fleet import Fleet, FleetOptions, ReplicaState
from penstock.fleet.link import Link
from penstock.fleet.replica import DEFAULT_RESTARTS, Death, OnLoading, Replica, RestartPolicy
from penstock.frontend.adapters import AdapterNames
from penstock.frontend.grammar_checks import GrammarChecks
from penstock.frontend.history import History
from penstock.frontend.input_processor import InputProcessor, PromptEncoder
from penstock.frontend.large_work import LargeWork
from penstock.frontend.limits import ANYONE, Admission, Caller, QueueLimits
from penstock.frontend.meter import Meter
from penstock.frontend.metrics import Metrics
from penstock.frontend.open_requests import RECONNECT_SECONDS, Accepted, AdapterUse, OpenRequest, OpenRequests, Series
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry
from penstock.frontend.recovery.journaled_calls import JournaledCalls
from penstock.frontend.recovery.recent_responses import RecentResponses
from penstock.frontend.request_stream import RequestStream
from penstock.frontend.text_encoding import EncodedText, TextEncoder
from penstock.structured.grammar_validator import GrammarValidator
from penstock.system.extras import has_pillow
from penstock.text.chat_template import read_template
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.frontend.audio.reader import QueuedSounds
    from penstock.frontend.images.prompts import ImagePrompts

logger = logging.getLogger("penstock.engine")

STEP_DEADLINE = 30.0
_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class Beside:
    """What the engine of one of several models has in common with the others, and its part of that."""

    history: History
    numbers: Iterator[int]
    """Numbers of new replicas."""
    on_loading: OnLoading
    others_work: Callable[[], bool]
    """Whether another model has open requests."""
    large_work: LargeWork
    """Which stays open when this engine is closed."""
    entries: Sequence[Entry] = ()
    """Its unfinished requests in the journal, which is open and stays so when this engine is closed."""


class AsyncEngine:
    """The engine processes of a server, their successors, and all requests in flight. Made by `start`."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        link: Link | Sequence[Link],
        step_deadline: float = STEP_DEADLINE,
        limits: QueueLimits | None = None,
        journal: Journal | None = None,
        *,
        restarts: RestartPolicy = DEFAULT_RESTARTS,
        reconnect_seconds: float = RECONNECT_SECONDS,
        router: str = "prefix",
        default_sampling: Mapping[str, Any] = MappingProxyType({}),
        image_urls: Sequence[str] = (),
        beside: "Beside | None" = None,
    ) -> "AsyncEngine":
        """Wait until the engines are ready; the tokenizer is loaded meanwhile. Closes everything on failure.

        Args:
            link: the link to a launched engine process, or a link for each of several.
            step_deadline: seconds without a step, while there is work, after which an engine counts as hung; more for
                large steps (`penstock.fleet.replica`).
            journal: its unfinished requests are resumed; it is closed with the engine.
            reconnect_seconds: seconds that a journaled request may run without a reader before it is aborted.
            router: name of the router that chooses among several engines.
            default_sampling: see `InputProcessor`.
            image_urls: prefixes of URLs from which images may be fetched.
            beside: what it has in common with the engines of other models; None: it is the only one.

        Raises:
            ConfigError: options or checkpoint are wrong.
            EngineDeadError: the engine process ended for another reason.
        """
        links = list(link) if isinstance(link, Sequence) else [link]
        options = FleetOptions(step_deadline, restarts, router)
        if beside is not None:
            options = replace(options, numbers=beside.numbers, on_loading=beside.on_loading, yields=beside.others_work)
        fleet, own_journal = Fleet(options, config.scheduler.policy), journal if beside is None else None
        try:
            # Before the wait for the engines: a file that is missing fails the start at once.
            template = await asyncio.to_thread(read_template, config.model.chat_template)
        except BaseException:
            await _close_started(links, own_journal)
            raise
        # The tokenizer takes a second or more, which the engines need for their weights.
        loading = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, config.model, template))
        try:
            await fleet.open(links)
            # A thread cannot be cancelled: on failure its result is still awaited, and closed (`_close_loaded`).
            tokenizer = await asyncio.shield(loading)
            engine = cls(
                config, fleet, tokenizer, limits or QueueLimits(), journal, reconnect_seconds, default_sampling, beside
            )
            engine.images = engine._image_prompts(image_urls)
            engine.sounds = engine._queued_sounds()
            await asyncio.to_thread(engine.adapters.add_listed, config.adapters.paths)
            engine._take_up_journal()
        except BaseException:
            await _close_started(links, own_journal)
            await _close_loaded(loading)
            raise
        # Last: an engine that dies before is a start that failed, not one to replace.
        fleet.supervise(engine)
        engine._note_load()
        return engine

    def __init__(
        self,
        config: EngineConfig,
        fleet: Fleet,
        tokenizer: Tokenizer | None,
        limits: QueueLimits,
        journal: Journal | None,
        reconnect_seconds: float,
        default_sampling: Mapping[str, Any],
        beside: "Beside | None" = None,
    ) -> None:
        if journal is not None and fleet.info.encoder is not None:
            if beside is None:
                raise ConfigError("journal is not supported for models that embed or score: leave it out")
            journal = None  # of the other models
        self.fleet = fleet
        self.info = info = fleet.info
        self.tokenizer = tokenizer
        self._config = config
        self._limits = limits
        self._journal = journal
        self._beside = beside
        self._refusal: PenstockError | None = None
        self._grammar_checks = GrammarChecks(GrammarValidator(info.model_path, info.vocab_size))
        self._input_processor = InputProcessor(
            tokenizer,
            info,
            refuse_long_max_tokens=limits.refuse_long_max_tokens,
            default_sampling=default_sampling,
        )
        self.adapters = AdapterNames(lambda: self.info)
        self.large_work = LargeWork(holds_lock=True) if beside is None else beside.large_work
        """Parsing, and other work in Python."""
        self._text_work = LargeWork()
        self.prompts = PromptEncoder(tokenizer, self.large_work, self._text_work)
        self.texts = TextEncoder(tokenizer, info)
        self.images: "ImagePrompts | None" = None
        """Prompts with images or sounds; None: the model takes text only."""
        self.sounds: "QueuedSounds | None" = None
        """Sounds that are transcribed; None: the model does not transcribe."""
        self.given_up = asyncio.Event()
        self._metrics = Metrics()
        self.history = History(config.scheduler.policy) if beside is None else beside.history
        self.admission = Admission(limits, fleet.max_num_seqs, lambda request_id: self.open_requests.expire(request_id))
        self.admission.resize(fleet.max_num_seqs, info.image_pixels)
        self._meter = Meter(self._metrics)
        for replica in fleet.replicas.values():
            self._meter.set_engine_info(replica.info, replica.number)
        self.open_requests = OpenRequests(fleet, self._meter, self.admission, journal, reconnect_seconds)
        self.journaled = journal is not None
        """Whether requests survive this process and can be resumed."""
        self.journaled_calls = JournaledCalls(
            journal, tokenizer, self.open_requests, self._input_processor, self.admission, limits.max_unread_tokens
        )

    @property
    def pid(self) -> int:
        """Process id of the current engine; of several, the oldest replica's."""
        return self.pids[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of the current engines."""
        return [replica.pid for replica in self.fleet.replicas.values()]

    @property
    def sampling_defaults(self) -> SamplingParams:
        """The server's or checkpoint's values of parameters that a request leaves unset."""
        return self._input_processor.defaults

    def adapter_use(self) -> AdapterUse:
        """The adapters of open requests."""
        return self.open_requests.adapter_use()

    @property
    def metrics(self) -> Metrics:
        """The server's metrics, brought up to date by each access."""
        self._meter.settle(self.fleet.dispatcher.num_queued)
        return self._metrics

    def record_failure(self, reason: str) -> None:
        """Count a failed call."""
        self._metrics.failures.add(1, reason)

    def record_ignored_field(self, label: str) -> None:
        """Count a field of a call's body that had no effect."""
        self._metrics.ignored_fields.add(1, label)

    def _image_prompts(self, urls: Sequence[str]) -> "ImagePrompts | None":
        config, info = self._config, self.info
        if info.image_input is None and urls and self._beside is None:
            raise ConfigError("image_urls: this model takes no images, so none is fetched: leave it out")
        if self.tokenizer is None or (info.image_input is None and info.sound_input is None):
            return None
        from penstock.frontend.images.prompts import ImagePrompts, media_of  # here: few models take images
        from penstock.frontend.images.urls import ImageURLs

        media = media_of(info, self.tokenizer, config.images, config.audio)
        if info.image_input is not None and not has_pillow():
            logger.warning("the model takes images, for which Pillow is needed: pip install '.[images]'")
        return None if media is None else ImagePrompts(media, ImageURLs(urls, config.images.max_image_bytes))

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return self.images is not None and self.info.image_input is not None

    @property
    def takes_sounds(self) -> bool:
        """Whether prompts may have sounds."""
        return self.images is not None and self.info.sound_input is not None

    def _queued_sounds(self) -> "QueuedSounds | None":
        if self.info.audio_input is None:
            return None
        from penstock.frontend.audio.reader import QueuedSounds  # here: few models transcribe

        return QueuedSounds(self.info.audio_input, self._config.audio)

    def _take_up_journal(self) -> None:
        if self._journal is not None and self._beside is None:
            self._journal.start(self._metrics)
        self.journaled_calls.resume(self.info.model_identity, None if self._beside is None else self._beside.entries)

    async def close(self) -> None:
        """End the engine processes, and all open requests with an error."""
        # First, so that no caller waits for a stream whose engine has gone.
        self.fail_all(EngineDeadError("the server is shutting down"))
        await self.fleet.close()
        if self._beside is None:
            await asyncio.to_thread(self.large_work.close)
        await asyncio.to_thread(self._text_work.close)
        if self.images is not None:
            await asyncio.to_thread(self.images.close)
        if self.sounds is not None:
            await asyncio.to_thread(self.sounds.close)
        await self._grammar_checks.close()
        if self.tokenizer is not None:
            await asyncio.to_thread(self.tokenizer.close)
        if self._journal is not None and self._beside is None:
            await self._journal.close()

    async def sleep(self) -> None:
        """End the engine processes until `wake`, also those that were given up. No request may be open."""
        await self.fleet.sleep()
        self._metrics.model_loaded.set(0)
        if self.given_up.is_set():
            self.given_up.clear()
            self._refusal = None

    async def wake(self) -> None:
        """Start the engine processes that `sleep` ended. Raises as `Fleet.wake`."""
        await self.fleet.wake()
        self._note_load()

    def _note_load(self) -> None:
        self._metrics.model_loads.add(1)
        self._metrics.model_loaded.set(1)

    @contextlib.contextmanager
    def kept_loaded(self) -> Iterator[list[Fleet]]:
        """Context in which a model is not unloaded, as the only one never is; yields its fleet."""
        yield [self.fleet]

    def states(self) -> list[ReplicaState]:
        """State of each engine, for operators."""
        return self.fleet.states()

    def refuse(self, reason: PenstockError) -> None:
        """Refuse new requests from now on, for this reason; open ones continue."""
        self._refusal = reason

    @property
    def refuses_long_max_tokens(self) -> bool:
        """Whether a `max_tokens` beyond the context is refused."""
        return self._input_processor.refuse_long_max_tokens

    @property
    def refusal(self) -> PenstockError | None:
        """Why new requests are refused; None while they are accepted."""
        return self._refusal

    @property
    def restarting(self) -> bool:
        """Whether no engine is up while one is being started."""
        return self.fleet.down is not None and not self.given_up.is_set()

    async def drained(self) -> None:
        """Wait until no request is open. New requests must be refused already."""
        await self.open_requests.drained()

    def abort_all(self, reason: str) -> None:
        """End every open request with `abort`."""
        self.open_requests.abort_all(reason)

    def accept_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        caller: Caller = ANYONE,
        adapter: Adapter | None = None,
        images: tuple[Image, ...] = (),
    ) -> Accepted:
        """Validate a request; nothing runs yet.

        Raises:
            InvalidRequestError: the engine could not serve it, or the caller is not allowed to ask for it.
            QuarantinedError: an equal request was convicted of crashing engines.
        """
        policy = self._config.scheduler.policy
        if priority and policy == "fcfs":
            raise InvalidRequestError(f"priority has no effect under policy {policy}: leave it out", "priority")
        caller.check_priority(priority)
        params = self._input_processor.with_default_stops(params)
        request = self._input_processor.make_request(
            token_ids,
            params,
            request_id=request_id,
            arrival=time.monotonic(),
            priority=priority,
            namespace=caller.namespace,
            tenant=caller.tenant,
            adapter=adapter,
            images=images,
        )
        if self.open_requests.is_quarantined(request):
            raise QuarantinedError("an identical request made the engine fail more than once, so this one is refused")
        return Accepted(request, params, prompt, caller)

    def accept_encoded(
        self, encoded: EncodedText, *, request_id: str, priority: int = 0, caller: Caller = ANYONE
    ) -> Accepted:
        """As `accept_request`, for a text to embed or score."""
        caller.check_priority(priority)
        request = self._input_processor.make_encoding(
            encoded, request_id=request_id, arrival=time.monotonic(), priority=priority, tenant=caller.tenant
        )
        if self.open_requests.is_quarantined(request):
            raise QuarantinedError("an identical text made the engine fail more than once, so this one is refused")
        return Accepted(request, _NO_SAMPLING, None, caller)

    async def check_structured(self, params: SamplingParams, tenant: str = "") -> None:
        """Check that the answer's grammar compiles; only this caller waits for it. Raises as `GrammarChecks.check`."""
        if params.structured is not None:
            await self._grammar_checks.check(params.structured, tenant)

    def open(
        self,
        accepted: Sequence[Accepted],
        *,
        stream: bool,
        queue_timeout: float | None = None,
        alias: str | None = None,
        begun: Sequence[str] = (),
        series: Series | None = None,
    ) -> RequestStream:
        """Hand the requests of one call to the engines.

        Args:
            stream: whether the consumer iterates; otherwise it only waits for the results.
            queue_timeout: seconds that each request may wait to run, at most the server's limit; None: that limit.
            alias: another name of the call, for the journal and the history.
            begun: arithmetic of each request that another server began to answer (`fingerprint.py`); each token of
                these becomes a delta of its own.
            series: the series that they belong to; once it has begun, a server that shuts down takes the others.

        Raises:
            InvalidRequestError: no engine here has the arithmetic that an answer was begun with.
            LimitError: the queue is full, the caller's allowance is used up, or the journal cannot be written.
            EngineDeadError: all engines are gone.
            ShuttingDownError: the server finishes its open requests and accepts no more.
        """
        if self._refusal is not None and not self._takes_more_of(series):
            raise self._refusal
        # Other arithmetic would continue with other tokens than those that the client has.
        if not all(self.fleet.dispatcher.has_arithmetic(arithmetic) for arithmetic in begun if arithmetic):
            raise InvalidRequestError(
                "Last-Event-ID: the answer was started by a server with another model, instruction set or version, so "
                "no engine here can continue it exactly; send the request again without it"
            )
        # All that can refuse the call comes before the first of its requests is added: either all are open or none.
        rows = self.journaled_calls.rows_of(accepted, self.info.model_identity, alias) if self.journaled else []
        admitted = self.admission.enter([item.request for item in accepted], accepted[0].caller, queue_timeout)
        output_processors = [
            OutputProcessor(item.request, item.params, self.tokenizer, item.prompt) for item in accepted
        ]
        request_stream = RequestStream(
            self.open_requests.leave, output_processors, stream, self._limits.max_unread_tokens
        )
        if self._journal is not None:
            self._journal.add_entries(rows)
        for position, (item, arithmetic) in enumerate(zip_longest(accepted, begun)):
            self.open_requests.begin_request(
                OpenRequest(
                    item.request,
                    arithmetic=arithmetic or None,
                    output_processor=output_processors[position],
                    readers=[(request_stream, position)],
                    by_token=arithmetic is not None,
                    admitted=admitted[position],
                    record=self.history.accepted(item.request, alias),
                )
            )
        self.open_requests.send_due()
        if series is not None:
            series.may_go_on = True
        return request_stream

    def _takes_more_of(self, series: Series | None) -> bool:
        return series is not None and series.may_go_on and isinstance(self._refusal, ShuttingDownError)

    @property
    def journal_error(self) -> str | None:
        """Why the journal cannot take requests now; None if it can, or if there is no journal."""
        return self.journaled_calls.error

    def recent_responses(self, max_bytes: int) -> RecentResponses:
        """A store of this size for responses; with a journal, it begins with those that the last server stored.

        Raises:
            ConfigError: the journal cannot be read.
        """
        return RecentResponses(max_bytes, self._metrics, self._journal)

    async def health_error(self) -> str | None:
        """What is wrong with the engines: dead, hung, or silent when idle; None if at least one is healthy."""
        return await self.fleet.health_error()

    # ── calls by the fleet ───────────────────────────────────────────────────────────────────────────────────────────

    def on_message(self, replica: Replica, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._meter.record_stats(message.stats, replica.number)
            if message.step is not None:
                message.step.replica = replica.number
                self._meter.record_step(message.step)
                self.history.record_step(message.step)
            self.open_requests.deliver_outputs(replica.status, message.outputs, message.stats.steps)
        elif isinstance(message, HandedOver):
            self._meter.record_stats(message.stats, replica.number)
            self._metrics.fleet_handed_on.add(self.open_requests.handed_over(replica.number, message))
        elif isinstance(message, Pong):
            self._meter.record_stats(message.stats, replica.number)

    def engine_died(self, replica: Replica, death: Death) -> None:
        self._meter.engine_is_down(replica.number)
        self._metrics.fleet_moved.add(self.open_requests.engine_died(replica.number, death))

    def replica_stays_down(self, replica: Replica) -> None:
        self._metrics.fleet_moved.add(self.open_requests.replica_stays_down(replica.number))

    def engine_is_up(self, replica: Replica) -> None:
        self._meter.set_engine_info(replica.info, replica.number)
        self._replicas_changed()

    def replica_drains(self, num_moved: int) -> None:
        self._metrics.fleet_moved.add(num_moved)
        self._replicas_changed()

    def replica_is_gone(self, replica: Replica) -> None:
        self._meter.forget_replica(replica.number)
        self._replicas_changed()

    async def wait_for_departure(self) -> None:
        await self.open_requests.wait_for_departure()

    def _replicas_changed(self) -> None:
        self.info = self.fleet.info
        self._input_processor.engine_changed(self.info)
        self.texts = TextEncoder(self.tokenizer, self.info)
        self.admission.resize(self.fleet.max_num_seqs, self.info.image_pixels)
        self.open_requests.replicas_changed()

    def engine_given_up(self, error: EngineDeadError) -> None:
        self.fail_all(error)
        self.given_up.set()

    def fail_all(self, error: EngineDeadError) -> None:
        """Fail all open requests at once, without waiting for the engine."""
        # The first reason stays: it is what ended the engines, not what followed from it.
        if not isinstance(self._refusal, EngineDeadError):
            self._refusal = error
        self.open_requests.fail_all(error)


async def _close_started(links: Sequence[Link], journal: Journal | None) -> None:
    await asyncio.gather(*(link.close(grace=0.0) for link in links))
    if journal is not None:
        await journal.close()


def _load_tokenizer(model: ModelConfig, chat_template: str | None) -> Tokenizer | None:
    tokenizer = Tokenizer.load(resolve_path(model.model, model.revision), chat_template)
    if tokenizer is not None:
        tokenizer.start_chat_templates()
    return tokenizer


async def _close_loaded(loading: "asyncio.Future[Tokenizer | None]") -> None:
    """Close the tokenizer of an engine that failed to start; the failure is raised elsewhere."""
    with contextlib.suppress(Exception):
        tokenizer = await loading
        if tokenizer is not None:
            await asyncio.to_thread(tokenizer.close)
