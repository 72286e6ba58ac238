"""The interface between the dialects and the engine.

A dialect is a schema of bodies, routes that convert them to requests, an `Answer` that converts engine outputs to its
wire format, and the shape of its errors. This module has everything in between, which all dialects share.

    body ──route──> Call.accept_prompt ──> Call.answer ──RequestStream──> Answer ──> JSON, or a stream (`streams.py`)
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from starlette.responses import Response

from penstock.api.request import Adapter, CompletionOutput, ErrorReason, FinishReason, Image, RequestOutput
from penstock.api.sampling_params import SamplingParams
from penstock.errors import ClientGoneError, EngineError, InvalidRequestError, PenstockError, shown
from penstock.frontend.input_processor import ImagePrompt
from penstock.frontend.open_requests import Accepted, Series
from penstock.frontend.output_processor import CompletionDelta
from penstock.frontend.recovery.recent_responses import RecentResponses
from penstock.frontend.recovery.stream_cursor import Origin, StreamCursor
from penstock.frontend.request_stream import RequestStream
from penstock.frontend.text_encoding import EncodedText
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.server.body_route import LARGE_BODY
from penstock.server.call_context import CallContext, ContextOf, context_of
from penstock.server.config import seconds_of
from penstock.server.disconnect import cancelled_on_disconnect, on_disconnect
from penstock.server.serving import ANY_MODEL, Serving, unknown_model
from penstock.server.streams import Answer, EventStream, Frame, stream_answer
from penstock.text.content import ImageSource

if TYPE_CHECKING:
    from penstock.frontend.images.reader import Picture

T = TypeVar("T")

_TEXTS_AT_ONCE = 64
_TOKEN_BYTES, _LOGPROB_BYTES = 4, 64
"""Estimated bytes of an answer's body per token and per log-probability."""


