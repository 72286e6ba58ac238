"""`penstock transcribe`: the text, or subtitles, of sounds."""

import argparse
import sys

from penstock.cli.flags import open_llm
from penstock.cli.parser import Parser
from penstock.cli.topics import add_options
from penstock.config.engine_config import iter_options


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "transcribe",
        help="write down what is said in sounds",
        usage="%(prog)s --model MODEL [options] FILE [FILE ...]",
        description="Transcribe sounds with a Whisper model.",
    )
    parser.add_argument(
        "file", nargs="+", metavar="FILE", help="WAV; with the extra audio also FLAC, MP3, Ogg, M4A, WebM"
    )
    parser.add_argument("--language", metavar="CODE", help="the language, such as de; default: the model tells")
    parser.add_argument("--translate", action="store_true", help="translate into English")
    parser.add_argument("--format", choices=("text", "srt", "vtt"), default="text", help="default: text")
    add_options(parser, iter_options())
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.server.openai.transcripts import render  # here: other commands need neither

    task, has_times = "translate" if args.translate else "transcribe", args.format != "text"
    with open_llm(args, chats=False, renders=False) as llm:
        for file in args.file:
            transcript = llm.transcribe(file, language=args.language, translate=args.translate, timestamps=has_times)
            made = render(transcript, args.format, task=task, temperature=0.0, with_segments=has_times)
            sys.stdout.write(made.decode())
            sys.stdout.flush()
    return 0
