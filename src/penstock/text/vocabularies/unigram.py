"""Converts SentencePiece's unigram models (Kudo 2018): those of XLM-RoBERTa, CamemBERT, T5 and others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.checkpoint.gguf.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from penstock.errors import CheckpointError, shown
from penstock.text.vocabularies.charsmap import check_charsmap
from penstock.text.vocabularies.form import Converted, Folder, add_special, with_added_tokens
from penstock.text.vocabularies.sentencepiece_proto import SentencePieceModel
from penstock.text.vocabularies.vocab_json import roberta_pairs

_UNUSED = 5
_MAX_PIECE = 256
"""Maximum characters of a piece; the longest in use have 64."""
_EXTRA_IDS = 100
"""Sentinels of T5 where the config does not say."""
_ROBERTA = {
    **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
    **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
    **{f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")},
}
_OF_MODEL_TYPES = {"xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer"}


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a class of tokenizers numbers the pieces of its model."""

    before: tuple[str, ...] = ()
    """Tokens before the pieces."""
    skipped: int = 0
    """Pieces at the beginning of the model that it leaves out."""
    after: tuple[str, ...] = ()
    special: Mapping[str, str] = field(default_factory=dict)


_XLM_ROBERTA = _Layout(("<s>", "<pad>", "</s>", "<unk>"), 3, ("<mask>",), _ROBERTA)
_LAYOUTS = {
    **dict.fromkeys((None, "LlamaTokenizer", "PreTrainedTokenizer", "T5Tokenizer"), _Layout()),
    "XLMRobertaTokenizer": _XLM_ROBERTA,
    "CamembertTokenizer": _Layout(
        ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1, ("<mask>",), _ROBERTA
    ),
}


def convert_unigram(folder: Folder, model: SentencePieceModel, file: Path) -> Converted:
    """Convert a unigram model.

    Raises:
        CheckpointError: it is damaged, or its class or its treatment of spaces is not known.
    """
    name = folder.tokenizer_class
    if name is None and folder.model_config.get("model_type") in _OF_MODEL_TYPES:
        name = _OF_MODEL_TYPES[folder.model_config["model_type"]]
    if name not in _LAYOUTS:
        raise CheckpointError(
            f"{file} is a unigram model of the class {shown(name)}, whose ids are not known; known: "
            f"{', '.join(layout for layout in _LAYOUTS if layout)}. Convert it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    _check(model, file)
    layout = _LAYOUTS[name]
    pieces = _pieces(model, layout) + (_sentinels(folder, file) if name == "T5Tokenizer" else [])
    special = {**model.special, **layout.special}
    texts = {text: token for token, (text, _) in enumerate(pieces)}
    added = folder.added_tokens()
    if len(texts) < len(pieces):
        raise CheckpointError(f"{file} is damaged: several of its {len(pieces)} pieces are equal")
    with_added_tokens(texts, added, file)
    unknown = texts.get(special.get("unk_token", ""))
    try:
        backend = Tokenizer(models.Unigram(pieces, unknown, model.byte_fallback))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} holds a vocabulary that cannot be used: {error}") from error
    wanted = folder.setting("add_prefix_space")
    _set_spaces(backend, model, prefix=model.add_dummy_prefix if wanted is None else wanted)
    kinds = dict(zip(model.texts, model.kinds, strict=True))
    marked = [text for text, kind in kinds.items() if kind in (CONTROL, UNKNOWN) and text in texts]
    add_special(backend, list(dict.fromkeys([*marked, *(text for text in special.values() if text in texts)])))
    backend.add_tokens([AddedToken(text, normalized=False) for text in _kept_whole(model)])
    if layout.special:
        backend.post_processor = roberta_pairs(texts, file)
    elif name == "T5Tokenizer" and special.get("eos_token") in texts:
        end = special["eos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:0 {end}:0", special_tokens=[(end, texts[end])]
        )
    return Converted(backend, special, add_bos=name == "LlamaTokenizer")


def _check(model: SentencePieceModel, file: Path) -> None:
    wrong = []
    if not model.escape_whitespaces or model.whitespace_as_suffix:
        wrong.append("it treats spaces in another way (escape_whitespaces, treat_whitespace_as_suffix)")
    if not model.texts:
        wrong.append("it has no pieces")
    if any(score != score for score in model.scores):
        wrong.append("a score is NaN")
    if max(map(len, model.texts), default=0) > _MAX_PIECE:
        wrong.append(f"a piece has more than {_MAX_PIECE} characters")
    if model.charsmap:
        try:
            check_charsmap(model.charsmap)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(f"{file} cannot be converted: {'; '.join(wrong)}")


def _pieces(model: SentencePieceModel, layout: _Layout) -> list[tuple[str, float]]:
    """Texts and scores by id. Pieces that SentencePiece never chooses have the least score, or a text that no input
    has: the score of unknown characters depends on the least one.
    """
    kept = list(zip(model.texts, model.scores, model.kinds, strict=True))[layout.skipped :]
    normal = [score for _, score, kind in kept if kind == NORMAL] or [0.0]
    found = [(text, 0.0) for text in layout.before]
    for text, score, kind in kept:
        if kind == USER_DEFINED:
            found.append((text, len(text) * max(normal) - 0.1))  # as SentencePiece does, so that it is chosen
        else:
            found.append((f"{text}\0" if kind == _UNUSED else text, score if kind == NORMAL else min(normal)))
    return [*found, *((text, 0.0) for text in layout.after)]


def _kept_whole(model: SentencePieceModel) -> list[str]:
    """User-defined pieces that the normalizer would change, and so must be cut out of a text before."""
    normalize = _normalizer(model, prefix=False).normalize_str
    defined = (text for text, kind in zip(model.texts, model.kinds, strict=True) if kind == USER_DEFINED)
    return [text for text in defined if normalize(text) != text]


def _sentinels(folder: Folder, file: Path) -> list[tuple[str, float]]:
    """T5's tokens after the pieces, the last number first."""
    count = folder.config.get("extra_ids", _EXTRA_IDS)
    if not isinstance(count, int) or not 0 <= count <= 10_000:
        raise CheckpointError(f"extra_ids in tokenizer_config.json beside {file} must be a number, not {shown(count)}")
    return [(f"<extra_id_{number}>", 0.0) for number in reversed(range(count))]


def _normalizer(model: SentencePieceModel, *, prefix: bool) -> normalizers.Normalizer:
    """Normalize as the model says, write spaces as ▁, and with `prefix` put one before each text."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    steps += [normalizers.Prepend("▁")] if prefix else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def _set_spaces(backend: Tokenizer, model: SentencePieceModel, *, prefix: bool) -> None:
    backend.normalizer = _normalizer(model, prefix=prefix)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    bytes_of = [decoders.ByteFallback()] if model.byte_fallback else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_of, decoders.Fuse(), *strip])
    if model.byte_fallback:  # the text <0x41> is no byte
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=<)(?=0x[0-9A-F]{2}>)"), "isolated")
