"""The Python API for asyncio: the engine runs in a process of its own, and each request is a coroutine or a stream.

async with AsyncLLM() as llm:
    async for delta in llm.stream("What is 37 + 58?"):
        print(delta.text, end="")
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from penstock.api.request import Adapter, RequestOutput
from penstock.api.sampling_params import SamplingParams
from penstock.api.tools import NO_TOOLS, Tools
from penstock.config.engine_config import EngineConfig
from penstock.config.llm_options import LLMOptions
from penstock.config.signatures import advises_names, lists_options
from penstock.errors import EngineDeadError, InvalidRequestError
from penstock.frontend.arguments import Message, Prompt, check_params, conversations_of, plain_prompt
from penstock.frontend.input_processor import ImagePrompt
from penstock.frontend.logprob_texts import delta_with_texts, output_with_texts
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import ChatFormat, Conversation, Parsers, constrain, format_of
from penstock.parsers.parts import Part
from penstock.text.content import ImageSource, take_images
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.frontend.client import AsyncEngine
    from penstock.frontend.images.prompts import ImagePrompts
    from penstock.frontend.open_requests import Accepted

_UNLIMITED = 2**62
"""No limits: the caller's own tasks bound the queue and the unread output."""
_QUEUE_SECONDS = 1e9


@lists_options
class AsyncLLM:
    """A model that generates for many tasks of one event loop; their requests run together. Used by `async with`.

    The arguments are those of `LLM`. A dead engine is replaced, and unfinished answers continue where they were.
    Cancelling a task, or leaving its stream, aborts the request.

    Raises:
        ConfigError: an option is unknown, or incompatible with the model or the machine.
        CheckpointError: the model cannot be read.
    """

    def __init__(self, model: str | None = None, **options: Unpack[LLMOptions]) -> None:
        self._config = EngineConfig.from_options(model=model, **options)
        self._started: "AsyncEngine | None" = None
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        from penstock.fleet.link import EngineLink
        from penstock.frontend.client import AsyncEngine
        from penstock.frontend.limits import QueueLimits

        if self._started is not None:
            raise InvalidRequestError("this AsyncLLM is running already: `async with` starts it once")
        limits = QueueLimits(
            max_queued=_UNLIMITED,
            max_queued_tokens=_UNLIMITED,
            max_unread_tokens=_UNLIMITED,
            queue_timeout=_QUEUE_SECONDS,
        )
        self._started = await AsyncEngine.start(self._config, EngineLink(self._config), limits=limits)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine; open requests fail with EngineDeadError. Calling it again does nothing."""
        engine, self._started = self._started, None
        if engine is not None:
            await engine.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none."""
        return self._engine.tokenizer

    @advises_names
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> RequestOutput:
        """Answer one prompt, text or token ids. For many, use `asyncio.gather` or `asyncio.as_completed`.

        Raises:
            InvalidRequestError: the prompt or its parameters are invalid.
            EngineDeadError: the engine was closed, or failed repeatedly.
        """
        with self._engine.open([await self._accept(prompt, params, adapter)], stream=False) as request_stream:
            (output,) = await request_stream.results()
        return output_with_texts(output, self.tokenizer)

    @advises_names
    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncIterator[CompletionDelta]:
        """Answer one prompt as a stream of deltas.

        Raises:
            InvalidRequestError: as `generate`; also for beam search and `best_of`, which cannot stream.
            EngineDeadError: as `generate`.
        """
        check_params(params)
        if params is not None:
            params.check_streamable()
        tokenizer = self.tokenizer
        with self._engine.open([await self._accept(prompt, params, adapter)], stream=True) as request_stream:
            async for deltas in request_stream:
                for _, delta in deltas:
                    yield delta_with_texts(delta, tokenizer)

    @advises_names
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        adapter: str | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answer a conversation; see `LLM.chat`. `parts` splits the answers into reasoning, text and tool calls.

        Raises:
            InvalidRequestError: as `generate`; also if there is no chat template, or it rejects the messages.
        """
        prompt, params = await self._conversation(messages, params, tools, template)
        return await self.generate(prompt, params, adapter=adapter)

    @advises_names
    async def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        adapter: str | None = None,
        **template: Any,
    ) -> AsyncIterator[CompletionDelta]:
        """Answer a conversation as a stream of deltas. Raises the same errors as `chat`."""
        prompt, params = await self._conversation(messages, params, tools, template)
        async for delta in self.stream(prompt, params, adapter=adapter):
            yield delta

    def parts(self, output: RequestOutput, tools: Tools | None = None) -> list[list[Part]]:
        """Split each answer of a chat into reasoning, text, and calls of `tools`."""
        tokenizer = self._engine.prompts.need_tokenizer()
        parsers = Parsers(self._chat_format, tokenizer, output.prompt_token_ids, tools or NO_TOOLS)
        return [parsers.parts(answer) for answer in output.outputs]

    def __repr__(self) -> str:
        if self._started is None:
            return "AsyncLLM(not running)"
        info = self._started.info
        return f"AsyncLLM({info.model_name!r}, dtype={info.dtype!r}, max_model_len={info.max_model_len})"

    @property
    def _engine(self) -> "AsyncEngine":
        if self._started is None:
            raise EngineDeadError("this AsyncLLM is not running: use it inside `async with`")
        return self._started

    @functools.cached_property
    def _chat_format(self) -> ChatFormat:
        return format_of(self._engine.prompts.need_tokenizer().chat_template_source)

    async def _accept(self, prompt: Prompt, params: SamplingParams | None, adapter: str | None) -> "Accepted":
        """Validate a request without running it."""
        check_params(params)
        engine, params = self._engine, params or SamplingParams()
        chosen = None if adapter is None else self._adapter(engine, adapter)
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Mapping):
            prompt = await self._bare_prompt(prompt)
        elif not isinstance(prompt, ImagePrompt):
            prompt = ImagePrompt(
                await engine.prompts.encode(prompt) if isinstance(prompt, str) else plain_prompt(prompt)
            )
        await engine.check_structured(params)
        return engine.accept_request(
            prompt.token_ids,
            params,
            request_id=str(next(self._ids)),
            prompt=text,
            adapter=chosen,
            images=prompt.images,
        )

    def _need_images(self, param: str) -> "ImagePrompts":
        engine = self._engine
        if engine.images is None:
            note = engine.info.encoder_note
            raise InvalidRequestError(
                f"{engine.info.model_name} takes text only: leave images and sounds out{note}", param
            )
        return engine.images

    async def _bare_prompt(self, prompt: Mapping[str, Any]) -> ImagePrompt:
        from penstock.frontend.images.arguments import sources_of_prompt

        images = self._need_images("prompts")
        text, sources = await asyncio.to_thread(sources_of_prompt, prompt)
        pictures = await images.read(sources)
        token_ids = await self._engine.prompts.encode(images.tokens.with_placeholders(text))
        return images.tokens.place(token_ids, pictures, "prompts")

    @staticmethod
    def _adapter(engine: "AsyncEngine", name: str) -> Adapter:
        found = engine.adapters.find(name)
        if found is None:
            raise InvalidRequestError(f"there is no adapter {name!r}: the option adapter lists them", "adapter")
        return found

    async def _conversation(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        tools: Tools | None,
        template: dict[str, Any],
    ) -> tuple[ImagePrompt, SamplingParams]:
        """Render the conversation to a prompt, and add the grammar of the tools to the parameters."""
        check_params(params)
        conversations = conversations_of(messages)
        if len(conversations) != 1:
            raise InvalidRequestError("messages must be one conversation: asyncio.gather answers several", "messages")
        prompts, known = self._engine.prompts, self._chat_format
        given = [dict(message) for message in conversations[0]]
        if any(isinstance(message.get("content"), list) for message in given):
            from penstock.frontend.images.arguments import with_sources  # here: few conversations have parts

            given = await asyncio.to_thread(with_sources, given)
        asked = Conversation(given, tools or NO_TOOLS, template)
        messages, template_tools = asked.template_input(known)
        messages, sources = take_images(messages)
        if sources:
            prompt = await self._image_prompt(
                messages, sources, lambda each: prompts.render_chat(each, template_tools, template)
            )
        else:
            prompt = ImagePrompt(await prompts.encode_chat(messages, template_tools, template))
        settled = constrain(params or SamplingParams(), known, prompts.need_tokenizer(), prompt.token_ids, asked.tools)
        return prompt, settled

    async def _image_prompt(
        self,
        messages: list[dict[str, Any]],
        sources: Sequence[ImageSource],
        render: Callable[[list[dict[str, Any]]], Awaitable[str]],
    ) -> ImagePrompt:
        images = self._need_images("messages")
        pictures = await images.read(sources)
        text = await images.render(messages, pictures, render)
        return images.tokens.place(await self._engine.prompts.encode_rendered(text), pictures, "messages")
