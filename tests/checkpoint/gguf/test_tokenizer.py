"""Tokenizers from GGUF files: the ids of the models' own tokenizers and of `transformers`' converter, and refusals."""

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf.constants import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from penstock.checkpoint.gguf.architectures import ARCHITECTURES
from penstock.checkpoint.gguf.file import read_metadata
from penstock.checkpoint.gguf.pre_tokenizers import PIECES, PRE_TOKENIZATIONS
from penstock.checkpoint.gguf.vocabulary import end_token_ids, suppressed_token_ids
from penstock.errors import CheckpointError, InvalidRequestError
from penstock.text import tokenizer as ours
from tests.support.gguf_files import add_byte_level, finish
from tests.support.tokenizers_for_tests import CHAT_TEMPLATE, CORPUS, write_tokenizer

DOCS = Path(__file__).parents[3] / "docs" / "gguf.md"
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "word",
    "The year 2024, 3.14159 and 1,000,000; ½ ² ٣٤ Ⅷ x1y22z333",
    "I'm, you'RE, it'S, WE'LL; camelCase HTTPServer ÜberGröße ǅungla",
    "def f(x):\n    if x:\n\t\treturn  {'a': 1}\n\n\n\nclass  A:\r\n        pass\r\n",
    "spaces   of    many     lengths      before      words and the end     ",
    "日本語のテキスト、中文文本。한국어 텍스트! ไทย हिन्दी العربية",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301 \u1100\u1161 combining",
    "punctuation!!! ((nested)) [brackets] -- ... /path/to/file.txt a@b.c #1 $5 <|x|> `code`",
    "zero\u200bwidth\u00a0no-break\u3000ideographic\ttab\x0bvertical\x00nul",
]
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level_of(path: Path, pre: str | None, **metadata: Any) -> Tokenizer:
    """Train a small byte-level vocabulary, write it as a GGUF file, and return what was trained."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    folder = write_tokenizer(path.parent / "hf", tokenizer)
    writer = GGUFWriter(None, "llama")
    add_byte_level(writer, folder, pre or "gpt-2")
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    if pre is None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
    finish(writer, path)
    return tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def load(file: Path) -> ours.Tokenizer:
    loaded = ours.Tokenizer.load(file)
    assert loaded is not None
    return loaded


def converted(file: Path) -> Any:
    """`transformers`' tokenizer of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    architecture, tokenizer, _ = get_gguf_tokenizer(str(file))
    return convert_gguf_tokenizer(architecture, tokenizer)[0]


def ids(theirs: Tokenizer, text: str) -> list[int]:
    found: list[int] = theirs.encode(text, add_special_tokens=False).ids
    return found


# `transformers` has these cuts, too; the others it takes for GPT-2's
SHARED = ["llama-bpe", "smaug-bpe", "deepseek-r1-qwen", "tekken", "gpt-4o", "gpt-2"]


@pytest.mark.parametrize("pre", SHARED)
def test_ids_are_those_of_transformers_converter(file: Path, pre: str) -> None:
    byte_level_of(file, pre)
    theirs, mine = converted(file), load(file)
    for text in [*TEXTS, "<s>a <think> b</s>  <|user|>\n"]:
        assert mine.encode(text, add_special_tokens=False) == ids(theirs, text), text


DIGITS_FIRST = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
QWEN2 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex("(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS % r"\p{N}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)

