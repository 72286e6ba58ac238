"""A process that finds out whether a form can be had: one frame of JSON in, one of text out.

The library has no limit on the time that compiling takes, and no way to interrupt it. Here the kernel is the limit: a
grammar that takes too much processor time or memory takes this process with it, and nothing else.
"""

import random
import signal
import time
from array import array

import msgspec
import numpy as np

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.grammar import compile_grammar, refusal
from penstock.structured.matcher import Matcher
from penstock.structured.vocabulary import Vocabulary
from penstock.system.worker_process import Channel, limit_memory, limited_cpu_time

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
    """Run as `python -m penstock.structured.worker`: the first frame gives the model's folder and the vocabulary size.

    Then each frame is a `Structured`, answered with why it is refused, or with nothing.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # what stops all of a service's processes; it ends with its parent
        signal.signal(ignored, signal.SIG_IGN)
    limit_memory(MEMORY_BYTES)
    channel = Channel()
    try:
        folder, size = msgspec.json.decode(channel.receive(), type=tuple[str, int])
        vocabulary = Vocabulary.of_checkpoint(folder, size)
        channel.send(b"")
        while True:
            channel.send(_answer(vocabulary, channel.receive()).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        return


def _answer(vocabulary: Vocabulary, frame: bytes) -> str:
    structured = msgspec.json.decode(frame, type=Structured)
    with limited_cpu_time(CPU_SECONDS):
        try:
            inspect(vocabulary, structured)
        except InvalidRequestError as refused:
            return str(refused)
    return ""


if __name__ == "__main__":
    main()
