"""A checkpoint's chat templates: messages in, the prompt's text out.

    ChatTemplates.render(messages) ──socket──> a process of penstock.text.chat_worker, which renders

A template is a program written by the checkpoint's author: it may loop, or write gigabytes, for every conversation or
for one. So it runs in a process of its own under limits on time and memory; a conversation that exceeds them is
refused, and the next one gets a fresh process. The server has two of them, so that short conversations never wait for
long ones.
"""

import asyncio
import json
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.checkpoint.checkpoint import read_text
from penstock.errors import CheckpointError, ConfigError, EngineDeadError, EngineError, InvalidRequestError
from penstock.system.worker_process import WorkerEndedError, WorkerProcess

CPU_SECONDS = 2.0
"""Processor time that rendering one conversation may take."""
MEMORY_BYTES = 512 * 2**20
"""Address space of a rendering process; the interpreter itself takes about 30 MB."""
PATIENCE = 60.0
"""Seconds to wait for a rendering process which gets no processor."""
ABANDONED_SECONDS = 0.25
"""Seconds that a rendering whose caller has left may go on: to kill its process costs the next caller as much."""
TEXT, REFUSED, NO_MEMORY = b"t", b"r", b"m"
"""First byte of a rendering process's answer: the prompt follows, the reason of a refusal, or out of memory."""

MAX_TEMPLATE_CHARACTERS = 2**20
"""Characters of all templates of a model together."""
_LONG = 32_768
"""Characters and items from which on a conversation is a long one."""
_LONG_BYTES = 2**20
"""What a long conversation counts as, as counting it would take the time that this is to save."""

OffLoop: TypeAlias = Callable[[int, Callable[[], bytes]], Awaitable[bytes]]


def read_template(option: str | None) -> str | None:
    """The source of the template that the option `chat_template` names, or is; compiled once, to check it.

    A file is read if there is one of that name; a name has neither braces nor line breaks, and a template has.

    Raises:
        ConfigError: there is no such file, or it is no chat template.
    """
    if option is None:
        return None
    is_source = any(character in option for character in "{}\n")
    try:
        source = option if is_source else read_text(Path(option).expanduser())
    except (CheckpointError, RuntimeError) as error:  # the latter: no such home
        raise ConfigError(f"chat_template: {error}") from None
    if source is None:
        raise ConfigError(f"chat_template: there is no file {option}, and without braces it is no template itself")
    where = "chat_template" if is_source else f"chat_template: {option}"
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(f"{where} has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are read")
    if "messages" not in source or _is_json(source):
        raise ConfigError(f"{where} is not a chat template: give Jinja source that writes out `messages`")
    process = _Process({"default": source})
    try:
        process.render(_frame("default", None))
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    finally:
        process.close()
    return source


def _is_json(source: str) -> bool:
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return False
    return True