class Call:
    """One call of a dialect's route: by HTTP, or created from a `CallContext`."""

    def __init__(self, context: CallContext, serving: Serving) -> None:
        self._context = context
        self._serving = serving
        self.engine = serving.engine
        self.model_names = serving.names.all
        """The model's names that the caller may use."""
        if context.caller.models is not None:
            self.model_names = tuple(filter(context.caller.may_use, serving.names.all))
        self.model_name = (self.model_names or serving.names.all)[0]
        self.tenant = context.caller.tenant
        self.created = serving.created
        self.adapter: Adapter | None = None
        """The adapter chosen by the call."""
        self.is_aborted = False
        """Whether `abort` was called."""

    @property
    def shown_name(self) -> str:
        """The first name of the model or of an adapter that the caller may use."""
        return next(filter(self._context.caller.may_use, self._serving.all_names))

    @property
    def chat_format(self) -> ChatFormat:
        """The format of the model's answers."""
        return self._serving.chat_format

    @property
    def recent_responses(self) -> RecentResponses:
        """Stored responses of all tenants."""
        return self._serving.recent_responses

    @property
    def resumed_call(self) -> str | None:
        """Id of the call whose stream this call resumes; None for a new one."""
        last = self._context.last_event_id
        return None if not last else StreamCursor.call_of(last)

    def ignore(self, *fields: str) -> None:
        """Add fields without effect on this model to the answer's header."""
        self._context.ignored.update((field, field) for field in fields)

    def keep_alive(self, duration: float | str | None) -> None:
        """Set the time without requests after which the model is unloaded; without effect if it stays loaded.

        Raises:
            InvalidRequestError: it is not a duration.
        """
        if duration is None:
            return
        use = self._context.model_use
        if use is None:
            self.ignore("keep_alive")
            return
        try:
            use.keep(seconds_of(duration))
        except ValueError:
            message = f"keep_alive must be seconds, or a text such as 5m, not {shown(duration)}"
            raise InvalidRequestError(message, "keep_alive") from None

    def choose_model(self, name: str | None) -> None:
        """Select the model of this name, or an adapter of it, which the answers then name; None: the served model.

        Raises:
            ModelNotFoundError: there is no such model or adapter.
            ModelNotPermittedError: the caller may not use it.
        """
        if name is None or name == self.model_name:
            return
        # Before it is looked up: a key must not learn which models there are.
        if self._context.caller.models is not None and name not in ANY_MODEL:
            self._context.caller.check_model(name)
        if name in self.model_names:
            self.model_name = name
            return
        self.adapter = self.engine.adapters.find(name)
        if self.adapter is None:
            self.check_model(name)
        else:
            self.model_name = name

    def choose_adapter(self, name: str) -> None:
        """Select the adapter of this name.

        Raises:
            InvalidRequestError: there is no such adapter.
            ModelNotPermittedError: the caller may not use it.
        """
        self._context.caller.check_model(name)
        self.adapter = self.engine.adapters.find(name)
        if self.adapter is None:
            known = self.engine.adapters.describe() if self._context.caller.models is None else "others"
            raise InvalidRequestError(f"there is no adapter {name!r} here; there are: {known}", "adapter_id")

    def serves(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        return self._serving.has_name(name)

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            ModelNotFoundError: the served model has another name.
            ModelNotPermittedError: the caller may not use it.
        """
        if name is not None and name not in (*self.model_names, *ANY_MODEL):
            caller, adapters = self._context.caller, self.engine.adapters
            caller.check_model(name)
            hint = f", with the adapters {adapters.describe()}" if adapters and caller.models is None else ""
            raise unknown_model(name, self.model_names, hint)

    def _check_permitted(self) -> None:
        """
        Raises:
            ModelNotPermittedError: the caller may not use the selected model or adapter.
        """
        caller = self._context.caller
        if self.adapter is None:
            caller.check_any([self.model_name])
        else:
            caller.check_model(self.adapter.name)

    async def off_loop_if_large(self, work: Callable[[], T], more_bytes: int = 0) -> T:
        """Run some work on the body and on `more_bytes`; in a thread if both are large, to keep the event loop free."""
        size = self._context.num_body_bytes + more_bytes
        return await self.run_off_loop(size, work) if size >= LARGE_BODY else work()

    async def run_off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run some work on `size` bytes in a thread. Raises as `connected`."""
        with self.connected():
            return await self.engine.large_work.run(size, work, self.tenant)

    def check_num_answers(self, num_prompts: int, params: SamplingParams | None = None) -> None:
        """Refuse more answers than may ever be open, before any work is done for them.

        Raises:
            InvalidRequestError: the call asks for too many.
        """
        width = 1 if params is None else max(params.best_of or params.n, params.num_beams)
        self.engine.admission.check_number(num_prompts * width)

    def hold_bytes(self, size: int) -> None:
        """Count bytes that the call holds beside its body, until its end.

        Raises:
            OverloadedError: there is no room for them.
        """
        self._context.hold_bytes(size)

    async def read_images(self, sources: Sequence[ImageSource], *, wants_pixels: bool = True) -> "list[Picture]":
        """Read the call's images, whose pixels count as its bytes; `wants_pixels`: see `ImagePrompts.read`.

        Raises:
            InvalidRequestError: there are too many, or one is refused.
            OverloadedError: there is no room for the pixels.
            ClientGoneError: the client has disconnected.
        """
        if not sources:
            return []
        images, namespace = self.engine.images, self._context.caller.namespace
        assert images is not None, "the model takes text only"
        with self.connected():
            return await images.read(sources, self.tenant, namespace, wants_pixels=wants_pixels, hold=self.hold_bytes)

    async def render(
        self,
        messages: list[dict[str, Any]],
        pictures: "Sequence[Picture]",
        tools: list[dict[str, Any]] | None,
        conversation: Conversation,
    ) -> str:
        """The text of a conversation's prompt, with one placeholder for each image.

        Raises:
            InvalidRequestError: the chat template rejects it, or does not render an image.
        """
        prompts, images = self.engine.prompts, self.engine.images

        render = functools.partial(
            prompts.render_chat, tools=tools, variables=conversation.variables, tenant=self.tenant
        )

        if images is None or not pictures:
            return await render(messages) + conversation.prefill
        return await images.render(messages, pictures, render) + conversation.prefill

    async def encode_images(
        self,
        messages: list[dict[str, Any]],
        sources: Sequence[ImageSource],
        tools: list[dict[str, Any]] | None,
        conversation: Conversation,
        *,
        wants_pixels: bool = True,
    ) -> ImagePrompt:
        """The prompt of a conversation with images. Raises as `read_images` and `render`."""
        assert self.engine.images is not None, "the model takes text only"
        pictures = await self.read_images(sources, wants_pixels=wants_pixels)
        with self.connected():
            text = await self.render(messages, pictures, tools, conversation)
            token_ids = await self.engine.prompts.encode_rendered(text, self.tenant)
        return self.engine.images.tokens.place(token_ids, pictures, "messages")

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Cancel the block when the client disconnects.

        Raises:
            ClientGoneError: the client has disconnected.
        """
        return cancelled_on_disconnect(self._context.receive)

    async def accept_prompt(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int | None = None,
        images: tuple[Image, ...] = (),
    ) -> Accepted:
        """Validate one prompt of the call without running it.

        Raises:
            InvalidRequestError: the engine cannot serve it.
            OverloadedError: too many schemas and grammars wait to be checked.
            ClientGoneError: the client has disconnected.
            ModelNotPermittedError: the caller may not use the model.
        """
        caller = self._context.caller
        if caller.models is not None:
            self._check_permitted()
        accepted = self.engine.accept_request(
            token_ids,
            params,
            request_id=request_id,
            prompt=prompt,
            priority=caller.default_priority if priority is None else priority,
            caller=caller,
            adapter=self.adapter,
            images=images,
        )
        if params.structured is not None:
            with self.connected():
                await self.engine.check_structured(params, caller.tenant)
        return accepted

    async def answer(
        self,
        accepted: Sequence[Accepted],
        answer: Answer,
        *,
        stream: bool,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> Response:
        """Run the prompts and send their outputs, streamed or whole. A disconnect aborts them.

        Args:
            before_end: awaited once the whole answer is formatted, before its end is sent.

        Raises:
            LimitError: the queue is full, or the caller's limit is exhausted.
            EngineError: they could not be served; for a stream, only before it begins.
            InvalidRequestError: `Last-Event-ID` names no event of this stream, or comes without `stream`.
        """
        if stream:
            request_stream, cursor = await self._open_stream(accepted, answer.frame)
            self._context.request_stream = request_stream
            events = stream_answer(request_stream, answer, cursor, self._context, self._failure_of, before_end)
            headers = answer.headers(None)
            return EventStream(events, answer.frame, request_stream.abort, headers, self._context.send_body)
        if self._context.last_event_id:
            raise InvalidRequestError("Last-Event-ID resumes a stream: ask for a stream, or leave it out")
        outputs = await self.outputs(accepted)
        # To encode a large answer takes milliseconds, in which no other call would go on.
        size = sum(map(_size_of, outputs))
        if size >= LARGE_BODY:
            body = await self.run_off_loop(size, lambda: msgspec.json.encode(answer.complete_body(outputs)))
        else:
            body = msgspec.json.encode(answer.complete_body(outputs))
        if before_end is not None:
            await before_end()
        return Response(body, headers=dict(answer.headers(outputs)), media_type="application/json")

    async def outputs(
        self, accepted: Sequence[Accepted], *, watched: bool = True, series: Series | None = None
    ) -> list[RequestOutput]:
        """Run the prompts to completion. Raises the same errors as `answer`.

        Args:
            watched: whether a disconnect aborts them; False: the response watches the connection, and calls `abort`.
            series: see `AsyncEngine.open`.
        """
        return await self._results(await self._open(accepted, stream=False, series=series), watched=watched)

    async def recorded_outputs(self, accepted: Sequence[Accepted], *, watched: bool) -> list[RequestOutput] | None:
        """The outputs of the call with the same ids, finished or not, that the journal has; None: it has none.

        Raises:
            InvalidRequestError: that call is about something else, or was refused.
            EngineError: it has failed, or was aborted.
        """
        name = accepted[0].request.request_id
        if not self.engine.journaled or not await self.engine.journaled_calls.look_up(name, self.tenant):
            return None
        return await self._results(await self.engine.journaled_calls.reopen(name, accepted), watched=watched)

    async def _results(self, request_stream: RequestStream, *, watched: bool) -> list[RequestOutput]:
        self._context.request_stream = request_stream
        with request_stream:
            if watched:
                with on_disconnect(self._context.receive, self.abort):
                    outputs = await request_stream.results()
            else:
                outputs = await request_stream.results()
        for output in outputs:
            for answer in output.outputs:
                if failure := self._failure_of(answer):
                    raise failure
        return outputs

    @property
    def queue_seconds(self) -> float:
        """Seconds that each of its requests may wait in the queue."""
        return self.engine.admission.queue_seconds(self._context.queue_timeout)

    def abort(self) -> None:
        """Abort the requests that the call waits for."""
        self.is_aborted = True
        if self._context.request_stream is not None:
            self._context.request_stream.abort()

    async def compute(
        self, encoded: Sequence[EncodedText], *, request_id: str, priority: int | None = None
    ) -> list[RequestOutput]:
        """Compute embeddings or scores of texts. Raises the same errors as `answer`, and as `accept_prompt`."""
        caller, accepted = self._context.caller, []
        if caller.models is not None:
            self._check_permitted()
        for position, text in enumerate(encoded):
            if position % _TEXTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # there may be thousands: let other tasks run
            accepted.append(
                self.engine.accept_encoded(
                    text,
                    request_id=f"{request_id}-{position}",
                    priority=caller.default_priority if priority is None else priority,
                    caller=caller,
                )
            )
        return await self.outputs(accepted)

    def _failure_of(self, part: CompletionOutput | CompletionDelta) -> PenstockError | None:
        """The error for an answer that cannot be completed."""
        if part.finish_reason is FinishReason.ERROR:
            refused = part.error_reason in (ErrorReason.NO_TOKEN_ALLOWED, ErrorReason.IMAGE_NOT_ENCODED)
            return (InvalidRequestError if refused else EngineError)(part.error or "the request failed")
        if part.finish_reason is FinishReason.ABORT:  # the server's drain ended; it says when to retry
            return self.engine.refusal or ClientGoneError(part.error or "the client has gone")
        return None

    async def _open(
        self, accepted: Sequence[Accepted], *, stream: bool, begun: Sequence[str] = (), series: Series | None = None
    ) -> RequestStream:
        timeout, alias = self._context.queue_timeout, self._context.request_id
        request_stream = self.engine.open(
            accepted, stream=stream, queue_timeout=timeout, alias=alias, begun=begun, series=series
        )
        if self.engine.journaled:
            # On disk before the caller learns its id: what was accepted is not lost.
            await self.engine.journaled_calls.recorded(accepted)
        return request_stream

    async def _open_stream(
        self, accepted: Sequence[Accepted], frame: Frame
    ) -> tuple[RequestStream, StreamCursor | None]:
        """A new stream or, with `Last-Event-ID`, a resumed one; with a cursor if the stream can be resumed."""
        sizes = [item.request.params.n for item in accepted]
        last = self._context.last_event_id
        if frame is Frame.JSON_LINES:
            if last:
                raise InvalidRequestError(
                    "Last-Event-ID resumes server-sent events, and the events of this API have no ids: leave it out"
                )
            return await self._open(accepted, stream=True), None
        if last:
            cursor = StreamCursor.parse(last, sizes)
            return await self._reopen(cursor, accepted), cursor
        request_stream, call = await self._open(accepted, stream=True), accepted[0].request.request_id
        if self._serving.resumable_streams:
            seeds = tuple(item.request.params.seed for item in accepted)
            return request_stream, StreamCursor(
                call, sizes, origin=lambda: Origin(seeds, tuple(request_stream.arithmetics), self._adapter_digest)
            )
        return request_stream, StreamCursor(call, sizes) if self.engine.journaled else None

    @property
    def _adapter_digest(self) -> str:
        return "" if self.adapter is None else self.adapter.digest

    async def _reopen(self, cursor: StreamCursor, accepted: Sequence[Accepted]) -> RequestStream:
        """Resume a call: from the journal or, if another server began it, by recomputing it."""
        origin = cursor.origin()
        try:
            return await self.engine.journaled_calls.reopen(cursor.call, accepted)
        except InvalidRequestError:
            if origin is None:
                raise
        if origin.adapter != self._adapter_digest:
            raise InvalidRequestError(
                "Last-Event-ID: the answer was started with other weights of an adapter, or with none, so it cannot "
                "continue here; send the request again without it"
            )
        again = [_with_seed(item, seed) for item, seed in zip(accepted, origin.seeds, strict=True)]
        return await self._open(again, stream=True, begun=origin.arithmetics)


def _size_of(output: RequestOutput) -> int:
    """Estimated bytes of an output in an answer's body."""
    size = 0
    for rows in (output.prompt_logprobs, *(answer.logprobs for answer in output.outputs)):
        size += _LOGPROB_BYTES * len(rows or ()) * (2 + len(rows[-1].top if rows and rows[-1] else ()))
    return size + _TOKEN_BYTES * sum(len(answer.token_ids) for answer in output.outputs)


def _with_seed(accepted: Accepted, seed: int) -> Accepted:
    request = accepted.request
    return replace(accepted, request=replace(request, params=replace(request.params, seed=seed)))


async def serving_of(request: Request, context: ContextOf) -> Serving:
    """The model that a call names, loaded.

    Raises:
        ModelNotPermittedError: the caller may use neither it nor an adapter of it.
    """
    state = request.app.state
    serving: Serving = state.serving if state.models is None else await state.models.serving_of(request, context)
    if context.caller.models is not None:
        context.caller.check_any(serving.all_names)
    return serving


ServingOf = Annotated[Serving, Depends(serving_of)]


async def _call(request: Request) -> Call:
    # One dependency, and none within it: FastAPI takes longer to resolve one than it runs.
    context = context_of(request.scope)
    return Call(context, await serving_of(request, context))


CallOf = Annotated[Call, Depends(_call)]
