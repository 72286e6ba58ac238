"""The offline API: a model in the caller's own process.

with LLM() as llm:
    print(llm.generate("What is 37 + 58?")[0].outputs[0].text)
"""

import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from penstock.api.request import RequestOutput
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import find_on_disk, resolve_path
from penstock.config.engine_config import EngineConfig
from penstock.config.signatures import advises_names, lists_options
from penstock.engine import startup
from penstock.engine.info import EngineStats
from penstock.errors import EngineDeadError, EngineError, InvalidRequestError, PenstockError
from penstock.frontend.adapters import AdapterNames
from penstock.frontend.arguments import (
    Message,
    Prompt,
    check_params,
    conversations_of,
    each_adapter,
    each_params,
    listed_prompts,
    plain_prompt,
    side_of,
)
from penstock.frontend.input_processor import ImagePrompt, InputProcessor
from penstock.frontend.live_requests import LiveRequests
from penstock.frontend.logprob_texts import delta_with_texts, output_with_texts
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.frontend.text_encoding import EncodedText, TextEncoder, check_dimensions, vector_of
from penstock.structured.grammar_validator import GrammarValidator
from penstock.text.chat_template import read_template
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tqdm import tqdm
    from typing_extensions import Unpack

    from penstock.api.tools import Tools
    from penstock.config.llm_options import LLMOptions
    from penstock.engine.core import EngineCore
    from penstock.engine.encoder_core import EncoderCore
    from penstock.frontend.audio.reader import SoundReader
    from penstock.frontend.audio.transcription import Transcript
    from penstock.frontend.images.prompts import OfflineImages
    from penstock.parsers.conversation import ChatFormat, Conversation
    from penstock.parsers.parts import Part

    Core: TypeAlias = EngineCore | EncoderCore


