"""tokenizer.model, against SentencePiece's algorithm written out."""

import base64
import json
import struct
import zlib
from contextlib import nullcontext

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


CHARSMAP = zlib.decompress(
    base64.b85decode(
        "c-ke?WssIt7zW_8JNpMDl@tU6BqbLl6i|sFrBOg&iN&Q;DPfURQX1(FMOtd5l$P#LdVm3GQ0eQ_cjlV=$8*n__slsb#DoxD4<T8~"
        "5cv|LNsNgOiLZt5V~7s@OPU#|CB7t+6RD;kHK|BT8eZXL(vyyiWFRw{$ik~wI%Fj~*?8msUkGpUCOOGLF5V^&xyeUf-XT8)DL`Qg"
        "QIsMSBbIk5jxB@|l%^E#^B!d>!v~b(BR-@8<*7tPDn~kbqC!<!h3Zt}V`@-~n$)2-^{7h&>hmd|(1?b7Mq`@NggBbfg66cMC9R1k"
        "fzN468`{&3j&z_io#;vzy3>s>`GTJGpf|nviazwCFa0A2&j7w=5Ca*)V7_4}!}yjF3}+N0`Hs<yWenpP$3!MDnMq9Hd!{j!8BAvu"
        "GnvC|<}sHA%x4h``GLhO36Z-Q!cu->Im=kd3Rbg<HT=vv*0O>1{6Z3&*vJ+(^DA4~#&7IkJG<D)9(J>r-`UST4sw9Q9O5WPIL<Ln"
        "a)Q&G;t$SnmOnYqIWBU6%Ut3Lw_>BhHF=fmkxo)n_)Ff1%(%%NZgY>jJm5Zm^N@e}hsQkPDNlILv;W>+T!>EyF92K(h7S"
    )
)
"""SentencePiece's own, of five rules: A to a, the ligature fi to two letters, a tab and a wide space to a space."""
LONGEST = max(len(word) for word in WORDS)


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
        (model_file(trainer=field(3, 3)), "its model type is word, not BPE or unigram"),
        (model_file(normalizer=field(1, "nmt_nfkc") + field(2, b"abcd")), "normalizes texts .by .nmt_nfkc"),
        (model_file(normalizer=field(4, 1)), "remove_extra_whitespaces"),
        (b"", "cannot be converted"),
    ],
)
def test_damaged_and_unsupported_models_are_refused_by_their_fault(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(write_model(tmp_path, content))


# ── unigram models ───────────────────────────────────────────────────────────────────────────────────────────────────

UNIGRAM = field(3, 1)
SCORED = [
    (text, -(2.0 + 0.37 * place) if kind == NORMAL else score, kind) for place, (text, score, kind) in enumerate(PIECES)
]
NO_BYTES = [one for one in SCORED if one[2] != BYTE]
FAIRSEQ = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), *SCORED[3 + 1 + 256 :]]
FIVE_RULES = field(1, "user_defined") + field(2, CHARSMAP) + field(4, 1)


def unigram_file(pieces=NO_BYTES, *, normalizer=FIVE_RULES, byte_fallback=False):
    return model_file(pieces, byte_fallback=byte_fallback, trainer=UNIGRAM, normalizer=normalizer)


LEAF, HAS_LEAF = 1 << 31, 1 << 8


def trie(units, texts):
    """Normalization rules with a trie of 256 units: these, and others of zero."""
    return struct.pack("<257I", 1024, *(units.get(place, 0) for place in range(256))) + texts


def best_path(text, pieces):
    """SentencePiece's unigram model: the pieces of the highest sum of scores; a run of unknown characters is one."""
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    scores |= {text: len(text) * max(scores.values()) - 0.1 for text, _, kind in pieces if kind == USER_DEFINED}
    unknown = min(score for _, score, kind in pieces if kind == NORMAL) - 10
    best = [(0.0, [])]
    for end in range(1, len(text) + 1):
        found = [
            (best[first][0] + scores[text[first:end]], [*best[first][1], text[first:end]])
            for first in range(max(0, end - LONGEST), end)
            if text[first:end] in scores
        ]
        if text[end - 1] not in scores:
            found.append((best[end - 1][0] + unknown, [*best[end - 1][1], None]))
        best.append(max(found, key=lambda path: path[0]))
    parts = best[-1][1]
    return [part for place, part in enumerate(parts) if part is not None or place == 0 or parts[place - 1] is not None]


def normalized(text):
    """By the five rules, without extra spaces, with a space before it."""
    for old, new in (("A", "a"), ("\ufb01", "fi"), ("\t", " "), ("\u3000", " ")):
        text = text.replace(old, new)
    words = [word for word in text.split(" ") if word]
    return "".join("\u2581" + word for word in words)