# DeepSeek V2's tokenizer.json lists them one by one.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
        pre_tokenizers.Split(Regex(rf"\s?[{CASED}]+"), "isolated"),
        pre_tokenizers.Split(Regex("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s+$"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


VIKING = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(" ?[^(\\s|[.,!?…。，、।۔،])]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
KIMI_K2 = split(
    "|".join(
        [
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
        ]
    )
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TINY_AYA = split(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
JAIS2 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
SPARK = split(
    *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
    r"|\s+(?!\S)|\s+",
    r"\p{N}",
)
CHAMELEON = split(
    *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}"),
    r"[\p{P}!-/:-@\[-`{-~]",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
DIGITS = [
    *("1", "12", "123", "1234", "12345", "123456", "1234567x89", "x1000 20000,300000.4000000", "١٢٣٤ ①②③④"),
    *("1234x 12345_6 x1234567.1", "4" * 40 + "x", "5" * 61 + "é" + "6" * 47),
    *("12½1234", "½123", "½1234", "1234½12", "1" * 100, "2" * 119 + "a" + "3" * 120 + " " + "4" * 121),
]


def test_deepseeks_letters_are_those_that_its_tokenizer_lists() -> None:
    listed, (_, ours, *_) = Regex(f"[{CASED}]"), PRE_TOKENIZATIONS["deepseek-llm"].patterns
    for cased in (listed, Regex(ours)):
        assert not pre_tokenizers.Split(cased, "removed").pre_tokenize_str("wÖ\u1fdb\U00010400")
    cuts = [pre_tokenizers.Split(cased, "isolated") for cased in (listed, Regex(ours.removeprefix(r"\s?").rstrip("+")))]
    every = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    assert cuts[0].pre_tokenize_str(every) == cuts[1].pre_tokenize_str(every)


@pytest.mark.parametrize(
    ("pre", "cut", "normalizer"),
    [
        ("smollm", DIGITS_FIRST, None),  # as SmolLM2's, StarCoder's and Granite 3's tokenizer.json have it
        ("refact", DIGITS_FIRST, None),
        ("deepseek-llm", DEEPSEEK_LLM, None),  # as DeepSeek V2's
        ("qwen2", QWEN2, normalizers.NFC()),  # as Qwen2's
        # as llama.cpp quotes those of the models
        ("seed-coder", split(_SPLIT % r"\p{N}{1}"), None),
        ("viking", VIKING, None),
        ("superbpe", split(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), None),
        ("minicpm5", split(r"\p{N}{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS % r"\p{N}+"), None),
        ("kimi-k2", KIMI_K2, None),
        ("bailingmoe2", split(BAILING), None),
        ("exaone-moe", split(EXAONE_MOE), None),
        ("hunyuan", QWEN2, normalizers.NFC()),
        ("stablelm2", QWEN2, None),
        ("tiny_aya", TINY_AYA, None),
        ("jais-2", JAIS2, None),
        ("spark2_5", SPARK, None),
        ("chameleon", CHAMELEON, None),
        ("granite-embed-multi-97m", split(GPT4O), None),
        ("mpt", pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),  # as GPT-NeoX's
    ],
)
def test_ids_are_those_of_the_models_own_tokenizer(file: Path, pre: str, cut: Any, normalizer: Any) -> None:
    own = byte_level_of(file, pre)
    own.pre_tokenizer = cut
    if normalizer is not None:
        own.normalizer = normalizer
    mine = load(file)
    assert own.pre_tokenizer is not None
    cuts = PRE_TOKENIZATIONS[pre].pre_tokenizer()
    for text in [*TEXTS, *DIGITS, "<s>a <think> b</s>  <|user|>\n"]:
        assert mine.encode(text, add_special_tokens=False) == ids(own, text), text
        assert cuts.pre_tokenize_str(text) == own.pre_tokenizer.pre_tokenize_str(text), text


@given(text=st.text(st.sampled_from("012 9½.a'SsLl日ǅÉe\u0301\r\n,|()٣"), max_size=40))
@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("seed-coder", split(_SPLIT % r"\p{N}{1}")),
        ("viking", VIKING),
        ("superbpe", split(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        ("kimi-k2", KIMI_K2),
        ("bailingmoe2", split(BAILING)),
        ("exaone-moe", split(EXAONE_MOE)),
        ("tiny_aya", TINY_AYA),
        ("jais-2", JAIS2),
    ],
)
def test_any_text_is_cut_as_by_the_models_own_pre_tokenizer(pre: str, cut: Any, text: str) -> None:
    assert PRE_TOKENIZATIONS[pre].pre_tokenizer().pre_tokenize_str(text) == cut.pre_tokenize_str(text)


def test_afmoes_numbers_are_cut_in_threes_from_their_ends(file: Path) -> None:
    """As llama.cpp does it, whether or not a letter follows."""
    cuts = PRE_TOKENIZATIONS["afmoe"].pre_tokenizer()
    for text, pieces in {
        "1234567 12": ["1", "234", "567", "Ġ", "12"],
        "abc123456x 1234": ["abc", "123", "456", "x", "Ġ", "1", "234"],
        "1½234,5": ["1Â½", "234", ",", "5"],
        "日本1000円": ["æĹ¥æľ¬", "1", "000", "åĨĨ"],
    }.items():
        assert [piece for piece, _ in cuts.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["superbpe", "tiny_aya", "afmoe"])
@pytest.mark.parametrize("after", ["", "x"])
def test_a_long_number_is_cut_in_time_that_grows_with_its_length(pre: str, after: str) -> None:
    """The models' own patterns need minutes for it."""
    cuts = PRE_TOKENIZATIONS[pre].pre_tokenizer()
    began = time.process_time()
    assert len(cuts.pre_tokenize_str("7" * 100_000 + after)) == 33_334 + len(after)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(("pre", "count", "pieces"), [("jais-2", 512 * 4000, 4010), ("deepseek-llm", 100_000, 2)])
def test_many_spaces_are_cut_in_time_that_grows_with_their_number(pre: str, count: int, pieces: int) -> None:
    """The models' own patterns look for a line end in the rest of a run, from many places of it."""
    cuts = PRE_TOKENIZATIONS[pre].pre_tokenizer()
    began = time.process_time()
    assert len(cuts.pre_tokenize_str(" " * count + "1")) == pieces
    assert time.process_time() - began < 10


@pytest.mark.parametrize("pre", PRE_TOKENIZATIONS)
def test_every_cut_gives_the_text_back(file: Path, pre: str) -> None:
    byte_level_of(file, pre)
    mine = load(file)
    for text in TEXTS:
        composed = normalizers.NFC().normalize_str(text) if PRE_TOKENIZATIONS[pre].nfc else text
        assert mine.decode(mine.encode(text, add_special_tokens=False)) == composed


def test_a_word_that_is_a_token_is_that_token_where_the_model_has_it_so(file: Path) -> None:
    """Merges of Llama 3 do not reach each of its words."""
    byte_level_of(file, "llama-bpe")
    plain = load(file)
    unreachable = "Größenordnung"
    writer = GGUFWriter(None, "llama")
    add_byte_level(writer, file.parent / "hf", "llama-bpe")
    texts = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    spelled = "".join(plain.backend.id_to_token(token) for token in plain.encode(unreachable, False))
    texts[-1] = spelled
    finish(writer, file)
    assert load(file).encode(unreachable, add_special_tokens=False) == [len(texts) - 1]


def sentencepiece(file: Path, *, prefix: bool = True, **metadata: Any) -> None:
    """A vocabulary as SentencePiece trains it: scores by rank, bytes, no merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=16)
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(text for text, _ in pieces)]
    texts += ["[INST]", "  "]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * len(pieces) + [TokenType.CONTROL, TokenType.USER_DEFINED]
    writer = GGUFWriter(None, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0, 0.0])
    if not prefix:
        writer.add_add_space_prefix(False)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer, file)


def test_a_sentencepiece_vocabulary_gives_the_ids_of_the_models_own_tokenizer(file: Path) -> None:
    """As Llama 2's and Mistral's tokenizer.json have it; `transformers`' converter puts a space before a text alone."""
    sentencepiece(file)
    own, mine = converted(file), load(file)
    for text in filter(has_no_token_of_spaces, TEXTS):
        if not text.startswith(" "):
            assert mine.encode(text, add_special_tokens=False) == ids(own, text), text
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.pre_tokenizer = None
    for text in [*TEXTS, " a", "<s>[INST] hi [/INST]  two</s>", "🙂 is bytes, \x00 too"]:
        assert mine.encode(text, add_special_tokens=False) == ids(own, text), text


def test_a_space_is_put_before_a_text_and_after_each_control_token(file: Path) -> None:
    sentencepiece(file)
    mine = load(file)

    def spelled(text: str) -> list[str]:
        """The texts between control tokens."""
        tokens = mine.backend.encode(text, add_special_tokens=False).tokens
        return "".join(f"|{token}|" if token in ("<s>", "</s>", "[INST]") else token for token in tokens).split("|")

    assert spelled("a") == ["▁a"]
    assert spelled(" a") == ["▁▁a"]
    assert spelled("<s>a b</s>c") == ["", "<s>", "▁a▁b", "</s>", "▁c"]
    assert spelled("<s>[INST] a") == ["", "<s>", "", "[INST]", "▁▁a"]
    for text in (" a", "a b ", " "):
        assert mine.decode(mine.encode(text)) == text


def gemma4(file: Path) -> Tokenizer:
    """Train a vocabulary as Gemma's is, write it as a Gemma 4 file, and return what was trained."""
    own = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own.normalizer = normalizers.Replace(" ", "▁")
    own.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=16, special_tokens=special)
    own.train_from_iterator([*CORPUS, *TEXTS], trainer)
    state = json.loads(own.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    own = Tokenizer.from_str(json.dumps(state))
    texts = sorted(own.get_vocab(), key=own.get_vocab().__getitem__)
    kinds = [TokenType.CONTROL] * 6 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (len(texts) - 262)
    kinds[3] = TokenType.UNKNOWN
    writer = GGUFWriter(None, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    finish(writer, file)
    return own


def test_gemma4s_ids_are_those_of_the_models_own_tokenizer(file: Path) -> None:
    own = gemma4(file)
    mine = load(file)
    for text in [*TEXTS, "<bos><|turn>user\n hi<turn|>\n", "🫠𝕏 is bytes"]:
        assert mine.encode(text, add_special_tokens=False) == ids(own, text), text
        assert mine.decode(mine.encode(text)) == text.replace("<bos>", "").replace("<|turn>", "").replace("<turn|>", "")
    assert mine.encode("a")[0] == 2
    assert end_token_ids(read_metadata(file)) == [1, 5]


def test_early_files_of_gemma4_that_ask_for_no_bos_get_one(file: Path) -> None:
    gemma4(file)
    metadata = read_metadata(file)
    writer = GGUFWriter(None, "gemma4")
    writer.add_tokenizer_model("gpt2")  # as a granite embedding model of the same tokens
    writer.add_tokenizer_pre("granite-embed-multi-311m")
    writer.add_token_list(metadata.strings("tokenizer.ggml.tokens") or [])
    writer.add_token_types(list(metadata.numbers("tokenizer.ggml.token_type", "iI") or ()))
    writer.add_token_merges(metadata.strings("tokenizer.ggml.merges") or [])
    writer.add_bos_token_id(2)
    writer.add_add_bos_token(False)
    plain = load(file).encode("a b")
    finish(writer, file)
    assert load(file).encode("a b") == plain


def test_a_pair_has_the_separators_that_the_file_asks_for(file: Path) -> None:
    for architecture, asked, between in (("bert", True, 2), ("bert", False, 1), ("modern-bert", True, 1)):
        byte_level_of(file, "gpt-2")
        writer = GGUFWriter(None, architecture)
        add_byte_level(writer, file.parent / "hf", "roberta-bpe")
        for name in ("bos", "eos", "sep"):
            getattr(writer, f"add_add_{name}_token")(asked or name != "sep")
        writer.add_sep_token_id(1)
        finish(writer, file)
        ((ids, _),) = load(file).encode_texts([("a", "b")])
        a, b = (load(file).encode(text, add_special_tokens=False) for text in "ab")
        assert ids == (0, *a, *[1] * between, *b, 1)


def test_ends_of_turns_that_a_converter_took_for_text_end_answers(file: Path) -> None:
    writer = GGUFWriter(None, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "<|im_end|>", "</s>", "<|flush|>", "<|calls|>", "<|end|>"])
    writer.add_token_types([TokenType.NORMAL] + [TokenType.USER_DEFINED] * 2 + [TokenType.CONTROL] * 3)
    writer.add_eos_token_id(1)
    writer.add_array("tokenizer.ggml.suppress_tokens", [0, 7])
    finish(writer, file)
    assert end_token_ids(read_metadata(file)) == [1, 3, 4]  # </s> is a tag of HTML in Gemma's vocabularies
    assert suppressed_token_ids(read_metadata(file)) == [0]


def test_a_harmony_text_does_not_end_where_a_message_of_it_does(file: Path) -> None:
    writer = GGUFWriter(None, "gpt-oss")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"])
    writer.add_token_types([TokenType.NORMAL] + [TokenType.CONTROL] * 4)
    writer.add_eos_token_id(2)
    finish(writer, file)
    assert end_token_ids(read_metadata(file)) == [2, 1, 4]


def has_no_token_of_spaces(text: str) -> bool:
    """The vocabulary's user-defined token of two spaces is followed by a space more, as in llama.cpp."""
    return "  " not in text


def test_a_sentencepiece_vocabulary_gives_texts_back_and_falls_back_to_bytes(file: Path) -> None:
    sentencepiece(file)
    mine = load(file)
    for text in [*filter(has_no_token_of_spaces, TEXTS), "🫠𝕏"]:
        assert mine.decode(mine.encode(text)) == text
    melting = mine.encode("🫠", add_special_tokens=False)[-4:]
    assert b"".join(mine.token_bytes(token) for token in melting) == "🫠".encode()


def test_bos_is_put_before_texts_of_sentencepiece_unless_the_file_says_no(file: Path) -> None:
    sentencepiece(file)
    assert load(file).encode("a")[0] == 1
    sentencepiece(file, add_bos_token=False, add_eos_token=True)
    assert load(file).encode("a")[-1] == 2
    assert load(file).encode("a")[0] != 1


def test_no_space_is_put_before_texts_where_the_file_says_so(file: Path) -> None:
    sentencepiece(file)
    assert load(file).backend.encode("a", add_special_tokens=False).tokens == ["▁a"]
    sentencepiece(file, prefix=False)
    assert load(file).backend.encode("a", add_special_tokens=False).tokens == ["a"]
    assert load(file).decode(load(file).encode(" a")) == " a"


@pytest.mark.parametrize(("pre", "added"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_bos_is_put_before_texts_of_byte_level_vocabularies_that_were_trained_so(
    file: Path, pre: str, added: bool
) -> None:
    byte_level_of(file, pre)
    assert (load(file).encode("a")[0] == 0) is added
    byte_level_of(file, pre, add_bos_token=not added)
    assert (load(file).encode("a")[0] == 0) is not added


def test_the_chat_template_sees_the_special_tokens(file: Path) -> None:
    byte_level_of(file, "gpt-2")
    mine = load(file)
    assert mine.chat_template_source == CHAT_TEMPLATE
    assert mine.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s><|user|>hi</s>\n<|assistant|>"
    mine.close()


def test_chat_templates_have_names(file: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    sentencepiece(file, chat_template=templates)
    mine = load(file)
    assert mine.apply_chat_template([]) == "plain"
    assert mine.apply_chat_template([], tools=[{"type": "function"}]) == "with tools"
    mine.close()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        (
            "{% for i in range(10 ** 9) %}{% for j in range(10 ** 9) %}{% endfor %}{% endfor %}",
            "too big|processor time",
        ),
        ("{{ 'x' * 10 ** 10 }}", "memory"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no') }}", "says: no"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_hostile_template_is_refused_when_it_is_used(file: Path, template: str, told: str) -> None:
    sentencepiece(file, chat_template=template)
    mine = load(file)
    with pytest.raises(InvalidRequestError, match=told):
        mine.apply_chat_template([{"role": "user", "content": "hi"}])
    mine.close()


def test_a_huge_template_is_refused_at_once(file: Path) -> None:
    sentencepiece(file, chat_template="x" * (2**20 + 1))
    with pytest.raises(CheckpointError, match=r"chat templates in .*model\.gguf have 1048577 characters"):
        load(file)


def test_a_file_without_a_tokenizer_takes_token_ids(file: Path) -> None:
    writer = GGUFWriter(None, "llama")
    writer.add_tokenizer_model("none")
    finish(writer, file)
    assert ours.Tokenizer.load(file) is None
    with pytest.raises(CheckpointError, match="has no tokenizer; without one, prompts must be token ids"):
        ours.Tokenizer.from_path(file)


def test_that_a_file_has_a_tokenizer_is_told_without_reading_the_vocabulary(file: Path) -> None:
    with_changes(file, merges=None, tokens=lambda texts: [*texts[:-1], texts[5]])
    assert ours.missing_tokenizer(file) is None
    with_changes(file, model="rwkv")
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.model 'rwkv' .* not supported"):
        ours.missing_tokenizer(file)


def with_changes(file: Path, **changes: Any) -> None:
    """A byte-level vocabulary of which entries are replaced; None leaves them out."""
    byte_level_of(file, "gpt-2")
    writer = GGUFWriter(None, "llama")
    add_byte_level(writer, file.parent / "hf")
    for key, change in changes.items():
        entry = writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        if callable(change):
            writer.add_array(f"tokenizer.ggml.{key}", change(entry.value))
        elif change is not None:
            writer.add_string(f"tokenizer.ggml.{key}", change)
    finish(writer, file)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
    "no array of tokens": ({"tokens": "abc"}, "tokens .* must be an array of strings"),
    "numbers as tokens": (
        {"tokens": lambda texts: list(range(len(texts)))},
        "must be an array of strings, not an array",
    ),
    "a token twice": ({"tokens": lambda texts: [*texts[:-1], texts[5]]}, "tokens 5 and .* are both"),
    "too few kinds": ({"token_type": lambda kinds: kinds[:-1]}, "token_type .* has .* entries for"),
    "texts as kinds": ({"token_type": lambda kinds: ["a"] * len(kinds)}, "must be an array of another type"),
    "no merges": ({"merges": None}, "lacks tokenizer.ggml.merges"),
    "a merge of one part": ({"merges": lambda merges: [*merges, "ab"]}, "an entry without two parts: 'ab'"),
    "a merge of no tokens": ({"merges": lambda merges: ["qq zz", *merges]}, "vocabulary that cannot be used: .*qq"),
    "another tokenizer": ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' .* not supported; supported: gpt2"),
    "another cut": ({"pre": "martian"}, "tokenizer.ggml.pre 'martian' .* not supported; supported: default, llama3"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_vocabulary_that_cannot_be_is_refused_by_name(file: Path, case: str) -> None:
    changes, told = BAD[case]
    with_changes(file, **changes)
    with pytest.raises(CheckpointError, match=told):
        ours.Tokenizer.load(file)


def test_scores_that_are_missing_or_nan_are_refused(file: Path) -> None:
    for scores, told in (([float("nan")] * 3, "scores .* NaN"), ([0.0], "has 1 entries for 3 tokens")):
        writer = GGUFWriter(None, "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b", "c"])
        writer.add_token_scores(scores)
        finish(writer, file)
        with pytest.raises(CheckpointError, match=told):
            load(file)


def test_a_vocabulary_made_to_take_long_is_refused_soon(file: Path) -> None:
    writer = GGUFWriter(None, "llama")
    writer.add_tokenizer_model("llama")
    texts = [letter * size for letter in "abcdefghijklmnopqrstuvwxyzäöüß0123456789" for size in range(1, 257)]
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * len(texts))
    finish(writer, file)
    with pytest.raises(CheckpointError, match="vocabulary beyond the limits"):
        load(file)


def test_a_file_that_asks_for_bos_needs_one(file: Path) -> None:
    writer = GGUFWriter(None, "llama")
    add_byte_level(writer, _folder_without_bos(file.parent))
    writer.add_add_bos_token(True)
    finish(writer, file)
    with pytest.raises(CheckpointError, match=r"add_bos_token is true in .*, which defines no bos token"):
        load(file)


def _folder_without_bos(folder: Path) -> Path:
    byte_level_of(folder / "x.gguf", "gpt-2")
    (folder / "hf" / "tokenizer_config.json").write_text("{}")
    return folder / "hf"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[ours.Tokenizer]:
    folder = tmp_path_factory.mktemp("loaded")
    byte_level_of(folder / "bytes.gguf", "llama-bpe")
    sentencepiece(folder / "pieces.gguf")
    return [load(folder / "bytes.gguf"), load(folder / "pieces.gguf")]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(loaded: list[ours.Tokenizer], text: str) -> None:
    for tokenizer in loaded:
        if has_no_token_of_spaces(text) and "▁" not in text:  # which stands for a space
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_the_docs_list_every_architecture() -> None:
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith("| `general.architecture`"))
    assert re.findall(r"`([^`]+)`", row)[1:] == list(ARCHITECTURES)


def test_the_docs_list_every_cut() -> None:
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith("| `tokenizer.ggml.pre`"))
    assert re.findall(r"`([^`]+)`", row)[1:] == [*PRE_TOKENIZATIONS, *PIECES]
