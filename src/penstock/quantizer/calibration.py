"""Calibration texts: token ids of one length, written by the model itself or cut from a file."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from penstock.errors import InvalidRequestError
from penstock.sampling_params import SamplingParams
from penstock.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.llm import LLM

NUM_TEXTS = 24
"""Number of texts; with these, SmolLM2-135M-Instruct meets the targets in docs/quantization.md."""
TEXT_TOKENS = 256
_SEED = 1


def write_texts(llm: "LLM", vocab_size: int, context: int) -> list[list[int]]:
    """Texts that the model writes when it is given one token at random and draws the others.

    They need no data, and have the distribution that matters: the one that the model predicts.
    """
    draw = random.Random(_SEED)
    length = min(TEXT_TOKENS, context)
    prompts = [[draw.randrange(vocab_size)] for _ in range(NUM_TEXTS)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=length - 1, ignore_eos=True, seed=index)
        for index in range(NUM_TEXTS)
    ]
    texts = [list(prompt) for prompt in prompts]
    outputs = llm.generate_unordered(prompts, params)
    for index, output in tqdm(outputs, total=NUM_TEXTS, desc="calibration texts", unit="text"):
        texts[index] += output.outputs[0].token_ids
    return texts


def read_texts(file: Path, tokenizer: Tokenizer | None, context: int) -> list[list[int]]:
    """Texts cut from the beginning of a text file.

    Raises:
        InvalidRequestError: the file cannot be read, or is too short to say anything.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the calibration text cannot be read: {error}") from None
    if tokenizer is None:
        raise InvalidRequestError("--calibration needs a model with a tokenizer")
    length = min(TEXT_TOKENS, context)
    token_ids = tokenizer.encode(text)
    texts = [token_ids[first : first + length] for first in range(0, len(token_ids) - length + 1, length)]
    if len(texts) < NUM_TEXTS // 4:
        raise InvalidRequestError(
            f"{file} has {len(token_ids)} tokens; give at least {NUM_TEXTS // 4 * length} for the calibration"
        )
    stride = max(1, len(texts) // NUM_TEXTS)  # of all parts of a long file
    return texts[::stride][:NUM_TEXTS]
