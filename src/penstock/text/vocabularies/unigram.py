"""Converts SentencePiece's unigram models (Kudo 2018): those of XLM-RoBERTa, CamemBERT, T5 and others."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from tokenizers import processors

from penstock.checkpoint.gguf.unigram import Spaces, unigram_backend
from penstock.checkpoint.gguf.vocabulary import CONTROL, UNKNOWN
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown
from penstock.text.vocabularies.form import Converted, Folder, add_special, with_added_tokens
from penstock.text.vocabularies.sentencepiece_proto import SentencePieceModel
from penstock.text.vocabularies.vocab_json import roberta_pairs

_EXTRA_IDS = 100
"""Sentinels of T5 where the config does not say."""
_ROBERTA = {
    **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
    **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
    **{f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")},
}
_OF_MODEL_TYPES = {
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
}
"""Classes where neither config names one."""


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
    name, model_type = folder.tokenizer_class, folder.model_config.get("model_type")
    if name is None and isinstance(model_type, str):
        name = _OF_MODEL_TYPES.get(model_type, f"of the model type {model_type}")
    if name not in _LAYOUTS:
        raise CheckpointError(
            f"{file} is a unigram model of the class {shown(name)}, whose ids are not known; known: "
            f"{', '.join(layout for layout in _LAYOUTS if layout)}. Convert it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    if not model.escape_whitespaces or model.whitespace_as_suffix:
        raise CheckpointError(
            f"{file} cannot be converted: it treats spaces in another way (escape_whitespaces, "
            "treat_whitespace_as_suffix)"
        )
    layout = _LAYOUTS[name]
    before, after = layout.before, layout.after + (_sentinels(folder, file) if name == "T5Tokenizer" else ())
    texts = [*before, *model.texts[layout.skipped :], *after]
    kinds = [*[CONTROL] * len(before), *model.kinds[layout.skipped :], *[CONTROL] * len(after)]
    scores = [*[0.0] * len(before), *model.scores[layout.skipped :], *[0.0] * len(after)]
    ids = {text: token for token, text in enumerate(texts)}
    with_added_tokens(ids, folder.added_tokens(), file)
    special = {**model.special, **layout.special}
    wanted = folder.setting("add_prefix_space")
    spaces = Spaces(
        model.charsmap,
        prefix=model.add_dummy_prefix if wanted is None else wanted,
        single=model.remove_extra_whitespaces,
        byte_fallback=model.byte_fallback,
    )
    backend = unigram_backend(file, texts, scores, kinds, ids.get(special.get("unk_token", "")), spaces)
    marked = [text for text, kind in zip(texts, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    add_special(backend, list(dict.fromkeys([*marked, *(text for text in special.values() if text in ids)])))
    if layout.special:
        backend.post_processor = roberta_pairs(ids, file)
    elif name == "T5Tokenizer" and special.get("eos_token") in ids:
        end = special["eos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:0 {end}:0", special_tokens=[(end, ids[end])]
        )
    return Converted(backend, special, add_bos=name == "LlamaTokenizer")


def _sentinels(folder: Folder, file: Path) -> tuple[str, ...]:
    """T5's tokens after the pieces, the last number first."""
    count = folder.config.get("extra_ids", _EXTRA_IDS)
    if not isinstance(count, int) or not 0 <= count <= 10_000:
        raise CheckpointError(f"extra_ids in tokenizer_config.json beside {file} must be a number, not {shown(count)}")
    return tuple(f"<extra_id_{number}>" for number in reversed(range(count)))
