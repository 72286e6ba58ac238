"""Builds a `tokenizers` tokenizer from a GGUF file, and reads its chat templates."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.checkpoint.gguf.file import Metadata, read_metadata
from penstock.checkpoint.gguf.pre_tokenizers import PIECES, PRE_TOKENIZATIONS
from penstock.checkpoint.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    scores_of,
)
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

logger = logging.getLogger(__name__)

_TEMPLATE, _MERGES = "tokenizer.chat_template", "tokenizer.ggml.merges"
_MAX_ADDED_TOKENS = 2**16
_MAX_MERGES = 2**20
_ONE_SEPARATOR = ("modern-bert",)
"""Architectures whose pairs have EOS alone between the texts, though their files ask for another separator."""
_MAX_PIECE = 256
"""Maximum characters of a SentencePiece token; the longest in use have 64."""


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The tokenizer and chat templates of a GGUF file."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """bos_token, eos_token and so on, as chat templates name them, with their texts."""
    chat_templates: dict[str, str]
    """Templates by name."""


def read_tokenizer(path: Path) -> GGUFTokenizer | None:
    """Read the tokenizer of a GGUF file; None if it has none.

    Raises:
        CheckpointError: the file is damaged, or its tokenizer model is unsupported.
    """
    metadata = read_metadata(path)
    vocabulary = read_vocabulary(metadata)
    if vocabulary is None:
        return None
    read = _READERS[vocabulary.model]
    backend = read(metadata, vocabulary)
    special = {name: vocabulary.texts[token] for name, token in vocabulary.special.items()}
    return GGUFTokenizer(backend, special, _chat_templates(metadata))


def read_chat_templates(path: Path) -> dict[str, str]:
    """The chat templates of a GGUF file, by name. Raises as `read_tokenizer` does."""
    return _chat_templates(read_metadata(path))


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    name = _pre_tokenizer_name(metadata)
    if name in PIECES:
        return _merged_pieces(metadata, vocabulary, always_bos=PIECES[name])
    cut = PRE_TOKENIZATIONS[name]
    backend = _bpe(metadata, vocabulary, _merges(metadata), ignore_merges=cut.whole_words)
    if (normalizer := cut.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = cut.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return _finished(metadata, vocabulary, backend, _around(metadata, vocabulary, bos=cut.add_bos, sep=cut.add_sep))


def _pre_tokenizer_name(metadata: Metadata) -> str:
    name = metadata.find("tokenizer.ggml.pre", str)
    if name is None:
        logger.warning(
            "%s lacks tokenizer.ggml.pre: its texts may be tokenized differently than in training", metadata.file
        )
        name = "default"
    if name not in PRE_TOKENIZATIONS and name not in PIECES:
        raise CheckpointError(
            f"tokenizer.ggml.pre {shown(name)} in {metadata.file} is not supported; supported: "
            f"{', '.join((*PRE_TOKENIZATIONS, *PIECES))}"
        )
    return name


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    if (pairs := metadata.string_pairs(_MERGES)) is not None:  # as of nearly all files
        return pairs
    lines = metadata.strings(_MERGES)
    if lines is None:
        raise CheckpointError(f"{metadata.file} lacks {_MERGES}, which byte-pair encoding needs")
    return [_merge(metadata, line) for line in lines]


def _merge(metadata: Metadata, line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)  # the left part may begin with a space
    if cut < 0:
        raise CheckpointError(f"{_MERGES} in {metadata.file} has an entry without two parts: {shown(line)}")
    return line[:cut], line[cut + 1 :]


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    prefix = metadata.find("tokenizer.ggml.add_space_prefix", bool) is not False
    scores = scores_of(metadata, vocabulary)
    merges = merges_by_score(metadata.file, vocabulary.texts, vocabulary.kinds, scores)
    return _pieces(metadata, vocabulary, merges, _around(metadata, vocabulary, bos=True), prefix=prefix)


def _gemma4(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    return _merged_pieces(metadata, vocabulary, always_bos=True)


def _merged_pieces(metadata: Metadata, vocabulary: Vocabulary, *, always_bos: bool) -> Tokenizer:
    """SentencePiece tokens with the explicit merges of the model's `tokenizer.json`, as Gemma 4's."""
    around = _around(metadata, vocabulary, bos=always_bos, always_bos=always_bos)
    return _pieces(metadata, vocabulary, _merges(metadata), around, prefix=False)


def _pieces(
    metadata: Metadata,
    vocabulary: Vocabulary,
    merges: Sequence[tuple[str, str]],
    around: processors.TemplateProcessing | None,
    *,
    prefix: bool,
) -> Tokenizer:
    """A BPE tokenizer that writes spaces as ▁, like the models' own (legacy) `tokenizer.json`.

    With `prefix`, a space is put before each text and, as SentencePiece does, before each part after a control token.
    """
    unknown = vocabulary.texts[vocabulary.special["unk_token"]] if "unk_token" in vocabulary.special else None
    backend = _bpe(metadata, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    mark_spaces(backend, prefix=prefix)
    return _finished(metadata, vocabulary, backend, around)


def mark_spaces(backend: Tokenizer, *, prefix: bool) -> None:
    """Write spaces as ▁; with `prefix`, also put one before each text, which decoding removes."""
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def merges_by_score(
    file: Path, texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """BPE merges equivalent to SentencePiece's scores: pairs that form a token, in descending order of its score.

    Ties, among equal scores and among several splits of one token, follow the order of `transformers`.

    Raises:
        CheckpointError: the vocabulary exceeds the limits.
    """
    whole = {
        text: token
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found: list[tuple[float, int, int, int, int]] = []
    for text, token in whole.items():
        if len(text) > _MAX_PIECE or len(found) > _MAX_MERGES:
            raise CheckpointError(
                f"{file} has a vocabulary beyond the limits: a token of {len(text)} characters (at most "
                f"{_MAX_PIECE} are supported), or more than {_MAX_MERGES} merges"
            )
        for cut in range(1, len(text)):
            left, right = whole.get(text[:cut]), whole.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[token], -cut, cut - len(text), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(texts[left], texts[right]) for *_, left, right in found]


def _wordpiece(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """BERT's tokenizer, whose file marks the beginnings of words by ▁ instead of their continuations by ##.

    Files do not tell whether texts are converted to lower case: they are, if no token has an upper-case letter.
    """
    texts = [_word_part(text) for text in vocabulary.texts]
    normal = (text for text, kind in zip(texts, vocabulary.kinds, strict=True) if kind == NORMAL)
    stated = metadata.find("tokenizer.ggml.normalizer.lowercase", bool)
    lower = all(text == text.lower() or text.startswith("[") for text in normal) if stated is None else stated
    if len(set(texts)) < len(texts) or "[UNK]" not in texts:
        raise CheckpointError(f"{metadata.file} is damaged: its tokens are not unique, or [UNK] is missing")
    ids = {text: token for token, text in enumerate(texts)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    strips = metadata.find("tokenizer.ggml.normalizer.strip_accents", bool)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [text for text, kind in zip(texts, vocabulary.kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    known = [text for text in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]") if text in ids]
    backend.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys([*special, *known])])
    if not {"[CLS]", "[SEP]"} <= ids.keys():
        raise CheckpointError(f"{metadata.file} lacks the tokens [CLS] and [SEP], which are put around texts")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(text, ids[text]) for text in ("[CLS]", "[SEP]")],
    )
    return backend


def _word_part(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[1:] if text.startswith("▁") else f"##{text}"


def _unigram(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's unigram model, as of XLM-RoBERTa."""
    from penstock.checkpoint.gguf.unigram import Spaces, unigram_backend  # here: few files have one

    rules = metadata.numbers("tokenizer.ggml.precompiled_charsmap", "bB")
    spaces = Spaces(
        b"" if rules is None else rules.tobytes(),
        prefix=metadata.find("tokenizer.ggml.add_space_prefix", bool) is not False,
        single=metadata.find("tokenizer.ggml.remove_extra_whitespaces", bool) is not False,
        byte_fallback=False,
    )
    scores, unknown = scores_of(metadata, vocabulary), vocabulary.special.get("unk_token")
    backend = unigram_backend(metadata.file, vocabulary.texts, scores, vocabulary.kinds, unknown, spaces)
    special = list(dict.fromkeys([*vocabulary.of_kind(CONTROL, UNKNOWN), *_named(vocabulary)]))
    if len(special) > _MAX_ADDED_TOKENS:
        raise CheckpointError(f"{metadata.file} has {len(special)} control tokens; the limit is {_MAX_ADDED_TOKENS}")
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    around = _around(metadata, vocabulary, bos=True, eos=True, sep=True)
    if around is not None:
        backend.post_processor = around
    return backend


