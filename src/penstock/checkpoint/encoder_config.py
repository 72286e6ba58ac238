"""Reads the settings of embedding models and rerankers from the files of `sentence-transformers`. No torch.

modules.json                          the modules after the transformer, in order
1_Pooling/config.json                 pooling of hidden states to one vector
2_Dense/config.json                   a linear map of the vector, with its own weights
3_Normalize                           scales vectors to length 1
1_LogitScore/config.json              score from a language model's logits of yes and no
sentence_bert_config.json             maximum length, lower case; also sentence_roberta_config.json and the like
tokenizer_config.json                 maximum length; whether the texts of a pair have different token types
config_sentence_transformers.json     prompts to put before texts, truncation of vectors, similarity
"""

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.checkpoint.checkpoint import Checkpoint, read_json, read_text
from penstock.checkpoint.gguf.file import GGUFFile
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

Task = Literal["generate", "embed", "score"]
"""Output of a model: text, the vector of a text, or the score of a query and a document."""
Pooling = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean"]
"""Pooling of the hidden states of a text's tokens to one vector, as in `sentence-transformers`."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Similarity of two vectors; distances are negated."""
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
"""In the order in which several poolings are concatenated."""
_SHAPE_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
"""Possible names of one file of `sentence-transformers`; the first that exists is read."""
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
"""Known settings of each file: those that are read, or have no effect."""
_PART_KEYS = ("module_input_name", "module_output_name")
"""Keys that name a module's input and output; both must be the vector."""
_MAX_DENSE = 2**20
_MAX_LENGTH = 2**30


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear map after the pooling, stored in its own folder."""

    folder: str
    in_size: int
    out_size: int
    bias: bool
    activation: HeadActivation | None


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Settings of an encoder: pooling, modules after it, prompts and limits."""

    task: Task
    pooling: tuple[Pooling, ...] | None = None
    """None: not stated by the folder."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    score_tokens: tuple[int, int | None] | None = None
    """Ids of the tokens yes and no, from whose logits the score is computed."""
    sigmoid: bool = False
    """Whether a sigmoid is applied to the model's score."""
    max_length: int | None = None
    """Maximum tokens of a text; None: the model's maximum."""
    token_types: bool = True
    """Whether the texts of a pair have different token types, if the model has token types."""
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    """Prefixes of texts, by name."""
    default_prompt: str | None = None
    """Name of the prompt for texts without a named prompt."""
    similarity: Similarity = "cosine"
    truncate_dim: int | None = None
    """Number of leading elements of a vector to keep; None: all."""
    vector_size: int = 0
    """Number of elements of a text's result; set, like the next field, once the model is known."""
    is_asked: bool = False
    """Whether the score is a language model's answer to a yes-or-no question."""
    unread: tuple[str, ...] = ()
    """Unknown settings in the folder's files, with the names of the files."""


def read_encoder_config(checkpoint: Checkpoint, task: Task) -> EncoderConfig:
    """Read the encoder settings of a folder or a GGUF file (whose vectors are normalized, as in llama.cpp).

    Raises:
        CheckpointError: a file is damaged, or names something unsupported.
    """
    folder = checkpoint.path
    if checkpoint.gguf is not None:
        return _of_gguf(checkpoint.gguf, task)
    settings, unread = _of_modules(folder)
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
        sigmoid=task == "score" and _has_sigmoid(checkpoint.config, about),
        max_length=_typed(shape, "max_seq_length", int, folder) or _longest(tokenizer),
        token_types=_has_token_types(tokenizer),
        lower_case=bool(_typed(shape, "do_lower_case", bool, folder)),
        prompts={str(name): text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt=default,
        similarity=_similarity(about, folder),
        truncate_dim=_typed(about, "truncate_dim", int, folder),
        unread=tuple(unread),
        **settings,
    )


def _of_gguf(file: GGUFFile, task: Task) -> EncoderConfig:
    from penstock.checkpoint.gguf.config import pooling_of  # here: a folder has no need of it

    pooling = pooling_of(file)
    named = None if pooling is None or pooling == "rank" else (pooling,)
    return EncoderConfig(task, named, _dense_of_gguf(file), normalize=named is not None, sigmoid=task == "score")


def _of_modules(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in the folder's modules, by their names in `EncoderConfig`, and the keys that are not read."""
    settings: dict[str, Any] = {}
    dense, unread = [], []
    for kind, path in _modules(folder):
        if kind in _KNOWN:
            unread += _unread(folder / path / "config.json", kind)
        if kind == "Pooling":
            settings["pooling"] = _pooling(folder / path / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind == "Normalize":
            settings["normalize"] = True
        elif kind == "LogitScore":
            settings["score_tokens"] = _score_tokens(folder / path / "config.json")
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(
                f"{folder / 'modules.json'} names the module {shown(kind)}, which is not known; known are Transformer, "
                "Pooling, Dense, Normalize and LogitScore"
            )
    return {**settings, "dense": tuple(dense)}, unread


def _dense_of_gguf(file: GGUFFile) -> tuple[DenseModule, ...]:
    """EmbeddingGemma's linear maps, where the file has them."""
    from penstock.checkpoint.gguf.encoders import DENSE_MAPS

    maps = [(name, file.tensors[f"{name}.weight"]) for name in DENSE_MAPS if f"{name}.weight" in file.tensors]
    for name, info in maps:
        if len(info.shape) != 2 or max(info.shape) > _MAX_DENSE:
            raise CheckpointError(f"{file.path} is damaged: its tensor {name}.weight has the shape {list(info.shape)}")
    return tuple(DenseModule(name, info.shape[1], info.shape[0], bias=False, activation=None) for name, info in maps)


def _unread(file: Path, kind: str) -> list[str]:
    """The unknown settings of a file, with its name.

    Raises:
        CheckpointError: the module reads or writes anything but a text's vector.
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
        CheckpointError: the input is not text, or the output not that of the transformer's last layer or head.
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
    """The task stated by the folder or file; None: not stated."""
    if checkpoint.gguf is not None:
        from penstock.checkpoint.gguf.config import pooling_of

        pooling = pooling_of(checkpoint.gguf)
        return None if pooling is None else "score" if pooling == "rank" else "embed"
    kinds = [kind for kind, _ in _modules(checkpoint.path)]
    if not kinds:
        return None
    return "score" if "LogitScore" in kinds else "embed"


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(Kind, folder) of each module; empty without modules.json."""
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
    """Whether a sigmoid is applied to a single score, as in `CrossEncoder`: as the files state, otherwise True."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or about.get("activation_fn")
    if isinstance(named, str):
        return named.endswith("Sigmoid")
    return True


def _longest(tokenizer: Mapping[str, Any]) -> int | None:
    """Maximum tokens of a text in the tokenizer's config, which states a huge number for no limit."""
    most = tokenizer.get("model_max_length")
    return most if isinstance(most, int) and 1 <= most <= _MAX_LENGTH else None


def _has_token_types(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the tokenizer returns token types: by its config's list or its class, as in `transformers`."""
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
