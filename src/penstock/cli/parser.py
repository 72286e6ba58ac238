"""An argument parser with one-line errors that suggest the intended flag.

For a flag of vLLM, llama.cpp, SGLang or TGI the error names the equivalent one.
"""

import argparse
import difflib
import sys
from typing import Any, NoReturn

from penstock.config.engine_config import FOREIGN_OPTIONS

FOREIGN_FLAGS = {"--" + name.replace("_", "-"): "--" + ours.replace("_", "-") for name, ours in FOREIGN_OPTIONS.items()}
FOREIGN_FLAGS |= {
    "--language-model-only": "--no-media",
    "-m": "--model",
    "-p": "a prompt as an argument",
    "-n": "--max-tokens",
    "-c": "--max-model-len",
    "-t": "--threads",
    "-ngl": "--device",
    "-np": "--max-num-seqs",
    "-tp": "--tensor-parallel-size",
    "--alias": "--served-model-name",
    "--models-max": "--max-loaded-models",
    "--sleep-idle-seconds": "--keep-alive",
    "--n-predict": "--max-tokens",
    "--override-generation-config": "--default-sampling",
    "--predict": "--max-tokens",
    "--prompt": "a prompt as an argument",
    "--system-prompt": "--system",
}
"""Flags of other programs, and their names here."""


class _Help(argparse.Action):
    """`--help`, and `--help all` or `--help-all`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        is_full = values == "all" or option_string == "--help-all"
        text = parser.format_full_help() if is_full else parser.format_help()
        parser._print_message(text, sys.stdout)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """The parser of a command, or of the whole program.

    `--help` lists the common flags, `--help all` those of every topic as well.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", nargs="?", metavar="all", action=_Help, help="show this help, and exit")
        self.add_argument("--help-all", nargs=0, action=_Help, help=argparse.SUPPRESS)
        self._topics: list[argparse._ArgumentGroup] = []
        self._common: argparse._ArgumentGroup | None = None

    @property
    def common(self) -> "argparse._ArgumentGroup":
        """The group of common options; the help lists it in the order of first access."""
        if self._common is None:
            self._common = self.add_argument_group("common options")
        return self._common

    def add_topic(self, title: str) -> "argparse._ArgumentGroup":
        """A group of flags that only `--help all` shows."""
        self._topics.append(self.add_argument_group(title))
        return self._topics[-1]

    def format_help(self) -> str:
        """The help of the common flags."""
        hidden = [action for topic in self._topics for action in topic._group_actions]
        if not hidden:
            return self.format_full_help()
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            shown = self.format_full_help()
        finally:
            for action, text in zip(hidden, texts, strict=True):
                action.help = text
        return f"{shown}\n{self.prog} --help all shows {len(hidden)} more options, by topic.\n"

    def format_full_help(self) -> str:
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like the base class, but refuse unknown arguments here, so that the error is the command's own."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain(unknown[0]))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _explain(self, argument: str) -> str:
        flag, known = argument.partition("=")[0], self._option_string_actions
        if not flag.startswith("-"):
            return f"unexpected argument {argument!r}"
        ours = FOREIGN_FLAGS.get(flag)
        if ours is not None and (not ours.startswith("-") or ours in known):
            return f"there is no flag {flag}; here it is {ours}"
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        return f"there is no flag {flag}" + (f"; did you mean {close[0]}?" if close else "")
