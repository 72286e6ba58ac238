"""Every family from a GGUF file: `transformers`' logits, and weights that are what the file stores, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import write_random
from tests.gguf_files import write_gguf
from tests.models.test_families import LLAMA3, SHAPE, YARN, expected, rope, texts
from tests.stepping import Stepper

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, wide heads": ("Llama", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": ("Llama", rope("linear", factor=3.0)),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, yarn rope": ("Llama", YARN),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, sliding": ("Mistral", {"sliding_window": 9}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 5.0},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, tied, biases": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "_"))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("random")
    return folder, write_random(folder, family, **(SHAPE | changes))


def test_logits_from_floats_equal_those_of_transformers(written: tuple[Path, Any], tmp_path: Path) -> None:
    folder, reference = written
    file = tmp_path / "model.gguf"
    write_gguf(file, folder)
    (text,) = texts((97,))
    logits = Stepper(file, 1).step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)
