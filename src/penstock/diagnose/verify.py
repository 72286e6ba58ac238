"""The self-test of `penstock verify`: checks that an answer depends on its request alone, bit for bit.

A few requests are answered one at a time; if the model takes images or sounds, the longer ones have some. Then the same
engine answers them in each situation that occurs in a server (batches, chunks, cache hits, preemption, drafts), and
their token ids and log-probabilities are compared.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from penstock.api.request import Image, MediaKind, Request, TokenLogprob
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.config.model_facts import TowerFacts
from penstock.core import sequence as core
from penstock.core.speculation import Draft, Speculation
from penstock.dataclass import dataclass
from penstock.engine.core import EngineCore
from penstock.errors import ConfigError
from penstock.frontend.input_processor import InputProcessor
from penstock.native import num_threads, set_num_threads

PROMPT_LENGTHS = (5, 33, 101, 190)
LOGPROBS = 5
COMPANY = (1, 7, 64)
CHUNKS = (7, 61)
PICTURED = 100
"""Least length of a prompt that has pictures, if the model takes them."""
PICTURES = 3
PICTURE = (2, 3)
"""Rows and columns of a picture's features."""
NUM_DRAFTS = 8

Answer = tuple[list[int], list[TokenLogprob]]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one situation."""

    situation: str
    evidence: str
    """Evidence that the engine was in the situation, such as the number of preemptions."""
    reached: bool
    """Whether the engine was in the situation."""
    difference: str | None
    """The first difference from the reference answers, or None."""

    @property
    def clean(self) -> bool:
        return self.reached and self.difference is None


@dataclass(frozen=True, slots=True)
class _Run:
    """The answers and the statistics of a run."""

    answers: dict[str, Answer]
    errors: dict[str, str]
    together: int
    """Maximum number of sequences that ran at the same time."""
    steps: int
    cached: int
    """Prompt tokens found in the prefix cache."""
    preemptions: int


class _Rehearsed:
    """A drafter that proposes the reference answers, with every third token wrong."""

    free = True

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers

    def propose(self, wanted: list[tuple[core.Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: core.Sequence, limit: int) -> Draft:
        done = len(seq.tokens) - seq.num_prompt_tokens
        known = enumerate(self._answers[seq.request_id][done : done + limit], done)
        return array("i", [token if index % 3 else token ^ 1 for index, token in known])

    def forget_sequence(self, seq: core.Sequence) -> None:
        return None


def self_test_config(**options: Any) -> EngineConfig:
    """Parse options with defaults under which every situation occurs."""
    return EngineConfig.from_options(**({"max_num_seqs": max(COMPANY) + 1, "seed": 0} | options))


class SelfTest:
    """Test requests for an engine, and a run for each situation. Use it once, then `close` it.

    Raises:
        ConfigError: the engine's context is too short for the test; the engine is then closed.
    """

    def __init__(self, core: EngineCore, make_whole: Callable[[], EngineCore] | None = None) -> None:
        """
        Args:
            make_whole: builds an engine of a single rank, to compare with, if `core` has several.
        """
        self.core, self._make_whole = core, make_whole
        block_size = self.core.settings.memory.block_size
        self.num_tokens = 2 * block_size + 8  # enough for a sequence to outgrow its reserve in a small pool
        self._input_processor = InputProcessor(None, self.core.info)
        longest = self.core.settings.max_model_len - self.num_tokens
        if longest < PROMPT_LENGTHS[1]:
            self.core.close()
            raise ConfigError(
                f"the self-test needs a context of {self.num_tokens + PROMPT_LENGTHS[1]} tokens; "
                f"max_model_len is {self.core.settings.max_model_len}"
            )
        rng = Random(2026)
        self.judged = [
            self._request(f"judged {index}", rng, min(length, longest), self.num_tokens)
            for index, length in enumerate(PROMPT_LENGTHS)
        ]
        self._others = [
            self._request(
                f"other {index}",
                rng,
                rng.randint(1, min(80, longest)),
                rng.randint(self.num_tokens // 2, self.num_tokens),
            )
            for index in range(max(COMPANY))
        ]
        self._alone: dict[str, Answer] = {}

    def findings(self) -> Iterator[Finding]:
        """Run one situation after another, and yield the finding of each; the first gives the reference answers."""
        yield self._answer_alone()
        if self._make_whole is not None:
            yield self._whole(self._make_whole())
        yield self._threads()
        for count in COMPANY:
            yield self._company(count)
        for chunk in CHUNKS:
            yield self._chunked(chunk)
        yield self._cached()
        groups = self.core.settings.memory.groups
        if (groups[0].window or self._longest) >= self._longest:
            yield self._preempted()  # else every layer has a window, and gives back a block for each that it takes
        yield self._speculated()

    def close(self) -> None:
        """Free the engine's memory."""
        self.core.close()

    def describe(self) -> str:
        """The model, formats, device and threads under test, in one line."""
        settings = self.core.settings
        return (
            f"{settings.model_name}: {settings.dtype}, weights {settings.quantization or 'as stored'}, KV cache "
            f"{settings.kv_cache_dtype}, on {settings.device} with {settings.threads} threads"
            f"{f' in each of {ranks} ranks' if (ranks := settings.tensor_parallel_size) > 1 else ''}"
        )

    def _request(self, name: str, rng: Random, length: int, num_tokens: int) -> Request:
        """A request with a prompt of random tokens; half of the requests are sampled, half are greedy."""
        prompt = [rng.randrange(self.core.info.vocab_size) for _ in range(length)]
        images = self._images(rng, prompt, self.core.settings.towers)
        sampled = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.9 if sampled else 0.0,
            top_p=0.95 if sampled else 1.0,
            repetition_penalty=1.1 if sampled else 1.0,
            seed=rng.getrandbits(32),
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=LOGPROBS,
        )
        return self._input_processor.make_request(prompt, params, request_id=name, arrival=0.0, images=images)

    def _images(self, rng: Random, prompt: list[int], towers: Mapping[MediaKind, TowerFacts]) -> tuple[Image, ...]:
        """Random pictures and sounds in turns in a long prompt, the first two of a kind equal; or a window of features.

        All have the same window: some would end before another one is encoded, and never run together.
        """
        if any(tower.is_attended for tower in towers.values()):
            return (_window(towers["sound"], self.core.settings.max_model_len),)
        if len(prompt) < PICTURED or not towers:
            return ()
        made = {kind: _MAKERS[kind](rng, tower) for kind, tower in towers.items()}
        turns = [image for images in zip(*made.values(), strict=True) for image in images]
        found, step = [], len(prompt) // (len(turns) + 1)
        for index, image in enumerate(turns):
            start = (index + 1) * step
            prompt[start : start + image.count] = [prompt[start]] * image.count  # a placeholder is one token
            found.append(replace(image, start=start))
        return tuple(found)

    @property
    def _longest(self) -> int:
        """Number of tokens of the longest test sequence."""
        return max(len(request.prompt_token_ids) for request in self.judged) + self.num_tokens

    # ── situations ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_alone(self) -> Finding:
        run = self._run_each_with(0)
        self._alone = run.answers
        errors = "; ".join(f"{name}: {error}" for name, error in run.errors.items())
        return Finding("alone", f"{run.steps} steps", run.together == 1, errors or None)

    def _whole(self, core: EngineCore) -> Finding:
        try:
            run = self._run([self.judged], core=core)
        finally:
            core.close()
        ranks = self.core.settings.tensor_parallel_size
        return self._judge("together, by one process", run, f"1 for {ranks} ranks", ranks > 1)

    def _threads(self) -> Finding:
        threads = num_threads()
        other = 1 if threads > 1 else 2
        set_num_threads(other)
        try:
            run = self._run([self.judged])  # together: where the machine is busy, threads wait for each other at length
        finally:
            set_num_threads(threads)
        return self._judge("together, another thread count", run, f"{other} for {threads} threads", True)

    def _company(self, count: int) -> Finding:
        run = self._run_each_with(count)
        return self._judge(
            f"beside {count} other{'s' * (count > 1)}", run, f"{run.together} together", run.together == count + 1
        )

    def _chunked(self, chunk: int) -> Finding:
        count = len(self.judged)
        run = self._run([self.judged], max_num_batched_tokens=chunk, max_num_seqs=count)
        longest = max(len(request.prompt_token_ids) for request in self.judged)
        return self._judge(f"in chunks of up to {chunk} tokens", run, f"{run.steps} steps", longest > chunk)

    def _cached(self) -> Finding:
        run = self._run([self.judged, self.judged], enable_prefix_caching=True)
        return self._judge("from the prefix cache", run, f"{run.cached} tokens cached", run.cached > 0)

    def _preempted(self) -> Finding:
        """All start together in a pool with room for their prompts and one block each, which they outgrow."""
        memory = self.core.settings.memory
        size, count = memory.block_size, len(self.judged)
        prompts = [len(request.prompt_token_ids) for request in self.judged]
        blocks = max(-(-self._longest // size), sum(-(-length // size) for length in prompts) + count)
        run = self._run([self.judged], memory=memory.with_fewer_blocks(blocks))
        return self._judge("preempted in a tiny pool", run, f"preempted {run.preemptions} times", run.preemptions > 0)

    def _speculated(self) -> Finding:
        """Run with drafts of the next tokens, every third of them wrong."""
        answers = {name: tokens for name, (tokens, _) in self._alone.items()}
        speculation = Speculation([_Rehearsed(answers)], NUM_DRAFTS, clock=lambda: 0.0)
        run = self._run([self.judged], speculation)
        stats = self.core.stats()
        evidence = f"{stats.accepted_tokens} of {stats.drafted_tokens} guesses right"
        return self._judge("speculated", run, evidence, 0 < stats.accepted_tokens < stats.drafted_tokens)

    def _run_each_with(self, count: int) -> _Run:
        """Run each test request together with `count` others, which may include further test requests."""
        waves = []
        for first in range(0, len(self.judged), count + 1):
            judged = self.judged[first : first + count + 1]
            wave = judged + self._others[: count + 1 - len(judged)]
            Random(count).shuffle(wave)
            waves.append(wave)
        return self._run(waves)

    # ── running and comparing ────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        waves: Sequence[Sequence[Request]],
        speculation: Speculation | None = None,
        *,
        core: EngineCore | None = None,
        **changes: Any,
    ) -> _Run:
        """Answer waves of requests in sequence, with changed settings; by default without a prefix cache."""
        core = core or self.core
        core.restart(replace(core.settings, **({"enable_prefix_caching": False} | changes)), speculation)
        answers: dict[str, Answer] = {}
        errors: dict[str, str] = {}
        together = cached = 0
        steps = core.stats().steps
        for wave in waves:
            for request in wave:
                answers[request.request_id] = ([], [])
                core.add_request(request)
            while core.has_work:
                outputs = core.step()
                together = max(together, len(outputs))
                for output in outputs:
                    tokens, logprobs = answers[output.request_id]
                    tokens += output.token_ids
                    logprobs += output.logprobs or []
                    cached += output.num_cached_tokens
                    if output.error is not None:
                        errors[output.request_id] = output.error
        after = core.stats()
        return _Run(answers, errors, together, after.steps - steps, cached, after.preemptions)

    def _judge(self, situation: str, run: _Run, evidence: str, reached: bool) -> Finding:
        differences = (
            f"{request.request_id}: {difference}"
            for request in self.judged
            if (difference := self._difference(request.request_id, run)) is not None
        )
        return Finding(situation, evidence, reached, next(differences, None))

    def _difference(self, name: str, run: _Run) -> str | None:
        if name in run.errors:
            return f"ended with an error: {run.errors[name]}"
        return first_difference(self._alone[name], run.answers[name])


def first_difference(expected: Answer, got: Answer) -> str | None:
    """The first difference between an answer and the expected one, in tokens or log-probability bits, or None."""
    for position, (token, entry, other, other_entry) in enumerate(zip(*expected, *got, strict=False)):
        if token != other:
            return f"token {position} is {other}, not {token}"
        for (candidate, logprob), (other_candidate, other_logprob) in zip(
            _logprobs(entry), _logprobs(other_entry), strict=False
        ):
            if (candidate, logprob.hex()) != (other_candidate, other_logprob.hex()):
                return (
                    f"token {position}: the log-probability of {other_candidate} is {other_logprob!r}, "
                    f"that of {candidate} was {logprob!r}"
                )
    if len(expected[0]) != len(got[0]):
        return f"{len(got[0])} tokens, not {len(expected[0])}"
    return None


def _logprobs(entry: TokenLogprob) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob), *entry.top]


