"""A process that finds out whether a form can be had: one line of JSON in, one out.

The library has no limit on the time that compiling takes, and no way to interrupt it. Here the kernel is the limit: a
grammar that takes too much processor time or memory takes this process with it, and nothing else.
"""

import os
import queue
import random
import resource
import signal
import sys
import threading
import time
from array import array

import msgspec
import numpy as np

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.grammar import compile_grammar, refusal
from penstock.structured.matcher import Matcher
from penstock.structured.vocabulary import Vocabulary
from penstock.system.host import die_with_parent

CPU_SECONDS = 2
"""Processor time for a grammar."""
MEMORY_BYTES = 4 * 2**30
WALK = 48
"""Tokens of a random answer to try, and the maximum processor time of one mask."""
MASK_SECONDS = 0.05


def inspect(vocabulary: Vocabulary, structured: Structured) -> None:
    """Compile a form, and follow a random answer for some tokens.

    Raises:
        InvalidRequestError: it cannot be compiled, or masks would take too long.
    """
    matcher = Matcher(compile_grammar(vocabulary, structured))
    dice = random.Random(0)
    answer = array("i")
    row = np.zeros((vocabulary.size + 32) // 32, dtype=np.uint32)
    while len(answer) < WALK:
        began = time.thread_time()
        matcher.follow(answer)
        may_end = matcher.allowed(row, vocabulary.size)
        seconds = time.thread_time() - began
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]
        if not len(allowed) and not may_end and not answer:
            raise refusal(structured, "no answer could satisfy it")
        if matcher.error or seconds > MASK_SECONDS:
            raise refusal(structured, f"too complex to be followed token by token. {matcher.error}")
        if not len(allowed):
            return
        answer.append(int(dice.choice(allowed)))


def main() -> None:
    """Run as `python -m penstock.structured.worker FOLDER SIZE`: folder of the tokenizer, size of the vocabulary."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; it ends with its standard input
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    vocabulary = Vocabulary.of_checkpoint(sys.argv[1], int(sys.argv[2]))
    _say("")
    while True:
        structured = msgspec.json.decode(lines.get(), type=Structured)
        _limit_cpu()
        try:
            inspect(vocabulary, structured)
            error = ""
        except InvalidRequestError as refused:
            error = str(refused)
        _limit_cpu()  # or what this form left of its seconds would end the worker as it takes the next one
        _say(error)


def _limit_cpu() -> None:
    """Allow `CPU_SECONDS` from now on."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_SECONDS, most))


def _read(lines: "queue.Queue[bytes]") -> None:
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):  # a parent that dies may leave half a line
        lines.put(line)
    os._exit(0)  # even while compiling: no one reads the result


def _say(error: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(error) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
