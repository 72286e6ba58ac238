"""Converts vocab.json with merges.txt: the byte-level BPE of GPT-2, Qwen 2 and RoBERTa (Radford et al. 2019)."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.checkpoint.checkpoint import read_text
from penstock.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZATIONS
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown
from penstock.text.vocabularies.form import Converted, Folder, with_added_tokens

VOCAB, MERGES = "vocab.json", "merges.txt"
_MAX_BYTES = 16 * 2**20
"""Maximum bytes of each file; the largest in use have 4 MB."""
_MAX_MERGES = 2**20
_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class _Family:
    pre: str
    """The pre-tokenizer, by its name in GGUF files."""
    special: Mapping[str, str] = field(default_factory=dict)
    is_roberta: bool = False
    """Whether texts are put between <s> and </s>, and pairs have another </s> between them."""


_GPT2 = _Family("gpt-2", dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
_QWEN2 = _Family("qwen2", {"eos_token": _END, "pad_token": _END})
_QWEN35 = _Family("qwen35", _QWEN2.special)
_ROBERTA = _Family(
    "gpt-2",
    {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    is_roberta=True,
)
_CLASSES = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), _GPT2),
    "Qwen2Tokenizer": _QWEN2,
    "Qwen3_5Tokenizer": _QWEN35,
    **dict.fromkeys(("RobertaTokenizer", "LongformerTokenizer"), _ROBERTA),
}
_MODEL_TYPES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "opt", "phi", "codegen"), _GPT2),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN2),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN35),
    "roberta": _ROBERTA,
}
"""Families by model type, for folders without a tokenizer class in their configs."""
_DIGITS_SPLIT = {"starcoder2", "gpt_bigcode"}
"""Model types whose tokenizers are called GPT2Tokenizer, but split numbers into digits."""


def convert_vocab_json(folder: Folder) -> Converted:
    """Convert vocab.json and merges.txt.

    Raises:
        CheckpointError: a file is missing, too large or damaged, or the family of the tokenizer is unknown.
    """
    file = folder.path / VOCAB
    family = _family(folder)
    vocabulary = with_added_tokens(_read_vocabulary(file), folder.added_tokens(), file)
    try:
        backend = Tokenizer(models.BPE(vocabulary, _read_merges(folder.path / MERGES)))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} and {MERGES} hold a vocabulary that cannot be used: {error}") from error
    prefix = folder.setting("add_prefix_space") or False
    if family.pre == "gpt-2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    elif prefix:
        raise CheckpointError(
            f"add_prefix_space is true in tokenizer_config.json of {folder.path}: with {VOCAB}, it is supported for "
            "GPT-2's and RoBERTa's tokenizers only; convert the tokenizer to tokenizer.json"
        )
    else:
        cut = PRE_TOKENIZATIONS[family.pre]
        backend.pre_tokenizer = cut.pre_tokenizer()
        if (normalizer := cut.normalizer()) is not None:
            backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    if family.is_roberta:
        backend.post_processor = roberta_pairs(vocabulary, file)
    special = {name: text for name, text in family.special.items() if text in vocabulary}
    return Converted(backend, special)


def _family(folder: Folder) -> _Family:
    name, model_type = folder.tokenizer_class, folder.model_config.get("model_type")
    if model_type in _DIGITS_SPLIT and name in (None, "GPT2Tokenizer"):
        return _Family("starcoder", _GPT2.special)
    family = _CLASSES.get(name) if name is not None else None
    if family is None and name in (None, "PreTrainedTokenizer") and isinstance(model_type, str):
        family = _MODEL_TYPES.get(model_type)
    if family is None:
        raise CheckpointError(
            f"{folder.path} has {VOCAB} and no tokenizer.json, and its tokenizer_class is {shown(name)} (model_type "
            f"{shown(model_type)}), whose pre-tokenizer is not known; known: {', '.join(_CLASSES)}. Convert it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    return family


def _read_vocabulary(file: Path) -> dict[str, int]:
    text = read_text(file, _MAX_BYTES)
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, int])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} must be a JSON object of token ids by text: {error}") from error


def _read_merges(file: Path) -> list[tuple[str, str]]:
    text = read_text(file, _MAX_BYTES)
    if text is None:
        raise CheckpointError(f"{file} is missing, which {VOCAB} needs without tokenizer.json")
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#version")]
    if len(lines) > _MAX_MERGES:
        raise CheckpointError(f"{file} has {len(lines)} merges; at most {_MAX_MERGES} are read")
    merges = []
    for line in lines:
        left, space, right = line.rstrip("\r").partition(" ")
        if not (left and space and right) or " " in right:
            raise CheckpointError(f"{file} has a line that is not two tokens with a space between: {shown(line)}")
        merges.append((left, right))
    return merges


def roberta_pairs(vocabulary: Mapping[str, int], file: Path) -> processors.TemplateProcessing:
    """The post-processor that puts <s> and </s> around texts.

    Raises:
        CheckpointError: the vocabulary lacks them.
    """
    missing = [text for text in ("<s>", "</s>") if text not in vocabulary]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}, which RoBERTa's tokenizer puts around texts")
    return processors.TemplateProcessing(
        single="<s>:0 $A:0 </s>:0",
        pair="<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0",
        special_tokens=[(text, vocabulary[text]) for text in ("<s>", "</s>")],
    )
