"""Flags shared by several commands, and their conversion to options and sampling parameters."""

import argparse
import functools
import os
import sys
import typing
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import Field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.sampling_params import SamplingParams, Structured
from penstock.checkpoint.checkpoint import Checkpoint, open_model
from penstock.cli.loading import loading_shown
from penstock.cli.parser import Parser
from penstock.cli.sources import CONFIG_VARIABLE, Given, gather
from penstock.config.engine_config import EngineConfig, iter_options
from penstock.errors import ConfigError, InvalidRequestError
from penstock.server.config import iter_server_options
from penstock.system.host import importing
from penstock.text.chat_template import start_rendering

if TYPE_CHECKING:
    from penstock.llm import LLM

SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (
        float,
        "0 is greedy; default: the checkpoint's; if it sets no sampling, 0.8 with top-p 0.95, top-k 40, min-p 0.05",
    ),
    "top_k": (int, "keep only the k most likely tokens; 0 keeps all"),
    "top_p": (float, "keep the most likely tokens whose probabilities add up to this"),
    "min_p": (float, "drop tokens less likely than this times the most likely"),
    "typical_p": (float, "keep the most typical tokens whose probabilities add up to this"),
    "repetition_penalty": (float, "above 1: tokens of prompt and answer become less likely"),
    "frequency_penalty": (float, "above 0: a token becomes less likely each time it occurs in the answer"),
    "presence_penalty": (float, "above 0: tokens that occur in the answer become less likely"),
    "max_tokens": (int, "maximum tokens of an answer; default: the checkpoint's, or as many as the context holds"),
    "n": (int, "answers per prompt"),
    "best_of": (int, "sample this many answers, and print the n with the highest mean log-probability"),
    "num_beams": (int, "beam search with this many beams, without sampling"),
    "length_penalty": (float, "beam search: scores are divided by length ** this; default: 1"),
    "logprobs": (int, "with --json: log-probabilities of each token and of this many most likely ones"),
}


FALLBACK_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
"""Sampling in the terminal for checkpoints without defaults; similar to llama.cpp's."""


COMMON_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n")
"""Sampling flags that `--help` shows."""
SEVERAL = ("n", "best_of", "num_beams", "length_penalty", "logprobs")
"""Sampling flags that produce several answers, or data besides the text."""


def add_sampling_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add a flag for each sampling parameter except those named."""
    group, more = parser.add_argument_group("sampling"), parser.add_topic("more about sampling")
    names = [*COMMON_SAMPLING, *(name for name in SAMPLING_FLAGS if name not in COMMON_SAMPLING)]
    for name in names:
        kind, text = SAMPLING_FLAGS[name]
        if name not in without:
            to = group if name in COMMON_SAMPLING else more
            to.add_argument(_flag(name), type=kind, default=None, help=text, metavar="N" if kind is int else "X")
    stop = "text before which the answer ends; may be given several times"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    words = "word that the answer must not contain; may be given several times"
    more.add_argument("--bad-word", action="append", default=[], metavar="WORD", dest="bad_words", help=words)
    form = "answer with JSON that validates against the JSON schema in this file"
    group.add_argument("--json-schema", type=Path, metavar="FILE", dest="structured", help=form)


def add_positional_model(parser: Parser) -> None:
    """Accept the model as an argument, too; `take_positional_model` follows."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def take_positional_model(args: argparse.Namespace) -> None:
    """Make the positional model that of `--model`.

    Raises:
        ConfigError: another one is given by `--model`.
    """
    if args.positional_model is None:
        return
    if getattr(args, "model", args.positional_model) != args.positional_model:
        raise ConfigError(f"two models are named, {args.positional_model} and --model {args.model}: leave one out")
    args.model = args.positional_model


def add_config_flag(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument("--config", metavar="FILE", help=f"TOML file of options; default: ${CONFIG_VARIABLE}")


def add_flags(group: "argparse._ActionsContainer", options: "Iterable[Field[Any]]") -> None:
    """Add a flag for each option. A flag that is not given stays absent, so that defaults are stated only once."""
    for f in options:
        shared: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(f).replace("%", "%%")}
        if isinstance(f.default, bool):
            group.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, **shared)
        else:
            choices = f.metadata["choices"]
            metavar = "{" + ",".join(choices) + "}" if choices else _metavar(f)
            action = _Joined if f.metadata["repeated"] else "store"
            added: Any = group.add_argument(_flag(f.name), metavar=metavar, action=action, **shared)
            if choices:
                added.completer = functools.partial(_choices, choices)  # argcomplete asks it


