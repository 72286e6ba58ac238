"""A GGUF file with `pooling_type` is an embedding model, as in llama.cpp, which gives vectors of length 1."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM
from penstock.errors import WrongTaskError
from penstock.frontend.text_encoding import _ANSWER, _INSTRUCT, _JUDGE
from penstock.text.tokenizer import Tokenizer
from tests.support.gguf_files import write_gguf

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("task", ["auto", "embed"])
@pytest.mark.parametrize(("pooling", "name"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_vectors_are_pooled_as_the_file_says(
    tiny_llama: Path, tmp_path: Path, pooling: int, name: str, task: str
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_llama, llama__pooling_type=pooling)
    ids = Tokenizer.from_path(file).encode(TEXT)
    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[name]
    with LLM(str(file), task=task) as llm:
        (vector,) = llm.embed([TEXT])
    np.testing.assert_allclose(vector, torch.nn.functional.normalize(pooled, dim=0).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_language_model_that_ranks_scores_by_the_two_rows_of_its_file(
    tiny_llama: Path, tmp_path: Path, kind: str
) -> None:
    """As Qwen3-Reranker's files have them; llama.cpp's template in them is no Jinja."""
    file = tmp_path / "model.gguf"
    rows = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    template = {"tokenizer__chat_template": None, "tokenizer__chat_template__rerank": "{query} {document}"}
    write_gguf(file, tiny_llama, extra={"cls.output.weight": (kind, rows)}, llama__pooling_type=4, **template)
    text = _JUDGE.format(instruct=_INSTRUCT, query="a fox") + TEXT + _ANSWER
    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([Tokenizer.from_path(file).encode(text, add_special_tokens=False)]))
    last = hidden.last_hidden_state[0, -1].numpy()
    with LLM(str(file)) as llm:
        (score,) = llm.score(["a fox"], [TEXT], raw=True)
    assert np.ravel(score)[0] == pytest.approx(float((rows[0] - rows[1]) @ last), abs=1e-4 if kind == "F32" else 0.3)


def test_such_a_file_does_not_generate_unless_it_is_asked_to(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_llama, llama__pooling_type=3)
    with LLM(str(file)) as llm, pytest.raises(WrongTaskError):
        llm.generate([TEXT])
    with LLM(str(file), task="generate") as llm:
        assert llm.generate([TEXT])[0].outputs[0].token_ids


@pytest.mark.parametrize("metadata", [{}, {"llama__pooling_type": 0}])
def test_a_file_without_pooling_generates(tiny_llama: Path, tmp_path: Path, metadata: dict[str, Any]) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_llama, **metadata)
    with LLM(str(file)) as llm:
        assert llm.generate([TEXT])[0].outputs[0].token_ids
