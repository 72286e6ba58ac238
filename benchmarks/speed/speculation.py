"""What speculation gains where a text copies, and what it costs where guesses miss.

    python -m benchmarks.speed.speculation [MODEL]      (bars: 1.8 times the tokens/s on copies, never under 0.97)

The demo model copies texts, does sums, and writes what nobody can guess, as at temperature 5 it does; guesses are those
of n-grams. MODEL is a checkpoint of a real model's shape (`/work/shared/peers/make_model.py` writes one). Its weights
are random and so are its texts: so the guesses are scripted, each token right with a given chance, and what is measured
is the cost of computing them. Nine in ten is what copying gives (the demo model's copies: 97 in 100).

Each text is generated with and without speculation at once, by two engines of one process that take turns of a few
steps, so that what else the machine does slows both alike. A row is the ratio of the seconds, the median of the rounds:
0.56 is 1.8 times the tokens a second, 1.03 is 0.97 times. The answers of both must be equal. Writes
results/<machine>/speculation.json; exits with 1 if a bar is missed.
"""

import statistics
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.report import report
from penstock.api.request import Request
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.core.ngrams import NgramDrafter
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft, Drafter, Speculation
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.text.tokenizer import Tokenizer
from tools.demo_tasks import make

COPY_BAR, MISS_BAR = 1 / 1.8, 1 / 0.97
LEAST_SECONDS = 6.0
TURN_SECONDS = 0.02


@dataclass(frozen=True)
class Work:
    """Requests that are answered `batch` at a time."""

    name: str
    requests: list[Request]
    bar: float
    batch: int = 1
    skill: float | None = None
    """How often a scripted guess is right; None: guesses are n-grams'."""


class Scripted:
    """Knows the answers, and guesses each token right with a chance of `skill`."""

    free = True

    def __init__(self, answers: dict[str, list[int]], skill: float) -> None:
        self._answers, self._skill, self._rng = answers, skill, Random(3)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        done = len(seq.tokens) - seq.num_prompt_tokens
        right = self._answers[seq.request_id][done : done + limit]
        return array("i", [token if self._rng.random() < self._skill else token ^ 1 for token in right])

    def forget_sequence(self, seq: Sequence) -> None:
        pass


class Run:
    """An engine that answers requests together."""

    def __init__(self, core: EngineCore, requests: list[Request]) -> None:
        self.core, self.spent = core, 0.0
        self.answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            core.add_request(request)

    def step(self) -> None:
        began = time.perf_counter()
        outputs = self.core.step()
        self.spent += time.perf_counter() - began
        for output in outputs:
            self.answers[output.request_id] += output.token_ids


def answer(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    """The answers to these together."""
    run = Run(core, requests)
    while core.has_work:
        run.step()
    return run.answers


def race(first: Run, second: Run) -> None:
    """Answer in both, in turns of `TURN_SECONDS`."""
    while first.core.has_work or second.core.has_work:
        until = second.spent + TURN_SECONDS
        while first.core.has_work and (first.spent < until or not second.core.has_work):
            first.step()
        first, second = second, first


def ratio(plain: EngineCore, guessing: EngineCore, work: Work, rounds: int) -> float:
    """Seconds with speculation by seconds without: the median of the rounds, of which the first is to warm up.

    Short work is repeated until `LEAST_SECONDS` were measured; and who goes first changes from round to round.
    """
    drafter: Drafter = NgramDrafter()
    if work.skill is not None:
        drafter = Scripted(answer(plain, work.requests), work.skill)
    guessing.restart(guessing.settings, Speculation([drafter], 16, time.monotonic))
    ratios: list[float] = []
    measured = 0.0
    while len(ratios) <= rounds or measured < LEAST_SECONDS:
        spent = dict.fromkeys((plain, guessing), 0.0)
        for first in range(0, len(work.requests), work.batch):
            requests = work.requests[first : first + work.batch]
            runs = [Run(core, requests) for core in spent]
            race(*(runs if len(ratios) % 2 else runs[::-1]))
            assert runs[0].answers == runs[1].answers, "speculation changed an answer"
            for run in runs:
                spent[run.core] += run.spent
        ratios.append(spent[guessing] / spent[plain])
        measured += sum(spent.values())
    stats, value = guessing.stats(), statistics.median(ratios[1:])
    guesses = f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} guesses right"
    print(f"{work.name}: {1 / value:.2f} times the tokens/s in {len(ratios) - 1} rounds; {guesses}", flush=True)
    return value


