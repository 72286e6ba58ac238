"""The commands of a chat, such as `/reset`: each takes the session and a text, and returns what to show or to do."""

import base64
import difflib
import mimetypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.cli.chat.backend import Setting
from penstock.cli.chat.conversation import Conversation
from penstock.cli.chat.session import Question, Session
from penstock.cli.chat.settings import DEFAULT, EFFORT, EFFORTS, SETTINGS, changed
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

MAX_IMAGE_BYTES = 20 * 2**20
_COMMAND = re.compile(r"/(\S*?)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Result:
    """What follows a command."""

    text: str = ""
    """To show."""
    question: Question | None = None
    """To answer."""
    ends: bool = False
    """Whether the chat ends."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its line in `/help`."""

    run: Callable[[Session, str], Result]
    help: str
    argument: str = ""
    """The argument's name in `/help`; in brackets if it may be left out."""


def is_command(text: str) -> bool:
    """Whether a message is a command: a word after a slash. `/etc/hosts` and ` /help` are text."""
    word, _, _ = text.partition(" ")
    return re.fullmatch(r"/[\w?-]*", word.split("\n")[0]) is not None


def run_command(session: Session, text: str) -> Result:
    """
    Raises:
        PenstockError: there is no such command, or it cannot be done; the message says why.
    """
    found = _COMMAND.fullmatch(text.strip())
    assert found is not None, "the caller asks is_command"
    name, argument = ALIASES.get(found[1], found[1]), (found[2] or "").strip()
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean /{close[0]}?" if close else "/help lists the commands"
        raise InvalidRequestError(f"there is no command /{name}: {advice} (a space before it makes it a message)")
    command = COMMANDS[name]
    if argument and not command.argument:
        raise InvalidRequestError(f"/{name} takes no argument")
    if not argument and command.argument and not command.argument.startswith("["):
        raise InvalidRequestError(f"/{name} needs an argument: /{name} {command.argument}")
    return command.run(session, argument)


def completions(session: Session, text: str) -> tuple[int, list[str]]:
    """What may stand at the end of an unfinished command: characters to replace, and the words.

    Paths are not completed here.
    """
    name, space, rest = text.removeprefix("/").partition(" ")
    if not space:
        return len(text), [f"/{command}" for command in COMMANDS if command.startswith(name)]
    words: list[str] = []
    if name == "set":
        setting, space, rest_of_set = rest.partition(" ")
        words = [f"{setting} " for setting in SETTINGS]
        if space:
            rest, words = rest_of_set, [DEFAULT, *(EFFORTS if setting == EFFORT else ())]
    elif name == "model":
        words = session.backend.models()
    return len(rest), [word for word in words if word.startswith(rest)]


def _help(session: Session, argument: str) -> Result:
    names = {name: f"/{name} {command.argument}".rstrip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    lines = [f"{names[name]:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return Result("\n".join(lines))


def _reset(session: Session, argument: str) -> Result:
    session.conversation = session.conversation.without_messages()
    return Result("a new conversation")


def _system(session: Session, argument: str) -> Result:
    if not argument:
        return Result(session.conversation.system or "no system message")
    text = "" if argument == "none" else argument
    session.conversation = replace(session.conversation, system=text)
    return Result("the system message is removed" if not text else "the system message is changed; /reset begins anew")


def _regenerate(session: Session, argument: str) -> Result:
    conversation = session.conversation
    return Result(question=Question(conversation.last_question(), conversation.without_last_turn()))


def _image(session: Session, argument: str) -> Result:
    if not argument:
        return Result(f"images for the next message: {len(session.images)}")
    if argument == "none":
        session.images = ()
        return Result("no image goes with the next message")
    session.images += (_data_url(Path(argument).expanduser()),)
    return Result(f"{argument} goes with the next message; /image none removes it")


def _data_url(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise InvalidRequestError(f"{path} has {size} bytes; at most {MAX_IMAGE_BYTES} are sent")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None
    kind = mimetypes.guess_type(path.name, strict=False)[0] or ""
    if not kind.startswith("image/"):
        raise InvalidRequestError(f"{path} is no image, by the end of its name")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _undo(session: Session, argument: str) -> Result:
    question = session.conversation.last_question().content
    session.conversation = session.conversation.without_last_turn()
    return Result(f"removed the last question and its answer: {_shortened(question)}")


def _save(session: Session, argument: str) -> Result:
    path = Path(argument).expanduser()
    session.conversation.save(path, session.backend.model)
    return Result(f"saved {_messages(session.conversation)} in {path}")


def _load(session: Session, argument: str) -> Result:
    session.conversation = Conversation.load(Path(argument).expanduser())
    return Result(f"loaded {_messages(session.conversation)}")


def _set(session: Session, argument: str) -> Result:
    if not argument:
        return Result("\n".join(f"{name} {_setting(session, name)}" for name in SETTINGS))
    name, _, value = argument.partition(" ")
    name = name.removeprefix("--").replace("-", "_")  # a flag's name is accepted, too
    if not value.strip():
        raise InvalidRequestError(f"/set {name} needs a value; {DEFAULT} takes it back")
    session.settings = changed(session.settings, name, value.strip())
    return Result(f"{name} is {_setting(session, name)}")


def _setting(session: Session, name: str) -> Setting:
    return session.settings.get(name, session.backend.settings.get(name, DEFAULT))


def _model(session: Session, argument: str) -> Result:
    if not argument:
        served = session.backend.models()
        return Result("\n".join(f"{'*' if name == session.backend.model else ' '} {name}" for name in served))
    session.backend.select(argument)
    return Result(f"{session.backend.model} answers from now on")


def _reasoning(session: Session, argument: str) -> Result:
    return Result(session.conversation.last_reasoning() or "the last answer has no reasoning")


def _stats(session: Session, argument: str) -> Result:
    totals = session.totals
    lines = [f"model {session.backend.model}", f"conversation: {_messages(session.conversation)}"]
    lines.append(
        f"answers: {totals.num_answers}, with {totals.num_tokens} tokens in {totals.seconds:.1f} s; their prompts: "
        f"{totals.num_prompt_tokens} tokens"
    )
    if session.last is not None:
        lines.append(f"last answer: {session.last.summary()}")
    return Result("\n".join(lines))


def _exit(session: Session, argument: str) -> Result:
    return Result(ends=True)


COMMANDS = {
    "help": Command(_help, "list the commands"),
    "reset": Command(_reset, "start a new conversation; the system message stays"),
    "system": Command(_system, "show or change the system message; none removes it", "[TEXT]"),
    "image": Command(_image, "send an image with the next message; none removes it", "[PATH]"),
    "regenerate": Command(_regenerate, "answer the last question again"),
    "undo": Command(_undo, "remove the last question and its answer"),
    "save": Command(_save, "write the conversation as JSON", "FILE"),
    "load": Command(_load, "continue the conversation of a file", "FILE"),
    "set": Command(_set, "show or change sampling, as in /set temperature 0.5", "[NAME VALUE]"),
    "model": Command(_model, "list the models, or answer with another one", "[NAME]"),
    "reasoning": Command(_reasoning, "show the reasoning of the last answer"),
    "stats": Command(_stats, "show tokens and times of this chat"),
    "exit": Command(_exit, "end the chat, as does Ctrl-D"),
}
ALIASES = {"?": "help", "": "help", "bye": "exit", "clear": "reset", "quit": "exit"}


def _messages(conversation: Conversation) -> str:
    count = len(conversation.messages) + bool(conversation.system)
    return f"{count} message" + ("" if count == 1 else "s")


def _shortened(text: str) -> str:
    first, *more = text.split("\n")
    return first[:60] + (" ..." if more or len(first) > 60 else "")