def _pictures(rng: Random, tower: TowerFacts) -> list[Image]:
    """Small pictures of random pixels, the first two equal."""
    side = tower.patch_pixels * math.isqrt(tower.max_patches // tower.max_tokens)
    rows, columns = PICTURE if tower.max_tokens >= math.prod(PICTURE) else (1, 1)
    contents = [rng.randbytes(3 * rows * columns * side**2) for _ in range(PICTURES - 1)]
    found = []
    for pixels in (contents[0], *contents):
        digest = hashlib.sha256(struct.pack("<II", rows * side, columns * side) + pixels).digest()
        found.append(Image(0, rows * columns, rows, columns, rows * side, columns * side, digest, pixels))
    return found


def _sounds(rng: Random, tower: TowerFacts) -> list[Image]:
    """Short sounds of random features, the first two equal."""
    group = tower.max_patches // tower.max_tokens
    count = min(math.prod(PICTURE), tower.max_tokens)
    width = tower.patch_pixels * (group * count + tower.max_patches - group * tower.max_tokens)
    found = []
    for index in range(PICTURES):
        height, digest, pixels = _features(tower, width, seed=max(index, 1))
        found.append(Image(0, count, 1, count, height, width, digest, pixels, is_sound=True))
    return found


_MAKERS: dict[MediaKind, Callable[[Random, TowerFacts], list[Image]]] = {"image": _pictures, "sound": _sounds}


def _window(tower: TowerFacts, context: int) -> Image:
    """A window of random log-mel features."""
    width = tower.patch_pixels * tower.max_tokens
    height, digest, pixels = _features(tower, width, seed=0)
    return Image(0, context, 1, tower.max_tokens, height, width, digest, pixels, is_sound=True)


def _features(tower: TowerFacts, width: int, seed: int) -> tuple[int, bytes, bytes]:
    """Random log-mel features: their height, digest and content."""
    assert tower.patch_height is not None
    height = tower.patch_height
    pixels = np.random.default_rng(seed).random((height, width), np.float32).tobytes()
    return height, hashlib.sha256(struct.pack("<II", height, width) + pixels).digest(), pixels
