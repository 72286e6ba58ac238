import pytest

from penstock.checkpoint.checkpoint import resolve_path
from penstock.structured.vocabulary import Vocabulary
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """That of the demo model, a Unigram with a byte fallback."""
    return Tokenizer.from_path(resolve_path(None))


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, tokenizer.vocab_size)
