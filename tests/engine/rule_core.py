"""An engine core without a model: each token is the one before plus one, and more with images. It can also be made to
fail.

It stands in where the test is about processes and messages, and about failures that no healthy model shows.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.api.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput, TokenLogprob
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.config.engine_config import EngineConfig
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.errors import CheckpointError
from penstock.system import loading_progress
from penstock.system.start import Start

RULE_CORE = "tests.engine.rule_core:RuleCore"
TELLING_CORE = "tests.engine.rule_core:build_while_telling"
VOCAB = 1000
BLOCKS = 64
CRASH, HANG, SLOW, BROKEN, MARKED, HELD = 901, 902, 903, 904, 905, 906
"""First tokens of a prompt that make its step fail, never end, or take 20 ms, its second token an error, its end a
file `ended` in the model's folder, or its steps 20 ms and the last wait for a file `released` there."""


class RuleCore:
    def __init__(self, config: EngineConfig, start: Start | None = None) -> None:
        if config.model.model == "no-such-folder":
            raise CheckpointError("there is no folder no-such-folder")
        self._folder = folder = Path(str(config.model.model))
        if folder.name == "out-of-order" or (folder / "out-of-order").exists():
            raise RuntimeError("the core fell over")
        if (folder / "stuck").exists():
            time.sleep(1e6)
        self.info = EngineInfo(
            model_name="rule",
            model_path=str(config.model.model),
            vocab_size=VOCAB + 1 if (folder / "larger").exists() else VOCAB,
            max_model_len=128 if (folder / "shrunk").exists() else 512,
            max_num_seqs=64,
            seed=config.model.seed,
            defaults=GenerationDefaults(),
            memory_plan="memory plan: nothing",
            num_blocks=BLOCKS,
            block_size=8,
            role=config.role,
            arithmetic="trained" if (folder / "trained").exists() else "",
        )
        self._running: dict[tuple[str, int], tuple[Request, int]] = {}
        self._places: dict[str, int] = {}
        self._ended: list[SequenceOutput] = []
        self._steps = 0
        self.last_step: StepRecord | None = None
        self.is_writing = self.is_loading = False
        self._handovers: list[tuple[str, BlockSource | None]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def poll_transfers(self) -> None:
        return None

    def hand_over(self, request_id: str) -> None:
        for key in [key for key in self._running if key[0] == request_id]:
            del self._running[key]
        self._handovers.append((request_id, BlockSource("nowhere", "", ((1, 1), (2, 1)))))

    def drain_handovers(self) -> list[tuple[str, BlockSource | None]]:
        handovers, self._handovers = self._handovers, []
        return handovers

    def add_request(self, request: Request, resumed: Resumed, source: BlockSource | None) -> None:
        self._places[request.request_id] = len(self._places)
        for index in range(request.params.n):
            tokens = resumed[index] if resumed else ()
            if tokens is not None:
                self._running[request.request_id, index] = (request, len(tokens))

    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        for key in [key for key in self._running if key[0] == request_id and index in (None, key[1])]:
            del self._running[key]
            error = "the logits are not finite" if reason is FinishReason.ERROR else None
            self._ended.append(SequenceOutput(*key, [], finish_reason=reason, error=error))

    def expire(self, request_id: str) -> None:
        """Nothing ever waits here."""

    def step(self, begin: Callable[[int, Sequence[int]], None]) -> list[SequenceOutput]:
        self._steps += 1
        if self._running:
            begin(len(self._running), [self._places[request_id] for request_id, _ in self._running])
        outputs, self._ended = self._ended, []
        for key, (request, done) in list(self._running.items()):
            self._suffer(request.prompt_token_ids[0])
            seen = sum(image.pixels[0] for image in request.images)
            token = (request.prompt_token_ids[-1] + done + 1 + seen) % VOCAB
            if request.prompt_token_ids[0] == BROKEN and done:
                self.finish_request(*key, FinishReason.ERROR)
                continue
            last = done + 1 == request.params.max_tokens
            if last and request.prompt_token_ids[0] == HELD and not (self._folder / "released").exists():
                continue
            logprobs = None if request.params.logprobs is None else [TokenLogprob(token, -0.5)]
            outputs.append(
                SequenceOutput(*key, [token], logprobs, FinishReason.LENGTH if last else None, None, time.monotonic())
            )
            self._running[key] = (request, done + 1)
            if last:
                del self._running[key]
                if request.prompt_token_ids[0] == MARKED:
                    (self._folder / "ended").touch()
        return outputs

    @staticmethod
    def _suffer(first: int) -> None:
        if first == CRASH:
            raise RuntimeError("a step fell over")
        if first in (HANG, SLOW, HELD):
            time.sleep(1e6 if first == HANG else 0.02)

    def stats(self) -> EngineStats:
        held = len(self._running)
        return EngineStats(held, 0, held, 0, BLOCKS - held, 0, 0, 0, self._steps, self._steps)

    def close(self) -> None:
        pass


def build_while_telling(config: EngineConfig, start: Start) -> RuleCore:
    """Build a core that reports progress, as a loader does, and does so at once."""
    for handler in loading_progress.LOGGER.handlers:
        handler.seconds = 0.0
    for num_mebibytes in (1, 2):
        loading_progress.report_bytes(num_mebibytes << 20, 2 << 20)
    return RuleCore(config, start)
