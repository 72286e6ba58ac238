"""tekken.json and tiktoken's files, against tiktoken's algorithm written out."""

import base64
import itertools
import json
import unicodedata

import pytest
import regex

from penstock.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import CORPUS

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
QWEN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
TEXTS = [*CORPUS[:3], "", " a  b", "it's HelloWorld 2025\r\n\n x", "e\u0301 中文abc 世界", "😀\u200d", "quickly lazier"]


def learned_ranks(count=420):
    """Bytes, and the tokens that byte-pair encoding learns of the corpus."""
    words = [[bytes([byte]) for byte in word.encode()] for text in CORPUS[:3] for word in regex.findall(QWEN, text)]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < count:
        pairs = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = b"".join(max(pairs, key=lambda pair: (pairs[pair], pair)))
        ranks.setdefault(best, len(ranks))
        words = [merged(word, {best: 0}) for word in words]
    return ranks


def merged(parts, ranks):
    """tiktoken: merge the leftmost pair of the lowest rank until none has a rank."""
    parts = list(parts)
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def expected(text, ranks, pattern):
    ids = []
    for word in regex.findall(pattern, text):
        raw = word.encode()
        ids += [
            ranks[part]
            for part in ([raw] if raw in ranks else merged([raw[i : i + 1] for i in range(len(raw))], ranks))
        ]
    return ids


@pytest.fixture(scope="module")
def ranks():
    return learned_ranks()


def tekken(ranks, *, kept=400, special=20, **changes):
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}, {"rank": 2, "token_str": "</s>"}]
    return {
        "config": {
            "pattern": TEKKEN,
            "default_vocab_size": kept + special,
            "default_num_special_tokens": special,
            "version": "v11",
            **changes.pop("config", {}),
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(raw).decode()} for raw, rank in ranks.items()],
        "special_tokens": [{**one, "is_control": True} for one in listed],
        **changes,
    }


def write_tekken(folder, content):
    (folder / "tekken.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def write_ranks(folder, name, ranks, config=None):
    lines = [f"{base64.b64encode(raw).decode()} {rank}\n" for raw, rank in ranks.items()]
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def test_tekken_json_encodes_as_mistrals_algorithm(tmp_path, ranks):
    ours = Tokenizer.load(write_tekken(tmp_path, tekken(ranks)))
    kept = {raw: rank for raw, rank in ranks.items() if rank < 400}
    for text in TEXTS:
        ids = [1, *(20 + rank for rank in expected(text, kept, TEKKEN))]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text
    assert (ours.vocab_size, ours.eos_token_id) == (420, 2)
    assert ours.encode("</s><SPECIAL_7>", add_special_tokens=False) == [2, 7]


def test_tekken_files_of_early_versions_have_the_special_tokens_of_their_time(tmp_path, ranks):
    early = tekken(ranks, special_tokens=None, config={"version": "v3"})
    ours = Tokenizer.from_path(write_tekken(tmp_path, early))
    assert ours.encode("[INST]a[/INST]")[:2] == [1, 3]
    with pytest.raises(CheckpointError, match="must list"):
        Tokenizer.from_path(write_tekken(tmp_path, early | {"config": early["config"] | {"version": "v13"}}))


def test_qwens_tiktoken_file_encodes_as_tiktoken(tmp_path, ranks):
    ours = Tokenizer.from_path(write_ranks(tmp_path, "qwen.tiktoken", ranks))
    for text in TEXTS:
        ids = expected(unicodedata.normalize("NFC", text), ranks, QWEN)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == unicodedata.normalize("NFC", text)
    assert ours.eos_token_id == 420
    assert ours.encode("<|im_end|><|extra_204|>") == [422, 420 + 207]


def test_kimis_tiktoken_file_has_its_special_tokens_and_splits_off_chinese(tmp_path, ranks):
    names = {"420": {"content": "[BOS]", "special": True}, "421": {"content": "[EOS]", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": names}
    ours = Tokenizer.from_path(write_ranks(tmp_path, "tiktoken.model", ranks, config))
    assert ours.encode("[EOS]<|reserved_token_675|>[BOS]") == [421, 675, 420]
    assert ours.encode("中文abc") == expected("中文", ranks, ".+") + expected("abc", ranks, ".+")
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
    for refused, message in (
        ({"tokenizer_class": "Phi3SmallTokenizer"}, "TikTokenTokenizer .Kimi. only, not for"),
        ({**config, "added_tokens_decoder": {"5": {"content": "x"}}}, "ids 420 to 675"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_path(write_ranks(tmp_path, "tiktoken.model", ranks, refused))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 5}, "cannot be read as Mistral's tekken.json"),
        ({"vocab": []}, "ranks of its vocabulary must be 0 to 399"),
        ({"config": {"pattern": "("}}, "is not a regular expression"),
        ({"config": {"pattern": "a" * 5000}}, "5000 characters; at most"),
        ({"config": {"default_num_special_tokens": -1, "default_vocab_size": 399}}, "must be 0 to 65536"),
        ({"config": {"default_num_special_tokens": 10**9}}, "must be 0 to 65536"),
        ({"special_tokens": [{"rank": 99, "token_str": "a"}]}, "must have ranks 0 to 19"),
        ({"special_tokens": [{"rank": r, "token_str": "a"} for r in (0, 1)]}, "must have different texts"),
    ],
)
def test_a_damaged_tekken_json_is_refused_by_its_fault(tmp_path, ranks, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(write_tekken(tmp_path, tekken(ranks, **changes)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no tokens for 256"),
        ("IQ== 1\n", "line 1 must be"),
        ("I!Q= 0\n", "not base64"),
        ("[" * 100_000, "line 1 must be"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused_by_its_fault(tmp_path, content, message):
    (tmp_path / "qwen.tiktoken").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(tmp_path)


def test_a_deeply_nested_tekken_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read as Mistral's"):
        Tokenizer.from_path(write_tekken(tmp_path, '{"x": ' + "[" * 100_000))


def test_a_token_of_excessive_length_is_refused(tmp_path, ranks):
    with pytest.raises(CheckpointError, match="tokens of up to 600 bytes"):
        Tokenizer.from_path(write_ranks(tmp_path, "qwen.tiktoken", {**ranks, b"x" * 600: len(ranks)}))