class ChatTemplates:
    """One checkpoint's templates by name; most have only `default`, some `tool_use` beside it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: Jinja sources by name.
            special_tokens: variables that every template sees: bos_token, eos_token and so on.
        """
        self._sources = sources
        self._special_tokens = special_tokens
        self._offline, self._short, self._long = (_Process(sources) for _ in range(3))
        self._offline_lock = threading.Lock()
        self._short_lock, self._long_lock = asyncio.Lock(), asyncio.Lock()

    @property
    def exist(self) -> bool:
        return bool(self._sources)

    @property
    def source(self) -> str:
        """Jinja, one after the other."""
        return "\n".join(self._sources.values())

    def start(self) -> None:
        """Start the server's process for short conversations now rather than with the first of them.

        Raises:
            EngineError: it cannot be started.
        """
        if self.exist:
            self._short.running()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or takes too much time or memory;
                `param` is "messages".
        """
        frame = _frame(*self._request(messages, tools, add_generation_prompt, variables))
        with self._offline_lock:
            return self._offline.render(frame)

    async def render_from_loop(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        off_loop: OffLoop,
    ) -> str:
        """As `render`, without holding up the event loop.

        Args:
            off_loop: runs some work on so many bytes elsewhere.
        """
        name, given = self._request(messages, tools, add_generation_prompt, variables)
        if _is_long(given):
            frame = await off_loop(_LONG_BYTES, lambda: _frame(name, given))
            return await _render_in_turn(self._long_lock, self._long, frame)
        return await _render_in_turn(self._short_lock, self._short, _frame(name, given))

    def close(self) -> None:
        """End the processes, whatever they are doing; nothing can be rendered any more."""
        for process in (self._offline, self._short, self._long):
            process.close()

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """A template's name, and all variables that it sees."""
        return self._choose(has_tools=bool(tools)), {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }

    def _choose(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if not self._sources:
            raise InvalidRequestError(
                "the model has no chat template, so it takes no messages; generate from the prompt's text instead, or "
                "give a template by the option chat_template",
                "messages",
                over_http="ask /v1/completions",
            )
        raise InvalidRequestError(
            f"the model has chat templates for {', '.join(sorted(self._sources))} but none by default", "messages"
        )


def longest_prompt(request_bytes: int) -> int:
    """Characters that the prompt of a conversation may have, by the bytes of the conversation.

    Templates repeat what they are given once or twice, indent tools, and add instructions of their own.
    """
    return 2**20 + 4 * request_bytes


def _longest_answer(frame: bytes) -> int:
    return 1 + 4 * longest_prompt(len(frame))


async def _render_in_turn(lock: asyncio.Lock, process: "_Process", frame: bytes) -> str:
    """Render once the process is free. A caller that is cancelled leaves the queue."""
    await lock.acquire()
    rendering = asyncio.ensure_future(process.render_from_loop(frame))
    rendering.add_done_callback(lambda _: lock.release())
    try:
        return await asyncio.shield(rendering)
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(ABANDONED_SECONDS, rendering.cancel)
        raise


class _Process:
    """A rendering process, started when it is needed and again when it has ended; for one caller at a time."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._worker: WorkerProcess | None = None
        self._closed = False

    def running(self) -> WorkerProcess:
        """
        Raises:
            EngineDeadError: it was closed.
            EngineError: it cannot be started.
        """
        if self._closed:
            raise EngineDeadError("the engine is closed, and its chat templates with it")
        if self._worker is None:
            try:
                self._worker = WorkerProcess("penstock.text.chat_worker")
            except OSError as error:
                raise EngineError(f"the process that renders chat templates cannot be started: {error}") from error
            self._worker.send(json.dumps(self._sources).encode(), PATIENCE)
        return self._worker

    def render(self, frame: bytes) -> str:
        """
        Raises:
            InvalidRequestError: the template does not render this.
            EngineError: there is no process to render it.
        """
        text = self._attempt(frame)
        return _needed(self._attempt(frame) if text is None else text)

    async def render_from_loop(self, frame: bytes) -> str:
        """As `render`, without holding up the event loop."""
        text = await self._attempt_from_loop(frame)
        return _needed(await self._attempt_from_loop(frame) if text is None else text)

    def _attempt(self, frame: bytes) -> str | None:
        """None if the process has ended for a reason other than what it rendered."""
        worker = self.running()
        try:
            answer = worker.ask(frame, longest=_longest_answer(frame), patience=PATIENCE)
        except WorkerEndedError as error:
            self._worker = None
            _blame(error.exit_code)
            return None
        except BaseException:  # an interrupt: its answer would be taken for that of the next conversation
            self._worker = None
            worker.kill()
            raise
        return _read(answer)

    async def _attempt_from_loop(self, frame: bytes) -> str | None:
        worker = self.running() if self._worker else await asyncio.to_thread(self.running)
        try:
            answer = await worker.ask_from_loop(frame, longest=_longest_answer(frame), patience=PATIENCE)
        except WorkerEndedError as error:
            self._worker = None
            _blame(error.exit_code)
            return None
        except BaseException:  # cancelled: its result is not needed
            self._worker = None
            worker.kill()
            raise
        return _read(answer)

    def close(self) -> None:
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


def _frame(name: str, variables: Mapping[str, Any] | None) -> bytes:
    """What a rendering process is sent: without variables it compiles the template, and renders nothing.

    Raises:
        InvalidRequestError: the variables are not what JSON can hold.
    """
    try:
        return json.dumps([name, variables], ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            "messages, tools and the template's variables must be plain data: text, numbers, lists and objects, not "
            f"nested too deeply ({type(error).__name__}: {error})",
            "messages",
        ) from error


def _read(answer: bytes) -> str:
    kind, content = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
    if kind == TEXT:
        return content
    if kind == NO_MEMORY:
        content = f"the model's chat template takes more than {MEMORY_BYTES >> 20} MiB of memory on these messages"
    raise InvalidRequestError(content, "messages")


def _blame(exit_code: int | None) -> None:
    """Do nothing if the process was retired, or killed from outside.

    Raises:
        InvalidRequestError: it ended by what it rendered.
    """
    if exit_code in (0, -signal.SIGKILL):
        return
    fault = f"ends the process that renders it, with exit code {exit_code}, on these messages"
    if exit_code is None:
        fault = f"was not rendered within {PATIENCE:g} s"
    elif exit_code == -signal.SIGPROF:
        fault = f"takes more than {CPU_SECONDS:g} s of processor time on these messages"
    raise InvalidRequestError(f"the model's chat template {fault}", "messages")


def _needed(text: str | None) -> str:
    if text is None:
        raise EngineError("the process that renders chat templates was killed from outside, twice in a row")
    return text


def _is_long(value: object) -> bool:
    """Whether a value holds enough characters and items to count as long; stops counting there."""
    left, waiting = _LONG, [value]
    while waiting and left > 0:
        value = waiting.pop()
        left -= 1
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, (Mapping, list, tuple)):
            left -= len(value)
            if left > 0:
                waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return left <= 0
