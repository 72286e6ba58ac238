"""Encoder architectures, and the conversion of decoders to encoders.

A decoder that embeds or scores runs like any encoder: it computes whole texts, without the prefix cache. Its hidden
states are pooled to an embedding, or the difference of two logits is the score.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.encoder_config import EncoderConfig, Task, named_task, read_encoder_config
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.disentangled import DisentangledSpec
from penstock.layers.encoder_head import DenseSpec, TokenScoreSpec
from penstock.models.architectures import ENCODERS
from penstock.models.hf_config import HFConfig
from penstock.models.spec import EncoderSpec, HeadPart, ModelSpec

if TYPE_CHECKING:
    from penstock.checkpoint.gguf.file import GGUFFile


def task_of(checkpoint: Checkpoint) -> Task:
    """The task of a model: given by the caller, or derived from its folder or its architecture.

    Raises:
        CheckpointError: the model does not support the caller's task.
    """
    wanted, listed = checkpoint.task, checkpoint.config.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    encoder = next((name for name in names if name in ENCODERS), None)
    scores = encoder is not None and encoder.endswith("ForSequenceClassification")
    if wanted is None:
        return "score" if scores else named_task(checkpoint) or ("embed" if encoder is not None else "generate")
    if (encoder is not None and wanted == "generate") or (scores and wanted == "embed"):
        raise CheckpointError(f"{checkpoint.name} is a {encoder}: it cannot {wanted}; leave task out")
    if wanted == "score" and encoder is not None and not scores and not encoder.startswith("Qwen"):
        raise CheckpointError(
            f"{checkpoint.name} is a {encoder}, which has no classification head; it computes embeddings, whose "
            "similarities can serve as scores: leave task out"
        )
    return wanted


def read_encoder(checkpoint: Checkpoint) -> EncoderConfig | None:
    """Read the encoder files of the model's folder; None if the model generates text.

    Raises:
        CheckpointError: a file is damaged, or the model does not support the caller's task.
    """
    task = task_of(checkpoint)
    return None if task == "generate" else read_encoder_config(checkpoint, task)


def encoder_spec(spec: ModelSpec, config: HFConfig, about: EncoderConfig, checkpoint: Checkpoint) -> ModelSpec:
    """Add the pooling and head that the folder's files describe to the model's spec.

    Raises:
        CheckpointError: the files do not match the model.
    """
    from penstock.models.families.bert import is_classifier  # here: a decoder has no need of it

    if not all(
        layer.mixer is None or isinstance(layer.mixer.part, (AttentionSpec, DisentangledSpec)) for layer in spec.layers
    ):
        raise CheckpointError(
            f"{checkpoint.name} has layers other than attention; such models are supported for generation only"
        )
    ends, names = spec.encoder, spec.names
    if ends is None:
        ends = EncoderSpec(spec.hidden_size, positions=spec.positions, norm=spec.embedding_norm)
        bare = tuple((name, f"model.{name}") for name in ("layers.", "embed_tokens.", "norm."))
        head = r"(lm_head|output)\.weight"  # in folders, in GGUF files
        names = replace(names, prefixes=(*names.prefixes, *bare), ignored=(*names.ignored, head))
        if about.task == "score":
            padding = config.find_size("pad_token_id", 0) if is_classifier(config) else None
            scores = (_score_head(spec, config, about, checkpoint),)
            ends = replace(ends, pooling=("last",), padding=padding, head=scores)
    if about.task == "embed":
        ends = replace(ends, pooling=about.pooling or ends.pooling, head=_dense_parts(ends, about, checkpoint))
    max_position = min(spec.max_position, about.max_length or spec.max_position)
    return replace(spec, encoder=ends, names=names, max_position=max_position)


def _dense_parts(ends: EncoderSpec, about: EncoderConfig, checkpoint: Checkpoint) -> tuple[HeadPart, ...]:
    size = ends.hidden_size * len(about.pooling or ends.pooling)
    for dense in about.dense:
        if dense.in_size != size:
            raise CheckpointError(
                f"{checkpoint.path / dense.folder} expects vectors of {dense.in_size} elements, not of {size}"
            )
        size = dense.out_size
    return tuple(
        DenseSpec(f"{dense.folder}.linear", dense.in_size, dense.out_size, dense.bias, dense.activation)
        for dense in about.dense
    )


def _score_head(spec: ModelSpec, config: HFConfig, about: EncoderConfig, checkpoint: Checkpoint) -> HeadPart:
    from penstock.models.families.bert import is_classifier, num_labels

    if is_classifier(config):
        return DenseSpec("score", spec.hidden_size, num_labels(config), False)
    if checkpoint.gguf is not None and (own := _own_rows(spec, checkpoint.gguf)) is not None:
        return own
    true, false = about.score_tokens or _yes_and_no(checkpoint)
    return TokenScoreSpec(true, false, None if spec.tie_embeddings else spec.names.output)


def _own_rows(spec: ModelSpec, file: "GGUFFile") -> TokenScoreSpec | None:
    """The score by a GGUF file's own rows for yes and no; None: it has none."""
    from penstock.checkpoint.gguf.config import SCORE_HEAD  # here: a folder has no need of it

    head = file.tensors.get(SCORE_HEAD)
    if head is None:
        return None
    if head.shape != (2, spec.hidden_size):
        raise CheckpointError(f"{file.path} is damaged: its tensor {SCORE_HEAD} has the shape {list(head.shape)}")
    return TokenScoreSpec(0, 1, SCORE_HEAD.removesuffix(".weight"), num_rows=2)


def _yes_and_no(checkpoint: Checkpoint) -> tuple[int, int]:
    """The yes and no tokens of a reranker whose folder does not state them, such as Qwen3-Reranker."""
    from penstock.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(checkpoint.path)
    words = [] if tokenizer is None else [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if not words or any(len(tokens) != 1 for tokens in words):
        raise CheckpointError(f"{checkpoint.name} has no single tokens for yes and no: it cannot score")
    return words[0][0], words[1][0]


def module_files(checkpoint: Checkpoint, spec: ModelSpec) -> list[tuple[Path, tuple[tuple[str, str], ...]]]:
    """The weight files of the linear layers after the pooling, with the renaming of their tensors.

    Raises:
        CheckpointError: a file is missing.
    """
    if spec.encoder is None or not checkpoint.path.is_dir():
        return []
    found: list[tuple[Path, tuple[tuple[str, str], ...]]] = []
    for part in spec.encoder.head:
        if isinstance(part, DenseSpec) and part.name.endswith(".linear"):
            file = checkpoint.path / part.name.removesuffix(".linear") / "model.safetensors"
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, but modules.json refers to it")
            found.append((file, (("linear.", f"{part.name}."),)))
    return found