def _named(vocabulary: Vocabulary) -> list[str]:
    return [vocabulary.texts[token] for token in vocabulary.special.values()]


def _bpe(metadata: Metadata, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{metadata.file} holds a vocabulary that cannot be used: {error}") from error


def _finished(
    metadata: Metadata, vocabulary: Vocabulary, backend: Tokenizer, around: processors.TemplateProcessing | None
) -> Tokenizer:
    """Add the special and user-defined tokens, and the post-processor that puts tokens around texts."""
    special, plain = vocabulary.of_kind(CONTROL, UNKNOWN), vocabulary.of_kind(USER_DEFINED)
    if len(special) + len(plain) > _MAX_ADDED_TOKENS:
        raise CheckpointError(
            f"{metadata.file} has {len(special) + len(plain)} control and user-defined tokens; the limit is "
            f"{_MAX_ADDED_TOKENS}"
        )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    if around is not None:
        backend.post_processor = around
    return backend


def _around(
    metadata: Metadata,
    vocabulary: Vocabulary,
    *,
    bos: bool,
    eos: bool = False,
    sep: bool = False,
    always_bos: bool = False,
) -> processors.TemplateProcessing | None:
    """Puts BOS and EOS around texts, and a separator after the EOS between those of a pair; None: the file has none.

    Args:
        bos, eos, sep: whether it does if the file does not say.
        always_bos: whether texts begin with BOS whatever the file says.
    """
    begin = _added(metadata, vocabulary, "bos", bos, always=always_bos)
    end = _added(metadata, vocabulary, "eos", eos)
    between = {}
    if end and metadata.find("general.architecture", str) not in _ONE_SEPARATOR:
        between = _added(metadata, vocabulary, "sep" if "sep_token" in vocabulary.special else "eos", sep, key="sep")
    if not begin and not end:
        return None
    before, after, middle = ("".join(f" {name}:0" for name in names) for names in (begin, end, between))
    return processors.TemplateProcessing(
        single=f"{before} $A:0{after}".strip(),
        pair=f"{before} $A:0{after}{middle} $B:0{after}".strip(),
        special_tokens=list({**begin, **end, **between}.items()),
    )


def _added(
    metadata: Metadata,
    vocabulary: Vocabulary,
    name: str,
    default: bool,
    *,
    always: bool = False,
    key: str = "",
) -> dict[str, int]:
    """The special token `name` with its id, if it is added to every text; otherwise empty."""
    key = f"tokenizer.ggml.add_{key or name}_token"
    wanted, token = metadata.find(key, bool), f"{name}_token"
    if wanted and token not in vocabulary.special:
        raise CheckpointError(f"{key} is true in {metadata.file}, which defines no {name} token")
    added = always or (default if wanted is None else wanted)
    return {token: vocabulary.special[token]} if added and token in vocabulary.special else {}


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    names = (name for name in metadata.below(_TEMPLATE + ".") if name != "rerank")  # llama.cpp's own form, no Jinja
    named = {name: metadata.need(f"{_TEMPLATE}.{name}", str) for name in names}
    default = metadata.find(_TEMPLATE, str)
    return named if default is None else named | {"default": default}


_READERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "bert": _wordpiece,
    "t5": _unigram,
}
