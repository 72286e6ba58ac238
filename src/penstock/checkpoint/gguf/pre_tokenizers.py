"""Pre-tokenizers of byte-level BPE vocabularies in GGUF files, by `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json; any other pattern would produce other tokens.
"""

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from penstock.dataclass import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# DeepSeek's first tokenizer lists the cased letters of most scripts: all but those of Georgian, mathematics, ...
_OTHER_CASED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016ed3\U0001d400-\U0001df2a"
)
_CASED = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_OTHER_CASED}]]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# BLOOM's words: everything but spaces and these marks
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Thousands. SuperBPE's own pattern, the last one, takes quadratic time; the one before splits long numbers for it.
_THOUSANDS = (r"\p{N}+", r"(?<!\d)\d{1,29}(?=(?>(?:\d{30})+)(?!\d))|\d{30}", r"(?=(\d{3})+(?!\d))")
# Thousands of numbers that no letter follows: \d{1,3}(?=(?:\d{3})*\b), which takes quadratic time, too
_THOUSANDS_OF_WHOLE = (
    r"(?<!\d)\d++\b",
    r"\A\d{1,29}(?=(?>(?:\d{30})+)\z)|\G\d{30}",
    r"\G\d{1,3}(?=(?:\d{3})*\z)",
)


def _words(digits: str, letters: str = r"\p{L}", *, ends: str = r"[\r\n]*") -> str:
    """GPT-4's pattern: words of `letters`, digits, and signs, after which `ends` may follow."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{_CONTRACTIONS}|{word}|{digits}| ?[^\s{letters}\p{{N}}]+{ends}|{_SPACES}"


def _cased_words(
    contractions: str, digits: str, *, upper: str = _UPPER, lower: str = _LOWER, ends: str = r"[\r\n/]*"
) -> str:
    """GPT-4o's pattern, which also splits words where a lower-case letter precedes an upper-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """A pre-tokenizer: each pattern splits the pieces left by the patterns before it."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """Whether a word that is a token becomes that token without merging (`ignore_merges`)."""
    add_bos: bool = False
    """Whether texts begin with BOS if the file does not say."""
    add_sep: bool = False
    """Whether a separator stands between the texts of a pair if the file does not say."""
    nfc: bool = False
    """Whether texts are first normalized to Unicode NFC."""

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = PreTokenization((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_ONE_DIGIT = PreTokenization((r"\p{N}", _GPT2))
_PLAIN = PreTokenization((_GPT2,))
_QWEN2 = _words(r"\p{N}")
_GPT4O = PreTokenization((_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_NOT_HAN = {"upper": rf"[{_UPPER}&&[^\p{{Han}}]]", "lower": rf"[{_LOWER}&&[^\p{{Han}}]]", "ends": r"[\r\n]*"}
_KIMI = _cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", **_NOT_HAN)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Hangul, East Asian punctuation, Bopomofo, and Han with kana
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+"
)
_HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_MARKED = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_V3 = PreTokenization((r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_MARKED}[\r\n]*|{_SPACES}"))
# Han, kana, and the scripts of South-East Asia and Korea
_AFMOE_LETTERS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE_DIGITS = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?>(?:\p{N}{3})*)\z)|\p{N}{3}")
# Jais 2's spaces: runs in powers of two. No line ends in the rest of a run: to look for one would take quadratic time.
_JAIS_SPACES = "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _words(r"\p{N}{1,3}").replace(_SPACES, rf"(?<![^\S\r\n])\s*[\r\n]+|{_JAIS_SPACES}\s{{1,2}}(?!\S)|\s{{1}}")

PRE_TOKENIZATIONS = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3),
    "jais-2": PreTokenization((_JAIS2,)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenization(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "hunyuan"), PreTokenization((_QWEN2,), nfc=True)),
    "qwen35": PreTokenization((_words(r"\p{N}", r"\p{L}\p{M}"),), nfc=True),
    **dict.fromkeys(("glm4", "glm5"), PreTokenization(_LLAMA3.patterns, whole_words=True)),
    "chatglm-bpe": PreTokenization(_LLAMA3.patterns),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "solar-open", "f2llmv2", "grok-2"), PreTokenization((_QWEN2,))),
    **dict.fromkeys(("stablelm2", "kormo"), PreTokenization((_QWEN2,))),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "a.x-4.0", "olmo", "trillion", "exaone4", "gigachat"), _PLAIN),
    **dict.fromkeys(("jais", "granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _PLAIN),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), PreTokenization((_GPT2,), add_sep=True)),
    **dict.fromkeys(("mpt", "modern-bert"), PreTokenization((_GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _ONE_DIGIT),
    "mellum2": _ONE_DIGIT,
    "tekken": PreTokenization((_cased_words("", r"\p{N}"),), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O),
    "granite-embed-multi-97m": PreTokenization(_GPT4O.patterns, whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenization((*_THOUSANDS_OF_WHOLE, *_GPT4O.patterns))),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-llm": PreTokenization(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s+$",  # the model's own, \s+$, takes quadratic time
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        )
    ),
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4"), _DEEPSEEK_V3),
    "spark2_5": PreTokenization(
        (r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_MARKED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ),
    "afmoe": PreTokenization((*_AFMOE_DIGITS, _AFMOE_LETTERS, *_DEEPSEEK_V3.patterns[2:])),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "seed-coder": PreTokenization((_words(r"\p{N}", ends=""),)),
    "viking": PreTokenization((_BLOOM, r"\p{N}")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenization((_BLOOM,))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenization((_BAILING,))),
    "exaone-moe": PreTokenization((_EXAONE_MOE,)),
    "ufakzeka": PreTokenization((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": PreTokenization((r"[^\n]+|\n+", _QWEN2)),
    "youtu": PreTokenization((_YOUTU, _cased_words(f"{_CONTRACTIONS}?", r"\p{N}")), whole_words=True),
    "superbpe": PreTokenization(_THOUSANDS),
    "minicpm5": PreTokenization((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    "kimi-k2": PreTokenization((rf"\p{{Han}}+|{_KIMI}",)),
    "chameleon": PreTokenization(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}
PIECES = {"gemma4": True, "granite-embed-multi-311m": True, "sarvam-moe": False}
"""Those of SentencePiece's tokens with merges, which are not split: whether texts begin with BOS, whatever the file
says (early files of Gemma 4 say no by mistake).
"""
