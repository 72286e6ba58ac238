"""Reads a model of SentencePiece, a protobuf, within bounds and without its library."""

import struct
from collections.abc import Iterator
from pathlib import Path

from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.text.vocabularies.form import MAX_TOKENS

_MAX_BYTES = 32 * 2**20
"""Maximum bytes of a model; the largest in use have 5 MB."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FLOAT = struct.Struct("<f")
UNIGRAM, BPE = 1, 2
"""Values of `model_type`."""


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The parts of a SentencePiece model that tokenization depends on."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    """Types of pieces, with the values of `penstock.checkpoint.gguf.vocabulary`."""
    model_type: int
    byte_fallback: bool
    special: dict[str, str]
    """Pieces of bos_token, eos_token, unk_token and pad_token."""
    normalization: str
    """Name of the normalization rules, such as identity or nmt_nfkc."""
    charsmap: bytes
    """The normalization rules, compiled; empty: none."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read the file of a model.

    Raises:
        CheckpointError: the file is too large or damaged.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes; at most {_MAX_BYTES} are read")
    try:
        return _model(file.read_bytes())
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read as a SentencePiece model: {error}") from error


def _model(content: bytes) -> SentencePieceModel:
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            texts.append(_bytes(piece.get(1, b"")).decode())
            scores.append(_FLOAT.unpack(_bytes(piece.get(2, b"\0\0\0\0")))[0])
            kinds.append(_number(piece.get(3, 1)))
            if len(texts) > MAX_TOKENS:
                raise ValueError(f"it has more than {MAX_TOKENS} pieces")
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    return SentencePieceModel(
        texts=texts,
        scores=scores,
        kinds=kinds,
        model_type=_number(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(_number(trainer.get(35, 0))),
        special=_special(trainer, texts),
        normalization=_bytes(normalizer.get(1, b"")).decode(),
        charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(_number(normalizer.get(3, 1))),
        remove_extra_whitespaces=bool(_number(normalizer.get(4, 1))),
        escape_whitespaces=bool(_number(normalizer.get(5, 1))),
        whitespace_as_suffix=bool(_number(trainer.get(24, 0))),
    )


def _special(trainer: dict[int, int | bytes], texts: list[str]) -> dict[str, str]:
    fields = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, 2**64 - 1)}
    ids = {name: _number(trainer.get(number, default)) for name, (number, default) in fields.items()}
    return {name: texts[token] for name, token in ids.items() if token < len(texts)}  # -1, none, is 2**64 - 1


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a message: varints as numbers, all else as bytes."""
    at, end = 0, len(content)
    while at < end:
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if kind == _FOUR_BYTES else 8
        else:
            raise ValueError(f"unknown wire type {kind} at byte {at}")
        if size > end - at:
            raise ValueError(f"a field of {size} bytes at byte {at} goes past the end")
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    byte = content[at]
    if byte < 128:
        return byte, at + 1
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number before byte {at} has more than 10 bytes")


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number is stored as bytes")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes are stored as a number")
    return value
