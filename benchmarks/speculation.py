"""What n-gram speculation gains where a text copies, and what it costs where guesses miss.

    python benchmarks/speculation.py [MODEL]      (bars: 1.8 times the tokens/s on copies, never under 0.97)

The demo model copies texts, does sums and, at temperature 5, writes what nobody can guess. MODEL is
a checkpoint of a real model's shape (`/work/shared/peers/make_model.py` writes one): with random weights a greedy text
soon repeats itself, which is its copy-heavy work, and at temperature 5 it never does. Each text is generated in turns
with and without speculation by two engines of one process; a row is the ratio of the seconds, the median of the rounds,
so that 0.56 is 1.8 times the tokens a second and 1.03 is 0.97 times. Both engines' answers must be equal to the bit.
Writes results/speculation.json; exits with 1 if a bar is missed.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools is beside, and not installed

from penstock.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.intake import Intake
from penstock.request import Request, SamplingParams
from penstock.tokenizer import Tokenizer
from report import report
from tools.demo_tasks import make

COPY_BAR, MISS_BAR = 1 / 1.8, 1 / 0.97


@dataclass(frozen=True)
class Work:
    """Requests that are answered `batch` at a time."""

    name: str
    requests: list[Request]
    bar: float
    batch: int = 1


def seconds(core: EngineCore, requests: list[Request]) -> tuple[float, dict[str, list[int]]]:
    """How long it takes to answer these together, and the answers."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began = time.perf_counter()
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    return time.perf_counter() - began, answers


def ratio(plain: EngineCore, guessing: EngineCore, work: Work, rounds: int) -> float:
    """Seconds with speculation by seconds without: the median of the rounds, of which the first is to warm up."""
    before = guessing.stats()
    ratios = []
    for _ in range(rounds + 1):
        without = with_guesses = 0.0
        for first in range(0, len(work.requests), work.batch):
            batch = work.requests[first : first + work.batch]
            plain_seconds, expected = seconds(plain, batch)
            guessing_seconds, answers = seconds(guessing, batch)
            assert answers == expected, "speculation changed an answer"
            without += plain_seconds
            with_guesses += guessing_seconds
        ratios.append(with_guesses / without)
    after = guessing.stats()
    value = statistics.median(ratios[1:])
    right, guessed = after.accepted_tokens - before.accepted_tokens, after.drafted_tokens - before.drafted_tokens
    print(f"{work.name}: {1 / value:.2f} times the tokens/s; {right:,} of {guessed:,} guesses right", flush=True)
    return value


def demo_works(intake: Intake, tokenizer: Tokenizer) -> list[Work]:
    rng = Random(5)

    def ask(task: str, number: int) -> list[Request]:
        items = [make(task, rng, "held_out") for _ in range(number)]
        greedy = SamplingParams(temperature=0.0)
        return [
            intake.accept(tokenizer.encode_chat(list(item.messages)), greedy, request_id=f"{task} {i}", arrival=0.0)
            for i, item in enumerate(items)
        ]

    return [
        Work("demo model, copies a text, batch 1", ask("copy", 4), COPY_BAR),
        Work("demo model, copies texts, batch 8", ask("copy", 8), MISS_BAR, batch=8),
        Work("demo model, sums, batch 1", ask("arithmetic", 40), MISS_BAR),
        Work("demo model, sums, batch 16", ask("arithmetic", 64), MISS_BAR, batch=16),
        Work("demo model, random text, batch 1", random_texts(intake, 3, 200), MISS_BAR),
        Work("demo model, random texts, batch 16", random_texts(intake, 16, 200), MISS_BAR, batch=16),
    ]


def random_texts(intake: Intake, number: int, num_tokens: int, temperature: float = 5.0) -> list[Request]:
    rng = Random(9)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    prompts = [[rng.randrange(100, 1000) for _ in range(64)] for _ in range(number)]
    return [
        intake.accept(prompt, params, request_id=f"{temperature} {i}", arrival=0.0) for i, prompt in enumerate(prompts)
    ]


def model_works(intake: Intake, name: str) -> list[Work]:
    return [
        Work(f"{name}, repeats itself, batch 1", random_texts(intake, 2, 96, temperature=0.0), COPY_BAR),
        Work(f"{name}, random text, batch 1", random_texts(intake, 2, 48), MISS_BAR),
        Work(f"{name}, random texts, batch 8", random_texts(intake, 8, 48), MISS_BAR, batch=8),
    ]


def measure(model: str | None, rounds: int) -> dict[str, tuple[float, float]]:
    options: dict[str, Any] = {"model": model, "kv_cache_memory": "256MiB", "enable_prefix_caching": False, "threads": 1}
    options |= {"max_model_len": 1024} if model else {}
    plain = EngineCore(EngineConfig.from_options(**options))
    guessing = EngineCore(EngineConfig.from_options(**options, speculation="ngram"))
    tokenizer = Tokenizer.load(plain.info.model_path)
    intake = Intake(tokenizer, plain.info)
    if model is None:
        assert tokenizer is not None
        works = demo_works(intake, tokenizer)
    else:
        works = model_works(intake, Path(model).name)
    rows = {work.name: (ratio(plain, guessing, work, rounds), work.bar) for work in works}
    plain.close()
    guessing.close()
    return rows


def main(models: list[str]) -> int:
    rows = measure(None, rounds=int(__import__("os").environ.get("R","7")))
    for model in models:
        rows |= measure(model, rounds=3)
    return report("speculation", rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