@pytest.mark.parametrize("name", ["tokenizer.model", "sentencepiece.bpe.model", "spiece.model"])
def test_a_unigram_model_gives_the_pieces_of_the_highest_score(tmp_path, name):
    write_model(tmp_path, unigram_file())
    (tmp_path / "tokenizer.model").rename(tmp_path / name)
    ours = Tokenizer.from_path(tmp_path)
    ids = {text: place for place, (text, _, _) in enumerate(NO_BYTES)} | {None: 0}
    for text in [*TEXTS, "hello<ud>world", "A\ufb01\u3000 hello \t", "\n hello", "你好 hello"]:
        wanted = [ids[part] for part in best_path(normalized(text), NO_BYTES)]
        assert ours.encode(text, add_special_tokens=False) == wanted, text
    assert ours.decode(ours.encode("hello  world", add_special_tokens=False)) == "hello world"


def test_a_unigram_model_spells_unknown_characters_in_bytes(tmp_path):
    ours = Tokenizer.from_path(write_model(tmp_path, unigram_file(SCORED, normalizer=b"", byte_fallback=True)))
    for text in ("hello  你好", "<0x41>", "😀"):
        assert ours.decode(ours.encode(text)) == text
    assert ours.backend.encode("<0x41>", add_special_tokens=False).ids.count(4 + 0x41) == 0


@pytest.mark.parametrize(
    ("kind", "first", "special"),
    [
        ("XLMRobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>"], 3),
        ("CamembertTokenizer", ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"], 1),
    ],
)
def test_fairseqs_tokenizers_have_ids_of_their_own(tmp_path, kind, first, special):
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    ours = Tokenizer.from_path(write_model(tmp_path, unigram_file(FAIRSEQ), config))
    texts = [*first, *(text for text, _, _ in FAIRSEQ[special:]), "<mask>"]
    assert [ours.backend.id_to_token(token) for token in range(len(texts))] == texts
    ids = [texts.index(part) for part in best_path(normalized("hello world"), FAIRSEQ)]
    assert ours.encode("hello world") == [texts.index("<s>"), *ids, texts.index("</s>")]
    ((pair, _),) = ours.encode_texts([("hello world", "<mask>")])
    end = texts.index("</s>")
    assert pair == (texts.index("<s>"), *ids, end, end, texts.index("<mask>"), end)


@pytest.mark.parametrize("kind", ["t5", "mt5", "xlm-roberta"])
def test_a_class_that_no_config_names_is_that_of_the_model_type(tmp_path, kind):
    write_model(tmp_path, unigram_file(FAIRSEQ), {"extra_ids": 2})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    backend = Tokenizer.from_path(tmp_path).backend
    assert (backend.token_to_id("<mask>") is not None) == (kind == "xlm-roberta")
    assert backend.token_to_id("<extra_id_0>") == (None if kind == "xlm-roberta" else len(FAIRSEQ) + 1)


@pytest.mark.parametrize("kind", ["albert", "xlnet", ["t5"], None])
def test_a_unigram_model_of_another_model_type_is_refused(tmp_path, kind):
    write_model(tmp_path, unigram_file())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    is_named = isinstance(kind, str)
    refusal = (
        pytest.raises(CheckpointError, match=f"of the model type {kind}', whose ids") if is_named else nullcontext()
    )
    with refusal:
        Tokenizer.from_path(tmp_path)


def test_t5s_sentinels_follow_the_pieces(tmp_path):
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 2, "eos_token": "</s>"}
    ours = Tokenizer.from_path(write_model(tmp_path, unigram_file(), config))
    size = len(NO_BYTES)
    assert [ours.backend.token_to_id(f"<extra_id_{number}>") for number in (0, 1)] == [size + 1, size]
    assert ours.encode("hello")[-1] == 2


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (unigram_file(), {"tokenizer_class": "AlbertTokenizer"}, "of the class 'AlbertTokenizer', whose ids"),
        (unigram_file(normalizer=field(5, 0)), {}, "it treats spaces in another way"),
        (unigram_file([*NO_BYTES, ("h" * 300, -9.0, NORMAL)]), {}, "more than 256 characters"),
        (unigram_file(normalizer=field(2, b"abc")), {}, "have 3 bytes"),
        (unigram_file(normalizer=field(2, CHARSMAP[:-40])), {}, "have|trie|lead"),
        (unigram_file(normalizer=field(2, struct.pack("<I", 1024) + b"\xff\x00\x00\x7f" * 256)), {}, "leads outside"),
        (unigram_file(normalizer=field(2, struct.pack("<I", 1024) + b"\x00\x00\x00\x80" * 256)), {}, "has no root"),
        (unigram_file(normalizer=field(2, trie({97: 97 | HAS_LEAF}, b"x\0"))), {}, "to no text"),
        (unigram_file(normalizer=field(2, trie({0: LEAF | 256 << 10}, bytes(2**18 + 1)))), {}, "has no root"),
        (unigram_file(), {"tokenizer_class": "T5Tokenizer", "extra_ids": -1}, "extra_ids"),
    ],
)
def test_damaged_and_unsupported_unigram_models_are_refused_by_their_fault(tmp_path, content, config, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(write_model(tmp_path, content, config))
