"""Refuses models that `generate` and `chat` cannot use, before reading their weights."""

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.errors import CheckpointError, ConfigError
from penstock.models.encoders import task_of
from penstock.text.tokenizer import chat_template_of, missing_tokenizer

_OF_TASK = {
    "embed": "embeds texts: penstock serve answers /v1/embeddings with it, LLM.embed in Python",
    "score": "scores documents: penstock serve answers /v1/rerank and /v1/score with it, LLM.score in Python",
}


def check_takes_text(checkpoint: Checkpoint) -> None:
    """
    Raises:
        ConfigError: the model does not generate.
        CheckpointError: it has no tokenizer, so that it works with token ids only.
    """
    task = task_of(checkpoint)
    if task != "generate":
        raise ConfigError(f"{checkpoint.name} does not generate; it {_OF_TASK[task]}")
    if (missing := missing_tokenizer(checkpoint.path)) is not None:
        raise CheckpointError(
            f"{missing}; without it the model takes token ids only: by LLM.generate in Python, or at "
            "/v1/completions of penstock serve"
        )


def check_chats(checkpoint: Checkpoint, chat_template: str | None) -> None:
    """
    Raises:
        ConfigError: the model has no chat template, and none was given.
    """
    if chat_template is None and not chat_template_of(checkpoint.path):
        raise ConfigError(
            f"{checkpoint.name} has no chat template, so it may not be trained for conversations: give one by "
            "--chat-template FILE, or let it continue a text by penstock generate"
        )