def _choices(choices: Sequence[str], **_: object) -> Sequence[str]:
    return choices


def _metavar(f: "Field[Any]") -> str:
    kinds = [f.type] if isinstance(f.type, type) else list(typing.get_args(f.type))
    if str in kinds:
        return f.name.rpartition("_")[2].upper()
    return "N" if int in kinds else "X"


def _help(f: "Field[Any]") -> str:
    """The option's help, with its default unless the help already names it."""
    text: str = f.metadata["help"]
    if f.default is None or f.default is False or "default:" in text:
        return text
    default = "on" if f.default is True else f"{f.default:g}" if isinstance(f.default, float) else f.default
    return f"{text}; default: {default}"


class _Joined(argparse.Action):
    """Action that joins the values of a repeated flag by commas if one is NAME=VALUE; of others the last counts."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        joins = before is not None and ("=" in before or "=" in values)
        setattr(namespace, self.dest, f"{before},{values}" if joins else values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options from flags, environment and file, without those of the server.

    Raises:
        ConfigError: see `gather`.
    """
    given = given_options(args)
    return {f.name: given[f.name].value for _, f in iter_options() if f.name in given}


def given_options(args: argparse.Namespace) -> dict[str, Given]:
    """The given options of engine and server; also stored as `args.given`, for later error messages.

    Raises:
        ConfigError: see `gather`.
    """
    options = [*(f for _, f in iter_server_options()), *(f for _, f in iter_options())]
    flags = {f.name: getattr(args, f.name) for f in options if hasattr(args, f.name)}
    args.given = gather(options, flags, os.environ, args.config or os.environ.get(CONFIG_VARIABLE))
    given: dict[str, Given] = args.given
    return given


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {name: value for name in SAMPLING_FLAGS if (value := getattr(args, name, None)) is not None}
    form = None if args.structured is None else Structured.json_schema(_read_schema(args.structured))
    return SamplingParams(stop=args.stop, bad_words=args.bad_words, structured=form, **given)


def fill_sampling(params: SamplingParams, llm: "LLM") -> SamplingParams:
    """Add `FALLBACK_SAMPLING` for controls that neither flags nor checkpoint set, and report it on standard error.

    Without truncation, sampling from the long tail of unlikely tokens makes a good model look broken.
    """
    if llm.has_default_sampling or params.temperature == 0 or params.num_beams > 1:
        return params
    filled = {name: value for name, value in FALLBACK_SAMPLING.items() if getattr(params, name) is None}
    if filled:
        listed = ", ".join(f"{_flag(name)} {value:g}" for name, value in filled.items())
        print(f"the checkpoint sets no sampling defaults; using {listed}", file=sys.stderr)
    return replace(params, **filled)


def _read_schema(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the schema cannot be read: {error}") from None


def only_adapter(args: argparse.Namespace) -> str | None:
    """The adapter given to the command, or None.

    Raises:
        ConfigError: several adapters were given.
    """
    names = list(EngineConfig.from_options(**engine_options(args)).adapters.paths)
    if len(names) > 1:
        raise ConfigError("this command uses one adapter: give --adapter once")
    return names[0] if names else None


def open_llm(args: argparse.Namespace, *, chats: bool, renders: bool = True) -> "LLM":
    """Load the model that the flags name.

    Args:
        chats: whether the command requires a chat template.
        renders: whether it uses one, so that the process that renders starts while the model loads.

    Raises:
        ConfigError, CheckpointError: the model cannot generate text, or chat; checked before its weights are read.
    """
    rendering = start_rendering() if renders else None
    with ExitStack() as unused:
        if rendering is not None:
            unused.callback(rendering.close)
        checkpoint = check_model(args, chats=chats)
        with importing():
            from penstock.llm import LLM

        options = engine_options(args)
        with loading_shown(checkpoint):
            llm = LLM(**options)
        if rendering is not None and llm.tokenizer is not None:
            llm.tokenizer.render_with(rendering)
            unused.pop_all()
    print(llm.memory_plan, file=sys.stderr)
    return llm


def check_model(args: argparse.Namespace, *, chats: bool) -> Checkpoint:
    """Open the checkpoint that the flags name, without reading its weights.

    Raises:
        ConfigError, CheckpointError: the model cannot generate text, or chat.
    """
    with importing():
        from penstock.cli.text_models import check_chats, check_takes_text

    model = EngineConfig.from_options(**engine_options(args)).model
    checkpoint = open_model(model)
    check_takes_text(checkpoint)
    if chats:
        check_chats(checkpoint, model.chat_template)
    return checkpoint