def demo_works(input_processor: InputProcessor, tokenizer: Tokenizer) -> list[Work]:
    rng = Random(5)

    def ask(task: str, number: int) -> list[Request]:
        items = [make(task, rng, "held_out") for _ in range(number)]
        greedy = SamplingParams(temperature=0.0)
        return [
            input_processor.make_request(
                tokenizer.encode_chat(list(item.messages)), greedy, request_id=f"{task} {i}", arrival=0.0
            )
            for i, item in enumerate(items)
        ]

    return [
        Work("demo model, copies a text, batch 1", ask("copy", 4), COPY_BAR),
        Work("demo model, copies texts, batch 8", ask("copy", 8), MISS_BAR, batch=8),
        Work("demo model, sums, batch 1", ask("arithmetic", 40), MISS_BAR),
        Work("demo model, sums, batch 16", ask("arithmetic", 64), MISS_BAR, batch=16),
        Work("demo model, random text, batch 1", random_texts(input_processor, 3, 200), MISS_BAR),
        Work("demo model, all guesses wrong, batch 1", random_texts(input_processor, 3, 200), MISS_BAR, skill=0.0),
        Work("demo model, random texts, batch 16", random_texts(input_processor, 16, 200), MISS_BAR, batch=16),
    ]


def random_texts(
    input_processor: InputProcessor, number: int, num_tokens: int, temperature: float = 5.0
) -> list[Request]:
    rng = Random(9)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    prompts = [[rng.randrange(100, 1000) for _ in range(64)] for _ in range(number)]
    return [
        input_processor.make_request(prompt, params, request_id=f"{temperature} {i}", arrival=0.0)
        for i, prompt in enumerate(prompts)
    ]


def model_works(input_processor: InputProcessor, name: str) -> list[Work]:
    return [
        Work(f"{name}, nine of ten guesses right, batch 1", random_texts(input_processor, 1, 96), COPY_BAR, skill=0.9),
        Work(f"{name}, all guesses wrong, batch 1", random_texts(input_processor, 1, 96), MISS_BAR, skill=0.0),
        Work(f"{name}, n-grams of random text, batch 1", random_texts(input_processor, 1, 96), MISS_BAR),
        Work(
            f"{name}, nine of ten guesses right, batch 8", random_texts(input_processor, 8, 48), MISS_BAR, 8, skill=0.9
        ),
    ]


def measure(model: str | None, rounds: int) -> dict[str, tuple[float, float]]:
    options: dict[str, Any] = {
        "model": model,
        "kv_cache_memory": "256MiB",
        "enable_prefix_caching": False,
    }
    options |= {"max_model_len": 1024} if model else {}
    plain = build_engine(EngineConfig.from_options(**options))
    guessing = build_engine(EngineConfig.from_options(**options, speculation="ngram"))
    tokenizer = Tokenizer.load(plain.info.model_path)
    input_processor = InputProcessor(tokenizer, plain.info)
    if model is None:
        assert tokenizer is not None
        works = demo_works(input_processor, tokenizer)
    else:
        works = model_works(input_processor, Path(model).name)
    rows = {work.name: (ratio(plain, guessing, work, rounds), work.bar) for work in works}
    plain.close()
    guessing.close()
    return rows


def main(models: list[str]) -> int:
    rows = measure(None, rounds=7)
    for model in models:
        rows |= measure(model, rounds=3)
    return report("speculation", rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
