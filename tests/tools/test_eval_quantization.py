"""The measurement of quantization: it counts right answers, and finds no distance where there is none."""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_tiny_llama
from tools.eval_quantization import VARIANTS, accuracy, draw_items, predictions, print_closeness, random_texts


def test_the_demo_model_answers_right_with_rounded_weights() -> None:
    items = draw_items(["arithmetic"], 4, seed=2026)
    assert accuracy(items, {"threads": 1, **VARIANTS["int8"]}) == {"arithmetic": 1.0}


def test_predictions_are_log_probabilities_of_what_counts(tiny_llama: Path) -> None:
    texts = random_texts(384, 2, seed=0)
    made = predictions(tiny_llama, texts, VARIANTS["float32"])
    assert [len(part) for part in made] == [199, 199]
    torch.testing.assert_close(made[0].exp().sum(-1), torch.ones(199))


def test_the_same_model_is_at_no_distance_and_a_rounded_one_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama(tmp_path)
    print_closeness(folder, random_texts(384, 1, seed=0), ["float32", "float32", "int4"])
    same, rounded = capsys.readouterr().out.splitlines()[2:]
    assert same == "| float32 | 0 | 0 | 0 | 100.00 % |"
    assert float(rounded.split("|")[2]) > 0
