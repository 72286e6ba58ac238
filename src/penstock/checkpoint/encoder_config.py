"""What a checkpoint's folder says of its use as an encoder, in the files of `sentence-transformers`. No torch.

modules.json                          what comes after the transformer, in order
1_Pooling/config.json                 how hidden states become one vector
2_Dense/config.json                   linear maps of it, with weights of their own
3_Normalize                           vectors of length 1
1_LogitScore/config.json              a language model's answer, yes or no, as a score
sentence_bert_config.json             the longest text, lower case; also sentence_roberta_config.json and the like
tokenizer_config.json                 the longest text, too; whether a pair's texts have tokens of two types
config_sentence_transformers.json     prompts that go before texts, the vectors' length, how they are compared
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.checkpoint.checkpoint import Checkpoint, read_json, read_text
from penstock.checkpoint.gguf.config import pooling_of
from penstock.errors import CheckpointError, shown

Task = Literal["generate", "embed", "score"]
"""What a model gives: text, the vector of a text, or the score of a query and a document."""
Pooling = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean"]
"""How the hidden states of a text's tokens become one vector, as `sentence-transformers` computes it."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two vectors are compared; a distance counts with a minus sign."""
HeadActivation = Literal["tanh", "gelu", "relu", "sigmoid", "silu"]

_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}
_OLDER_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""In the order in which several give their parts."""
_SHAPE_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
"""Names of one file in `sentence-transformers`; the first that is there counts."""
_KNOWN: dict[str, tuple[str, ...]] = {
    "shape": (
        *("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"),
        "unpad_inputs",  # how it is computed
    ),
    "about": (
        *("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"),
        "activation_fn",
    ),
    "Pooling": ("embedding_dimension", "word_embedding_dimension", "include_prompt", "pooling_mode", *_OLDER_POOLINGS),
    "Dense": ("in_features", "out_features", "bias", "activation_function", "use_residual"),
    "Normalize": (),
    "LogitScore": ("true_token_id", "false_token_id"),
}
"""Settings that are read of each file, or have no effect."""
_PART_KEYS = ("module_input_name", "module_output_name")
"""Which part of a text's result a module reads and writes; here its vector."""
_MAX_DENSE = 2**20
_MAX_LENGTH = 2**30


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear map behind the pooling, in a folder of its own."""

    folder: str
    in_size: int
    out_size: int
    bias: bool
    activation: HeadActivation | None


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """How texts become vectors or scores."""

    task: Task
    pooling: tuple[Pooling, ...] | None = None
    """None: the folder does not say."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    """Whether vectors get length 1."""
    score_tokens: tuple[int, int | None] | None = None
    """The tokens of yes and no, whose logits are the score."""
    sigmoid: bool = False
    """Whether a score is the sigmoid of what the model gives."""
    max_length: int | None = None
    """Tokens of the longest text; None: what the model takes."""
    token_types: bool = True
    """Whether the texts of a pair have tokens of two types, where the model knows any."""
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    """What goes before texts, by name."""
    default_prompt: str | None = None
    """The name of the prompt of texts that name none."""
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    """How many of a vector's first elements are kept; None: all."""
    vector_size: int = 0
    """Numbers that a text becomes; filled in when the model is known, as the next."""
    is_asked: bool = False
    """Whether a score is a language model's answer to a question."""
    unread: tuple[str, ...] = ()
    """Settings of the folder's files that are unknown, with their files."""


