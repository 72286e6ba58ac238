"""Training the demo model: a run that was interrupted is the run that was not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tools.train_demo_model import Trainer, parse_arguments

DEMO = Path(__file__).parents[2] / "src/penstock/demo"
WORDS = ["--no-compile", "--batch-tokens", "256"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As a run has: each of its two threads computes on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(work: Path, until: int) -> bytes:
    """Begin a run, or go on with it, up to a step; returns the weights that it writes."""
    torch.manual_seed(1)
    trainer = Trainer(parse_arguments([*WORDS, "--work", str(work)]), Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    while trainer.step < until:
        trainer.advance()
    trainer.save()
    return (work / "model" / "model.safetensors").read_bytes()


def test_a_run_that_goes_on_from_a_checkpoint_writes_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "unbroken", until=2)
    half = train(tmp_path / "resumed", until=1)
    assert half != unbroken
    assert train(tmp_path / "resumed", until=2) == unbroken
