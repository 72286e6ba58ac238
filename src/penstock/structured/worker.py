"""Worker process that validates grammars: one JSON frame in, one text frame out.

llguidance cannot bound or interrupt compilation. The kernel's limits on this process do: a grammar that exceeds its
processor time or memory kills this process, and nothing else.
"""

import random
import signal
import time
from array import array

import msgspec
import numpy as np

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.form_limits import refusal
from penstock.structured.grammar import compile_grammar
from penstock.structured.matcher import Matcher
from penstock.structured.vocabulary import Vocabulary
from penstock.system.worker_channel import Channel, limit_memory, limited_cpu_time

CPU_SECONDS = 2
"""Processor time per grammar."""
MEMORY_BYTES = 4 * 2**30
WALK = 48
"""Length in tokens of the random answer."""
MASK_SECONDS = 0.05
"""Maximum processor time of one mask."""


def validate(vocabulary: Vocabulary, structured: Structured) -> None:
    """Compiles a grammar and computes the masks of a random answer of up to `WALK` tokens.

    Raises:
        InvalidRequestError: it does not compile, no answer satisfies it, or a mask takes longer than `MASK_SECONDS`.
    """
    matcher = Matcher(compile_grammar(vocabulary, structured))
    rng = random.Random(0)
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
        answer.append(int(rng.choice(allowed)))


def main() -> None:
    """Runs as `python -m penstock.structured.worker`. The first frame gives the model's folder and the vocabulary size.

    Each later frame is a `Structured`; its answer is the reason for the refusal, empty if the grammar is valid.
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
            validate(vocabulary, structured)
        except InvalidRequestError as refused:
            return str(refused)
    return ""


if __name__ == "__main__":
    main()