def read_encoder_config(checkpoint: Checkpoint, task: Task) -> EncoderConfig:
    """Read the folder of a model that embeds or scores, or its GGUF file, whose vectors llama.cpp normalizes.

    Raises:
        CheckpointError: a file is damaged, or names something that is not known here.
    """
    folder = checkpoint.path
    if checkpoint.gguf is not None:
        pooling = pooling_of(checkpoint.gguf)
        named = None if pooling is None else (pooling,)
        return EncoderConfig(task, named, normalize=named is not None, sigmoid=task == "score")
    found: dict[str, Any] = {}
    dense, unread = [], []
    for kind, path in _modules(folder):
        if kind in _KNOWN:
            unread += _unread(folder / path / "config.json", kind)
        if kind == "Pooling":
            found["pooling"] = _pooling(folder / path / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind == "LogitScore":
            found["score_tokens"] = _score_tokens(folder / path / "config.json")
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(
                f"{folder / 'modules.json'} names the module {shown(kind)}, which is not known; known are Transformer, "
                "Pooling, Dense, Normalize and LogitScore"
            )
    shape_file = next((folder / name for name in _SHAPE_FILES if (folder / name).exists()), folder / _SHAPE_FILES[0])
    shape = read_json(shape_file) or {}
    _check_modalities(shape, shape_file)
    about_file = folder / "config_sentence_transformers.json"
    about = read_json(about_file) or {}
    unread += _unread(shape_file, "shape") + _unread(about_file, "about")
    tokenizer = read_json(folder / "tokenizer_config.json") or {}
    prompts = _typed(about, "prompts", dict, folder) or {}
    default = _typed(about, "default_prompt_name", str, folder)
    if default is not None and default not in prompts:
        raise CheckpointError(f"default_prompt_name in {folder} is {shown(default)}, and there is no such prompt")
    return EncoderConfig(
        task=task,
        dense=tuple(dense),
        sigmoid=task == "score" and _has_sigmoid(checkpoint.config, about),
        max_length=_typed(shape, "max_seq_length", int, folder) or _longest(tokenizer),
        token_types=_has_token_types(tokenizer),
        lower_case=bool(_typed(shape, "do_lower_case", bool, folder)),
        prompts={str(name): text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt=default,
        similarity=_similarity(about, folder),
        truncate_dim=_typed(about, "truncate_dim", int, folder),
        unread=tuple(unread),
        **found,
    )


def _unread(file: Path, kind: str) -> list[str]:
    """The settings of a file that are unknown, with its name.

    Raises:
        CheckpointError: the module reads or writes something else than a text's vector.
    """
    config = read_json(file) or {}
    if kind in ("Dense", "Normalize"):
        for key in _PART_KEYS:
            if config.get(key) not in (None, "sentence_embedding"):
                raise CheckpointError(f"{key} in {file} must be sentence_embedding, not {shown(config[key])}")
    known = (*_KNOWN[kind], *_PART_KEYS)
    empty: tuple[Any, ...] = (None, False, "", [], {})
    return [f"{key} in {file}" for key, value in sorted(config.items()) if key not in known and value not in empty]


def _check_modalities(shape: Mapping[str, Any], file: Path) -> None:
    """
    Raises:
        CheckpointError: texts are not what the transformer's last layer or its head gives.
    """
    given = shape.get("modality_config")
    text = given.get("text") if isinstance(given, dict) else None
    if isinstance(text, dict):
        for key, names in (("method", ("forward",)), ("method_output_name", ("last_hidden_state", "logits"))):
            if text.get(key) not in (None, *names):
                raise CheckpointError(
                    f"{key} of modality_config in {file} must be {' or '.join(names)}, not {shown(text[key])}"
                )


def _similarity(about: Mapping[str, Any], folder: Path) -> Similarity:
    named = _typed(about, "similarity_fn_name", str, folder) or "cosine"
    if named not in get_args(Similarity):
        raise CheckpointError(
            f"similarity_fn_name {shown(named)} in config_sentence_transformers.json of {folder} is not supported; "
            f"supported: {', '.join(get_args(Similarity))}"
        )
    return cast(Similarity, named)


def named_task(checkpoint: Checkpoint) -> Task | None:
    """What the folder or file says that the model is for; None: it says nothing."""
    if checkpoint.gguf is not None:
        return None if pooling_of(checkpoint.gguf) is None else "embed"
    kinds = [kind for kind, _ in _modules(checkpoint.path)]
    if not kinds:
        return None
    return "score" if "LogitScore" in kinds else "embed"


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module; none where there is no modules.json."""
    file = folder / "modules.json"
    text = read_text(file)
    if text is None:
        return []
    try:
        listed = json.loads(text)
        entries = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in listed]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} must be a list of modules with type and path: {error}") from error
    for _, path in entries:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file} names {shown(path)}: modules must be within the folder")
    return entries


def _pooling(file: Path) -> tuple[Pooling, ...]:
    config = _need(file)
    if config.get("include_prompt", True) is not True:
        raise CheckpointError(f"include_prompt in {file} must be true: prompts are pooled with their texts here")
    named = config.get("pooling_mode")
    if named is not None:
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not names or not all(name in _POOLINGS for name in names):
            raise CheckpointError(f"pooling_mode {shown(named)} in {file} is not known; known: {', '.join(_POOLINGS)}")
        return tuple(_POOLINGS[name] for name in names)
    return tuple(mode for key, mode in _OLDER_POOLINGS.items() if config.get(key)) or ("mean",)


def _dense(folder: Path, path: str) -> DenseModule:
    file = folder / path / "config.json"
    config = _need(file)
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    if not all(isinstance(size, int) and 1 <= size <= _MAX_DENSE for size in sizes):
        raise CheckpointError(f"in_features and out_features in {file} must be whole numbers from 1 to {_MAX_DENSE}")
    if config.get("use_residual"):
        raise CheckpointError(f"use_residual in {file} is not supported")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
    if name not in ("identity", *get_args(HeadActivation)):
        raise CheckpointError(f"activation_function {shown(name)} in {file} is not known")
    activation = None if name == "identity" else cast(HeadActivation, name)
    in_size, out_size = cast("list[int]", sizes)
    return DenseModule(path, in_size, out_size, config.get("bias", True) is True, activation)


def _score_tokens(file: Path) -> tuple[int, int | None]:
    config = _need(file)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(true, int) or not (false is None or isinstance(false, int)):
        raise CheckpointError(f"true_token_id and false_token_id in {file} must be token ids")
    return true, false


def _has_sigmoid(config: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """As `CrossEncoder` chooses: what the files say, else a sigmoid of a single label."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or about.get("activation_fn")
    if isinstance(named, str):
        return named.endswith("Sigmoid")
    return True


def _longest(tokenizer: Mapping[str, Any]) -> int | None:
    """Tokens that the tokenizer's config allows a text; where it has no limit, it names a huge number."""
    most = tokenizer.get("model_max_length")
    return most if isinstance(most, int) and 1 <= most <= _MAX_LENGTH else None


def _has_token_types(tokenizer: Mapping[str, Any]) -> bool:
    """As in `transformers`: the config's list, or that of the tokenizer's class; plain classes have none."""
    listed = tokenizer.get("model_input_names")
    if isinstance(listed, list):
        return "token_type_ids" in listed
    return tokenizer.get("tokenizer_class") not in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _need(file: Path) -> dict[str, Any]:
    config = read_json(file)
    if config is None:
        raise CheckpointError(f"there is no {file}, which modules.json names")
    return config


def _typed(values: Mapping[str, Any], key: str, kind: type, folder: Path) -> Any:
    value = values.get(key)
    is_other = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if value is not None and (is_other or (isinstance(value, int) and kind is int and value < 1)):
        raise CheckpointError(f"{key} in the files of {folder} must be of another kind, not {shown(value)}")
    return value