@lists_options
class LLM:
    """A loaded model. Use it as a context manager to free its memory.

    `model` is a Hugging Face folder or hub id, or None for the built-in demo model. The other options are named like
    the command line's flags: `LLM("folder", max_num_seqs=8, dtype="bfloat16")`. `engine` is an engine that was already
    built (`engine.build`); it replaces all other options.

    Not thread-safe; one thread may interleave several streams.

    Raises:
        ConfigError: an option is unknown, or incompatible with the model or the machine.
        CheckpointError: the model cannot be read.
    """

    def __init__(
        self, model: str | None = None, *, engine: "Core | None" = None, **options: "Unpack[LLMOptions]"
    ) -> None:
        self._core: "Core | None" = None
        config = EngineConfig.from_options(model=model, **options)
        template = read_template(config.model.chat_template)
        core, tokenizer = (engine, None) if engine else _start(config, template)
        self._core = core
        self._adapters = AdapterNames(lambda: core.info)
        try:
            self._adapters.add_listed(config.adapters.paths)
            self.tokenizer = Tokenizer.load(core.info.model_path, template) if tokenizer is None else tokenizer.result()
        except PenstockError:
            core.close()
            raise
        self._input_processor = InputProcessor(self.tokenizer, core.info)
        self._text_encoder = TextEncoder(self.tokenizer, core.info)
        self._validator = GrammarValidator(core.info.model_path, core.info.vocab_size)
        self._image_limits = config.images
        self._images: "OfflineImages | None" = None
        self._audio_limits = config.audio
        self._sounds: "SoundReader | None" = None
        self._ids = itertools.count()
        self._live = LiveRequests(core)

    @advises_names
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt: text, token ids, or text with images. Returns one output per prompt, in their order.

        A prompt with images is `{"prompt": text, "multi_modal_data": {"image": images}}`, whose text has the model's
        placeholder for each image: a PIL image, a path, bytes or a data URL. One with sounds has `"audio"` likewise.

        Args:
            params: for all prompts, or a list with one for each.
            adapter: name of an adapter for all prompts, or a list with one for each.
            progress: whether to show a progress bar; None: for several prompts, on a terminal.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing is computed.
        """
        pending = self._accept_all(prompts, params, adapter)
        self._run(pending, progress)
        return [self._result(output_processor) for output_processor in pending]

    @advises_names
    def generate_unordered(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer each prompt as `generate`, but yield (prompt index, output) as soon as each output is complete.

        Leaving the loop early aborts the other requests.

        Raises:
            InvalidRequestError: a prompt or its parameters are invalid; nothing is computed.
        """
        return self._ended(self._accept_all(prompts, params, adapter))

    @advises_names
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
        *,
        tools: "Tools | None" = None,
        adapter: str | Sequence[str | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: messages with `role` and `content`, rendered by the chat template.

        If the model takes images, a content may be a list of parts: `{"type": "text", "text": text}`, and
        `{"type": "image", "image": image}` with a PIL image, a path, bytes or a data URL. If it takes sounds:
        `{"type": "audio", "audio": sound}` with a path, bytes, a data URL, or an array of float samples and its rate.

        Outputs contain the model's raw text; `parts` splits it into reasoning, text and tool calls.

        Args:
            tools: functions that the model may or must call.
            adapter: as in `generate`.
            template: variables of the chat template.

        Raises:
            InvalidRequestError: as `generate`; also if there is no chat template, or it rejects the messages.
        """
        asked = [self._conversation(conversation, tools, template) for conversation in conversations_of(messages)]
        prompts = [self._chat_prompt(each) for each in asked]
        given = zip(prompts, each_params(params, len(prompts)), asked, strict=True)
        settled = [self._guided(prompt.token_ids, prompt_params, each.tools) for prompt, prompt_params, each in given]
        return self.generate(prompts, settled, progress, adapter=adapter)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> "NDArray[np.float32]":
        """Embed texts, or lists of token ids: [num_texts, vector_size] float32.

        Args:
            prompt_name: the checkpoint's prompt to put before each text; None: its default, if it has one.
            dimensions: number of leading elements to keep, for models trained with Matryoshka loss.
            normalize: whether to scale vectors to length 1; None: as the checkpoint says.
            truncate: whether texts that are too long are truncated rather than refused.

        Raises:
            InvalidRequestError: a text or option is invalid, or the model is no embedding model; nothing is computed.
        """
        import numpy as np

        encoder, listed = self._text_encoder, listed_prompts(texts)
        encoder.check_task("embed")
        check_dimensions(dimensions, encoder.config)
        prompt, cut = encoder.prompt(prompt_name), side_of(truncate)
        if all(isinstance(text, str) for text in listed):
            encoded = encoder.encode(cast("list[str]", listed), prompt=prompt, truncate=cut, param="texts")
        else:
            encoded = [
                encoder.check_tokens(cast("Sequence[int]", text), truncate=cut, param="texts") for text in listed
            ]
        outputs = self._encode(encoded, progress)
        vectors = [vector_of(output, encoder.config, dimensions=dimensions, normalize=normalize) for output in outputs]
        size = dimensions or encoder.config.truncate_dim or encoder.config.vector_size
        return np.stack(vectors) if vectors else np.empty((0, size), np.float32)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate: bool = False,
        raw: bool = False,
        progress: bool | None = None,
    ) -> list[float]:
        """Score the relevance of documents: one query with every document, or as many queries as documents, in pairs.

        A reranker's score goes through a sigmoid unless `raw`. An embedding model's score is the similarity of the two
        vectors: the cosine, unless the folder names another function.

        Raises:
            InvalidRequestError: a text is invalid, or the model is generative; nothing is computed.
        """
        from penstock.frontend.scoring import Scoring, paired  # here: few models score

        encoder = self._text_encoder
        pairs = paired(query, documents)
        scoring = Scoring(encoder, pairs, side_of(truncate))
        return scoring.scores(self._encode(scoring.encoded, progress), raw=raw)

    def transcribe(
        self,
        audio: "str | os.PathLike[str] | bytes | NDArray[np.float32]",
        *,
        language: str | None = None,
        translate: bool = False,
        prompt: str = "",
        temperature: float = 0.0,
        seed: int | None = None,
        timestamps: bool = False,
    ) -> "Transcript":
        """Transcribe a sound of any length: a file's path, its bytes, or float32 samples, 16,000 a second.

        Args:
            language: its code, such as "de"; None: the model tells.
            translate: whether into English.
            prompt: text that may come before, for its style and spelling.
            timestamps: whether the segments of a sound of 30 seconds or less have times.

        Raises:
            InvalidRequestError: the sound cannot be read, an option is invalid, or the model does not transcribe.
        """
        from penstock.frontend.audio.transcription import Transcription, TranscriptOptions, check_task

        options = TranscriptOptions(language, translate, prompt, temperature, seed, has_segments=timestamps)
        sounds, tokenizer = self._need_sounds(), self._need_tokenizer()
        check_task(sounds.about, options)
        transcription = Transcription(
            sounds.read(audio),
            sounds.about,
            self._engine.info.max_model_len,
            options,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.decode,
        )
        while questions := transcription.next():
            prompts = [ImagePrompt(list(question.prompt), question.images) for question in questions]
            outputs = self.generate(prompts, [question.params for question in questions], progress=False)
            answers = [output.outputs[0] for output in outputs]
            for answer in answers:
                if answer.error is not None:
                    raise EngineError(answer.error)
            transcription.answer(answers)
        return transcription.transcript

    def _need_sounds(self) -> "SoundReader":
        if self._sounds is None:
            from penstock.frontend.audio.reader import SoundReader  # here: few models transcribe

            about = self._engine.info.audio_input
            if about is None:
                raise InvalidRequestError(f"{self.model_name} does not transcribe: load a Whisper model", "audio")
            self._sounds = SoundReader(about, self._audio_limits)
        return self._sounds

    def _encode(self, encoded: Sequence[EncodedText], progress: bool | None) -> list[RequestOutput]:
        assert self._engine
        now = time.monotonic()
        pending = [
            OutputProcessor(
                self._input_processor.make_encoding(text, request_id=str(next(self._ids)), arrival=now),
                SamplingParams(),
                None,
                None,
            )
            for text in encoded
        ]
        self._run(pending, progress)
        outputs = [output_processor.result() for output_processor in pending]
        for output in outputs:
            if output.vector is None:
                raise EngineError(output.outputs[0].error or "the text could not be computed")
        return outputs

    def parts(self, output: RequestOutput, tools: "Tools | None" = None) -> "list[list[Part]]":
        """Split each answer of a chat into reasoning, text, and calls of `tools`."""
        from penstock.api.tools import Tools
        from penstock.parsers.conversation import Parsers

        parsers = Parsers(self._chat_format, self._need_tokenizer(), output.prompt_token_ids, tools or Tools(()))
        return [parsers.parts(answer) for answer in output.outputs]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[CompletionDelta]:
        """Answer one prompt as a stream of deltas. Leaving the loop early aborts the request.

        `adapter` is the name of an adapter.

        Raises:
            InvalidRequestError: as `generate`; also for beam search and `best_of`, which cannot stream.
        """
        check_params(params)
        if params is not None:
            params.check_streamable()
        pending = self._accept(prompt, params, adapter)
        return self._stream(pending)

    def load_adapter(self, name: str, path: str) -> None:
        """Register the LoRA adapter of a folder, GGUF file or hub id under this name. Its first request loads it.

        Raises:
            AdapterError: it does not match the model, or exceeds the memory planned for adapters.
        """
        self._adapters.add(self._adapters.read(name, path))

    def unload_adapter(self, name: str) -> None:
        """Unregister the adapter of this name.

        Raises:
            InvalidRequestError: there is no adapter of this name.
        """
        if self._adapters.remove(name) is None:
            raise InvalidRequestError(f"there is no adapter {name!r}", "adapter")

    def chat_prompt(self, messages: Sequence[Message], tools: "Tools | None" = None, **template: Any) -> ImagePrompt:
        """The prompt of a conversation, for `generate` and `stream`: its token ids, and the images in it.

        Raises:
            InvalidRequestError: as `chat`.
        """
        return self._chat_prompt(self._conversation(messages, tools, template))

    def encode_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Render messages with the chat template and tokenise the prompt."""
        return self._need_tokenizer().encode_chat([dict(m) for m in messages], **template)

    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self._engine.stats()

    @property
    def has_default_sampling(self) -> bool:
        """Whether the checkpoint has default sampling parameters, for those that `SamplingParams` leave unset."""
        return self._engine.info.defaults.has_sampling

    @property
    def model_name(self) -> str:
        """The name of the model's folder or file, or its hub id."""
        return self._engine.info.model_name

    @property
    def memory_plan(self) -> str:
        """The memory plan in one line: weights, KV cache, activations."""
        return self._engine.info.memory_plan

    def close(self) -> None:
        """Free the model's memory; idempotent."""
        if self._core is not None:
            self._validator.close()
            if self._images is not None:
                self._images.close()
            if self._sounds is not None:
                self._sounds.close()
            if self.tokenizer is not None:
                self.tokenizer.close()
            self._live.close()
            self._core.close()
            self._core = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._core is None:
            return "LLM(closed)"
        info = self._core.info
        return f"LLM({info.model_name!r}, dtype={info.dtype!r}, max_model_len={info.max_model_len})"

    @property
    def _engine(self) -> "Core":
        if self._core is None:
            raise EngineDeadError("this LLM is closed")
        return self._core

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.json: give token ids to generate()", "messages")
        return self.tokenizer

    @functools.cached_property
    def _chat_format(self) -> "ChatFormat":
        from penstock.parsers.conversation import format_of

        return format_of(self._need_tokenizer().chat_template_source)

    def _need_images(self, param: str) -> "OfflineImages":
        """Prompts with images or sounds.

        Raises:
            InvalidRequestError: the model takes text only.
        """
        if self._images is None:
            from penstock.frontend.images.prompts import OfflineImages, media_of  # here: few models take images

            media = media_of(self._engine.info, self.tokenizer, self._image_limits, self._audio_limits)
            if media is None:
                note = self._engine.info.encoder_note
                raise InvalidRequestError(
                    f"{self.model_name} takes text only: leave images and sounds out{note}", param
                )
            self._images = OfflineImages(media)
        return self._images

    def _conversation(
        self, messages: Sequence[Message], tools: "Tools | None", template: dict[str, Any]
    ) -> "Conversation":
        from penstock.api.tools import Tools  # here: a prompt has no need of them
        from penstock.parsers.conversation import Conversation

        return Conversation(self._with_sources(messages), tools or Tools(()), template)

    def _with_sources(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not any(isinstance(message.get("content"), list) for message in messages):
            return [dict(message) for message in messages]
        from penstock.frontend.images.arguments import with_sources  # here: few conversations have parts
        from penstock.text.content import take_images

        made = with_sources(messages)
        if take_images(made)[1]:
            self._need_images("messages")
        return made

    def _chat_prompt(self, asked: "Conversation") -> ImagePrompt:
        from penstock.text.content import take_images

        known, tokenizer = self._chat_format, self._need_tokenizer()
        messages, tools = asked.template_input(known)
        messages, sources = take_images(messages)
        variables = asked.variables

        def render(given: list[dict[str, Any]]) -> str:
            return tokenizer.apply_chat_template(given, tools=tools, **variables)

        if not sources:
            return ImagePrompt(tokenizer.encode(render(messages), add_special_tokens=False))
        images = self._need_images("messages")
        pictures = images.read(sources)
        text = images.render(messages, pictures, render)
        return images.tokens.place(tokenizer.encode(text, add_special_tokens=False), pictures, "messages")

    def _bare_prompt(self, prompt: Mapping[str, Any]) -> ImagePrompt:
        from penstock.frontend.images.arguments import sources_of_prompt

        images, (text, sources) = self._need_images("prompts"), sources_of_prompt(prompt)
        pictures = images.read(sources)
        token_ids = self._need_tokenizer().encode(images.tokens.with_placeholders(text))
        return images.tokens.place(token_ids, pictures, "prompts")

    def _guided(self, prompt: Sequence[int], params: SamplingParams | None, tools: "Tools") -> SamplingParams:
        from penstock.parsers.conversation import constrain

        return constrain(params or SamplingParams(), self._chat_format, self._need_tokenizer(), prompt, tools)

    def _accept(self, prompt: Prompt, params: SamplingParams | None, adapter: str | None) -> OutputProcessor:
        """Validate a prompt and create its output processor, without adding the request to the engine."""
        assert self._engine
        params = self._input_processor.with_default_stops(params or SamplingParams())
        chosen = None if adapter is None else self._adapters.find(adapter)
        if adapter is not None and chosen is None:
            raise InvalidRequestError(f"there is no adapter {adapter!r}: load_adapter adds one", "adapter")
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Mapping):
            prompt = self._bare_prompt(prompt)
        request = self._input_processor.make_request(
            prompt.token_ids if isinstance(prompt, ImagePrompt) else plain_prompt(prompt),
            params,
            request_id=str(next(self._ids)),
            arrival=time.monotonic(),
            adapter=chosen,
            images=prompt.images if isinstance(prompt, ImagePrompt) else (),
        )
        if params.structured is not None:
            self._validator.submit(params.structured).result()
        return OutputProcessor(request, params, self.tokenizer, text)

    def _accept_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> list[OutputProcessor]:
        listed = listed_prompts(prompts)
        given = zip(listed, each_params(params, len(listed)), each_adapter(adapter, len(listed)), strict=True)
        return [self._accept(prompt, prompt_params, name) for prompt, prompt_params, name in given]

    def _run(self, pending: list[OutputProcessor], progress: bool | None) -> None:
        is_shown = len(pending) > 1 and sys.stderr.isatty() if progress is None else progress
        with _bar(len(pending)) if is_shown else nullcontext() as bar:
            for _ in self._live.finished(pending):
                if bar is not None:
                    bar.update()

    def _ended(self, pending: list[OutputProcessor]) -> Iterator[tuple[int, RequestOutput]]:
        """Run requests to completion; yields (index, output) as each one ends."""
        with closing(self._live.finished(pending)) as indices:
            for index in indices:
                yield index, self._result(pending[index])

    def _result(self, output_processor: OutputProcessor) -> RequestOutput:
        return output_with_texts(output_processor.result(), self.tokenizer)

    def _stream(self, pending: OutputProcessor) -> Iterator[CompletionDelta]:
        with closing(self._live.stream(pending)) as deltas:
            for delta in deltas:
                yield delta_with_texts(delta, self.tokenizer)


def _start(config: EngineConfig, chat_template: str | None) -> "tuple[Core, Future[Tokenizer | None]]":
    """Build the engine and load the tokenizer, which a thread loads beside the engine's modules and the weights."""
    model = config.model
    if find_on_disk(model.model, model.revision) is None:
        resolve_path(model.model, model.revision)  # a download takes long, while other threads make garbage
    with ThreadPoolExecutor(1, "tokenizer") as beside:
        tokenizer = beside.submit(lambda: Tokenizer.load(resolve_path(model.model, model.revision), chat_template))
        with startup.starting(config) as start:
            from penstock.engine.build import build

            core = build(config, start)
            wait((tokenizer,))  # so that the memory that it no longer needs is returned, too
    return core, tokenizer


def _bar(total: int) -> "tqdm[Any]":
    from tqdm import tqdm  # here: it is a fifth of what importing this module takes

    return tqdm(total=total, unit="request")
