"""tokenizer.model, against SentencePiece's algorithm written out."""

import json
import struct

import pytest

from penstock.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import CORPUS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["he", "lo", "▁w", "or", "▁T", "▁▁", "hel", "hello", "▁hello", "el", "llo", "▁wor", "▁world", "ld", "qu", "ick"]
LETTERS = sorted({letter for text in CORPUS[:2] for letter in text if letter not in " \n\t"})
PIECES = [
    *(("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<ud>", 0.0, USER_DEFINED)),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((word, -float(place), NORMAL) for place, word in enumerate(WORDS)),
    *((letter, -100.0 - place, NORMAL) for place, letter in enumerate(["▁", *LETTERS])),
]
TEXTS = [*CORPUS[:3], "", " ", " a  hello", "hello hello world\n\nelllo", "<0x41>", "▁hello", "😀\u200d"]


def varint(value):
    parts = []
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number, value):
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def model_file(pieces=PIECES, *, prefix=True, byte_fallback=True, trainer=b"", normalizer=b""):
    written = [field(1, field(1, text) + field(2, score) + field(3, kind)) for text, score, kind in pieces]
    of_trainer = field(3, 2) + field(35, int(byte_fallback)) + field(43, 2**64 - 1) + trainer
    of_normalizer = field(1, "identity") + field(3, int(prefix)) + field(4, 0) + normalizer
    return b"".join([*written, field(2, of_trainer), field(3, of_normalizer)])


def write_model(folder, content, config=None):
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def expected(text, *, prefix=True, pieces=PIECES):
    """SentencePiece's BPE: merge the leftmost pair of the highest score; bytes for unknown characters."""
    ids = {text: place for place, (text, _, _) in enumerate(pieces)}
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    parts = list((" " + text if prefix and text else text).replace(" ", "▁"))
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in scores]  # noqa: B905, RUF007
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [
        token
        for part in parts
        for token in ([ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_model_encodes_as_sentencepiece(tmp_path, prefix):
    ours = Tokenizer.from_path(write_model(tmp_path, model_file(prefix=prefix)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [1, *expected(text, prefix=prefix)], text
        assert ours.decode(ids) == text.replace("▁", " ")
    assert (ours.vocab_size, ours.eos_token_id) == (len(PIECES), 2)
    assert ours.encode("<ud></s>", add_special_tokens=False) == [3, 2]
    assert ours.decode([3, 2]) == "<ud>"


def test_only_the_beginning_of_a_text_gets_a_space_unless_the_tokenizer_is_legacy(tmp_path):
    world = expected("world", prefix=False)
    for config, rest in (({}, expected("world")), ({"legacy": False}, world)):
        ours = Tokenizer.from_path(write_model(tmp_path, model_file(), config))
        assert ours.encode("hello<ud>world") == [1, *expected("hello"), 3, *rest]
    ours = Tokenizer.from_path(write_model(tmp_path, model_file(), {"add_prefix_space": False, "add_bos_token": False}))
    assert ours.encode("hello") == expected("hello", prefix=False)


def test_added_tokens_of_the_config_have_their_ids(tmp_path):
    size = len(PIECES)
    config = {"added_tokens_decoder": {str(size): {"content": "<|x|>", "special": True}}, "eos_token": "<|x|>"}
    ours = Tokenizer.from_path(write_model(tmp_path, model_file(), config))
    assert ours.eos_token_id == size
    assert ours.encode("<|x|>", add_special_tokens=False) == [size]


def test_unknown_characters_are_unknown_without_byte_fallback(tmp_path):
    ours = Tokenizer.from_path(write_model(tmp_path, model_file(byte_fallback=False)))
    assert ours.encode("hello你好") == [1, *expected("hello"), 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\n", "cannot be read as a SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\x0f", "goes past the end"),
        (b"\x0b", "unknown wire type 3"),
        (b"\xff" * 40, "more than 10 bytes"),
        (field(1, 5), "bytes are stored as a number"),
        (field(1, field(1, b"\xff")), "cannot be read as a SentencePiece model"),
        (field(2, field(3, "x")), "a number is stored as bytes"),
        (model_file([*PIECES, ("he", 0.0, NORMAL)]), "several of its"),
        (model_file([*PIECES, ("hem", float("nan"), NORMAL)]), "a score is NaN"),
        (model_file([*PIECES, ("h" * 300, 0.0, NORMAL)]), "beyond the limits"),
        (model_file(trainer=field(3, 1)), "its model type is unigram, not BPE"),
        (model_file(normalizer=field(1, "nmt_nfkc") + field(2, b"abcd")), "normalizes texts .by .nmt_nfkc"),
        (model_file(normalizer=field(4, 1)), "remove_extra_whitespaces"),
        (b"", "cannot be converted"),
    ],
)
def test_damaged_and_unsupported_models_are_refused_by_their_fault(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(write_model(tmp_path, content))
