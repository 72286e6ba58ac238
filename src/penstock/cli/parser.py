"""An argument parser whose errors take a line, and name the flag that was meant.

A flag of vLLM, llama.cpp, SGLang or TGI is answered with ours.
"""

import argparse
import difflib
from typing import Any, NoReturn

from penstock.config import FOREIGN_OPTIONS

FOREIGN_FLAGS = {"--" + name.replace("_", "-"): "--" + ours.replace("_", "-") for name, ours in FOREIGN_OPTIONS.items()}
FOREIGN_FLAGS |= {
    "-m": "--model",
    "-p": "a prompt as an argument",
    "-n": "--max-tokens",
    "-c": "--max-model-len",
    "-t": "--threads",
    "-ngl": "--device",
    "-np": "--max-num-seqs",
    "-tp": "--tensor-parallel-size",
    "--alias": "--served-model-name",
    "--n-predict": "--max-tokens",
    "--override-generation-config": "--default-sampling",
    "--predict": "--max-tokens",
    "--prompt": "a prompt as an argument",
    "--system-prompt": "--system",
}
"""Flags of other programs, and what they are here."""


class Parser(argparse.ArgumentParser):
    """A command's parser; also that of the whole program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, but a command refuses what it does not know itself, so that the error is its own."""
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
