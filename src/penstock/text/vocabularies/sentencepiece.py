"""Converts models of SentencePiece: of BPE, as of Llama 2, Mistral, Gemma and their kin, or a unigram model."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from penstock.checkpoint.gguf.tokenizer import mark_spaces, merges_by_score
from penstock.checkpoint.gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED
from penstock.errors import CheckpointError, shown
from penstock.text.vocabularies.form import Converted, Folder, add_special, with_added_tokens
from penstock.text.vocabularies.sentencepiece_proto import BPE, UNIGRAM, SentencePieceModel, read_sentencepiece
from penstock.text.vocabularies.unigram import convert_unigram

SENTENCEPIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
"""Names of its files; a folder has one."""
_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


def convert_sentencepiece(folder: Folder) -> Converted:
    """Convert the file of a model.

    Raises:
        CheckpointError: the file is too large or damaged, or the model is of another kind, or normalizes texts and is
            BPE.
    """
    file = next(folder.path / name for name in SENTENCEPIECE if (folder.path / name).exists())
    model = read_sentencepiece(file)
    if model.model_type == UNIGRAM:
        return convert_unigram(folder, model, file)
    _check_supported(model, file)
    pieces = {text: token for token, text in enumerate(model.texts)}
    if len(pieces) < len(model.texts):
        raise CheckpointError(f"{file} is damaged: several of its {len(model.texts)} pieces are equal")
    vocabulary = with_added_tokens(pieces, folder.added_tokens(), file)
    merges = merges_by_score(file, model.texts, model.kinds, model.scores)
    unknown = model.special.get("unk_token")
    options = {"fuse_unk": True, "byte_fallback": model.byte_fallback, "unk_token": unknown}
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} holds a vocabulary that cannot be used: {error}") from error
    wanted = folder.setting("add_prefix_space")
    prefix = model.add_dummy_prefix if wanted is None else wanted
    mark_spaces(backend, prefix=prefix)
    if prefix and folder.setting("legacy") is False:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    by_kind = dict(zip(model.texts, model.kinds, strict=True))
    add_special(backend, [text for text, kind in by_kind.items() if kind in (CONTROL, UNKNOWN)])
    backend.add_tokens([AddedToken(text, normalized=False) for text, kind in by_kind.items() if kind == USER_DEFINED])
    return Converted(backend, model.special, add_bos=True)


def _check_supported(model: SentencePieceModel, file: Path) -> None:
    wrong = []
    if model.model_type != BPE:
        wrong.append(
            f"its model type is {_MODEL_TYPES.get(model.model_type, shown(model.model_type))}, not BPE or unigram"
        )
    if model.charsmap:
        wrong.append(f"it normalizes texts (by {shown(model.normalization)})")
    if model.remove_extra_whitespaces or not model.escape_whitespaces or model.whitespace_as_suffix:
        wrong.append("it treats spaces otherwise than Llama's and Gemma's (remove_extra_whitespaces and others)")
    if any(score != score for score in model.scores):
        wrong.append("a score is NaN")
    if wrong:
        raise CheckpointError(
            f"{file} cannot be converted: {'; '.join(wrong)}. Convert it with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
