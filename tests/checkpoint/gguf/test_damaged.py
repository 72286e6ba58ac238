"""Damaged GGUF files as a server meets them: a model and a tokenizer, or an error that says what is wrong."""

import functools
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf.header import read_header
from penstock.errors import PenstockError
from penstock.models.registry import read_facts
from penstock.text.tokenizer import Tokenizer
from tests.checkpoint.gguf.test_tokenizer import sentencepiece
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf


@functools.cache
def contents(folder: Path) -> tuple[bytes, bytes]:
    """A small model with a byte-level vocabulary, and a SentencePiece vocabulary without a model."""
    write_gguf(folder / "model.gguf", write_tiny_llama(folder / "hf"), "Q8_0")
    sentencepiece(folder / "pieces.gguf")
    return (folder / "model.gguf").read_bytes(), (folder / "pieces.gguf").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def damaged(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """With a few bytes of the header replaced, most of them near one another, or a piece cut out or doubled."""
    changed = bytearray(content)
    place = rng.randrange(4, header_bytes)
    kind = rng.randrange(6)
    if kind == 0:
        del changed[place : place + rng.choice([1, 4, 8, 100])]
    elif kind == 1:
        changed[place:place] = changed[place : place + rng.choice([1, 4, 8, 100])]
    else:
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[place] = rng.choice([0, 1, 2, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            place = min(header_bytes - 1, place + rng.choice([1, 1, 4, 8, rng.randrange(header_bytes)]))
    return bytes(changed)


def refusal(read: Callable[[], object]) -> str | None:
    """What is said against it."""
    try:
        read()
    except PenstockError as error:
        return str(error)
    return None


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_read_or_refused_in_little_memory(folder: Path, rng: random.Random) -> None:
    name = rng.choice(["model", "pieces"])
    content = contents(folder)[name == "pieces"]
    header = read_header(folder / f"{name}.gguf")
    first = min((info.first for info in header.tensors.values()), default=len(content))
    file = folder / "damaged.gguf"
    file.write_bytes(damaged(content, first, rng))
    tracemalloc.start()
    said = [refusal(lambda: read_facts(open_checkpoint(str(file)))), refusal(lambda: Tokenizer.load(file))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(0 < len(words) < 1500 for words in said if words is not None)
    assert peak < 16 * 2**20
