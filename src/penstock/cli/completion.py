"""`penstock completion`: prints the shell script that completes commands and flags with the Tab key."""

import argparse
import os

from penstock.cli.parser import Parser


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion of commands and flags for a shell",
        description='Print the code that completes commands and flags. bash and zsh: add eval "$(penstock completion '
        'bash)", or zsh, to ~/.bashrc or ~/.zshrc. fish: penstock completion fish > '
        "~/.config/fish/completions/penstock.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["penstock"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request, and exit."""
    import argcomplete

    argcomplete.autocomplete(parser, exit_method=os._exit)
