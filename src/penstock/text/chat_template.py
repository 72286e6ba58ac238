"""Renders a checkpoint's chat templates: from messages to the text of the prompt.

    ChatTemplates.render(messages) ──socket──> a process of penstock.text.chat_worker, which renders

A template is a program by the checkpoint's author: it may loop forever or write gigabytes, for any conversation. So it
runs in a worker process with limits on CPU time and memory; a conversation that exceeds them is refused, and the next
one gets a new process. The server has two such processes, so that short conversations never wait for long ones.
"""

import functools
import json
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.checkpoint.checkpoint import read_text
from penstock.errors import CheckpointError, ConfigError, EngineDeadError, EngineError, InvalidRequestError
from penstock.system.worker_process import WorkerEndedError, WorkerProcess
from penstock.text.chat_frames import CPU_SECONDS, MEMORY_BYTES, NO_MEMORY, TEXT, longest_prompt

if TYPE_CHECKING:
    import asyncio  # imported where a loop runs: a command without one starts 12 ms sooner

PATIENCE = 60.0
"""Seconds to wait for a rendering process, which may be short of CPU time."""
ABANDONED_SECONDS = 0.25
"""Seconds for which rendering continues after its caller left: killing the process costs the next caller as much."""
MAX_TEMPLATE_CHARACTERS = 2**20
"""Maximum total characters of a model's templates."""
_LONG = 32_768
"""Number of characters and items from which a conversation counts as long."""
_LONG_BYTES = 2**20
"""Assumed size of a long conversation, as counting it would take the time that this is meant to save."""

OffLoop: TypeAlias = Callable[[int, Callable[[], bytes]], Awaitable[bytes]]


def read_template(option: str | None) -> str | None:
    """The template source of the option `chat_template`: a file's content, or the option's text. Compiled as a check.

    Text with braces or line breaks is a template; anything else is the name of a file.

    Raises:
        ConfigError: there is no such file, or the template does not compile.
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


def start_rendering() -> WorkerProcess:
    """Start a rendering process while the templates are not yet read; `ChatTemplates.use` takes it.

    Raises:
        EngineError: the process cannot be started.
    """
    try:
        return WorkerProcess("penstock.text.chat_worker")
    except OSError as error:
        raise EngineError(f"the process that renders chat templates cannot be started: {error}") from error


class ChatTemplates:
    """A checkpoint's templates by name; most have only `default`, some also `tool_use`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: Jinja sources by name.
            special_tokens: variables available to every template: bos_token, eos_token and so on.
        """
        self._sources = sources
        self._special_tokens = special_tokens
        self._offline, self._short, self._long = (_Process(sources) for _ in range(3))
        self._offline_lock = threading.Lock()

    @property
    def exist(self) -> bool:
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The Jinja sources, concatenated."""
        return "\n".join(self._sources.values())

    def use(self, process: WorkerProcess) -> None:
        """Have `render` use this process, of `start_rendering`."""
        if self.exist:
            self._offline.use(process)

    def start(self) -> None:
        """Start the process for short conversations ahead of the first one.

        Raises:
            EngineError: the process cannot be started.
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
        """Render a conversation to the text of the prompt.

        Raises:
            InvalidRequestError: there is no template, it rejects the messages, or exceeds its time or memory limit;
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
        """Like `render`, without blocking the event loop.

        Args:
            off_loop: runs work on an input of this many bytes in a thread.
        """
        name, given = self._request(messages, tools, add_generation_prompt, variables)
        if _is_long(given):
            frame = await off_loop(_LONG_BYTES, lambda: _frame(name, given))
            return await _render_in_turn(self._long, frame)
        return await _render_in_turn(self._short, _frame(name, given))

    def close(self) -> None:
        """Kill the processes; nothing can be rendered afterwards."""
        for process in (self._offline, self._short, self._long):
            process.close()

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """The template's name and all of its variables."""
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


def _longest_answer(frame: bytes) -> int:
    return 1 + 4 * longest_prompt(len(frame))


async def _render_in_turn(process: "_Process", frame: bytes) -> str:
    """Render when the process is free. A cancelled caller leaves the queue."""
    import asyncio

    await process.turn.acquire()
    # A task of its own: a caller that leaves must not let the next one in before the reply has come.
    rendering = asyncio.ensure_future(process.render_from_loop(frame))
    rendering.add_done_callback(lambda _: process.turn.release())
    try:
        return await asyncio.shield(rendering)
    except asyncio.CancelledError:
        # Most replies come before that; to kill the process would cost the next caller its start.
        asyncio.get_running_loop().call_later(ABANDONED_SECONDS, rendering.cancel)
        raise


class _Process:
    """A rendering process, started on first use and restarted after its end; for one caller at a time."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._worker: WorkerProcess | None = None
        self._closed = False

    @functools.cached_property
    def turn(self) -> "asyncio.Lock":
        """Held by the caller within an event loop."""
        import asyncio

        return asyncio.Lock()

    def running(self) -> WorkerProcess:
        """
        Raises:
            EngineDeadError: `close` was called.
            EngineError: the process cannot be started.
        """
        if self._closed:
            raise EngineDeadError("the engine is closed, and its chat templates with it")
        if self._worker is None:
            self.use(start_rendering())
        assert self._worker is not None
        return self._worker

    def use(self, worker: WorkerProcess) -> None:
        """Send the templates to a process that has none yet, and use it."""
        self._worker = worker
        worker.send(json.dumps(self._sources).encode(), PATIENCE)

    def render(self, frame: bytes) -> str:
        """
        Raises:
            InvalidRequestError: the template does not render this conversation.
            EngineError: the process cannot be started, or was killed twice in a row.
        """
        # The process may have been killed from outside, as by the OOM killer: the second attempt has a new one.
        text = self._attempt(frame)
        return _needed(self._attempt(frame)) if text is None else text

    async def render_from_loop(self, frame: bytes) -> str:
        """Like `render`, without blocking the event loop."""
        text = await self._attempt_from_loop(frame)
        return _needed(await self._attempt_from_loop(frame)) if text is None else text

    def _attempt(self, frame: bytes) -> str | None:
        """Ask the process to render; None if it ended for a reason other than the conversation."""
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
        import asyncio

        worker = self._worker
        if worker is None:
            worker = await asyncio.to_thread(self.running)
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
    """The frame for a rendering process; without variables it only compiles the template.

    Raises:
        InvalidRequestError: the variables cannot be encoded as JSON.
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
    """Raise if the conversation ended the process, rather than its retirement or a kill from outside.

    Raises:
        InvalidRequestError: rendering exceeded a time limit, or crashed the process.
    """
    # 0: it ended by itself, after an earlier conversation that exhausted its memory.
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
        elif isinstance(value, (dict, list, tuple)):  # what JSON can hold
            left -= len(value)
            if left > 0:
                waiting.extend(value.values() if isinstance(value, dict) else value)
    return left <= 0
