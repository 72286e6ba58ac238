"""Builds byte-level BPE from tokens with ranks, as tiktoken has them: of tekken.json, or of tiktoken's own files."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from penstock.errors import CheckpointError, shown
from penstock.text.byte_alphabet import BYTE_OF
from penstock.text.vocabularies.form import MAX_TOKENS

MAX_BYTES = 32 * 2**20
"""Maximum bytes of a file of ranks; the largest in use have 20 MB."""
_MAX_TOKEN = 512
"""Maximum bytes of a token; the longest in use have 256."""
_MAX_MERGES = 2**20


def decode_token(text: str, file: Path) -> bytes:
    """The bytes of a token in base64.

    Raises:
        CheckpointError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{file} has a token that is not base64: {shown(text)}") from error


def bpe_of_ranks(ranks: Mapping[bytes, int], added: Mapping[str, int], offset: int, file: Path) -> Tokenizer:
    """A tokenizer that merges as tiktoken does: first the pair whose token has the lowest rank.

    Args:
        ranks: ranks by token.
        added: ids of the tokens that are not merged, such as special ones.
        offset: the difference between an id and its rank.

    Raises:
        CheckpointError: a byte has no token, ids are not unique, or limits are exceeded.
    """
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{file} is damaged: it has no tokens for {len(missing)} of the 256 bytes")
    longest = max(map(len, ranks))
    if longest > _MAX_TOKEN or len(ranks) + len(added) > MAX_TOKENS:
        raise CheckpointError(
            f"{file} has {len(ranks)} tokens of up to {longest} bytes and {len(added)} special ones; at most "
            f"{MAX_TOKENS} of {_MAX_TOKEN} bytes are read"
        )
    written = {token: _written(token) for token in ranks}
    vocabulary = {written[token]: rank + offset for token, rank in ranks.items()}
    for text, token in added.items():
        if vocabulary.setdefault(text, token) != token:
            raise CheckpointError(f"{file} is damaged: {shown(text)} is a token and a special token")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise CheckpointError(f"{file} is damaged: several tokens have the same id")
    merges = [(written[left], written[right]) for left, right in _merges(ranks, file)]
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} holds a vocabulary that cannot be used: {error}") from error
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(ranks: Mapping[bytes, int], file: Path) -> list[tuple[bytes, bytes]]:
    """Pairs that form a token, in the order of its rank; of one token, in the order of `transformers`."""
    found: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (first := ranks.get(left)) is not None and (second := ranks.get(right)) is not None:
                found.append((rank, first, second, left, right))
        if len(found) > _MAX_MERGES:
            raise CheckpointError(f"{file} has a vocabulary of more than {_MAX_MERGES} merges, the most that are read")
    found.sort()
    return [(left, right) for *_, left, right in found]


def _written(token: bytes) -> str:
    """The token as byte-level BPE writes it."""
    return token.decode("latin-1").translate(_ALPHABET)


_ALPHABET = {byte[0]: character for character, byte in BYTE_OF.items()}
