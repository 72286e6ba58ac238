"""Ranks of an engine as threads of the test's process, which takes no second to start."""

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock import native
from penstock.config.ranks import Ranks
from penstock.kernels.ranks import Alone, Collective
from penstock.kernels.ranks.native import SharedMemoryCollective, shared_file
from penstock.kernels.tables import make_ops
from penstock.models.registry import load_model
from penstock.native import Library
from penstock.runner.forward import Forward, KVCache, make_forward
from tests.support.stepping import plan_of, settings_for

T = TypeVar("T")


def in_ranks(library: Library, size: int, body: Callable[[Collective], T]) -> list[T]:
    """What `body` returns in each rank. Where one raises, the others are told that it is lost."""
    file = shared_file(library, size)
    collectives = [SharedMemoryCollective(library, Ranks(rank, size), file) for rank in range(size)]
    os.close(file)

    def run(collective: SharedMemoryCollective) -> T:
        try:
            return body(collective)
        except BaseException:
            collective.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(run, collective) for collective in collectives]]


class RankForward:
    """One rank's part of a model, as the engine runs it: one text, any number of tokens a step."""

    def __init__(self, folder: Path, collective: Collective, **options: Any) -> None:
        native.set_num_threads(1)
        checkpoint, settings = settings_for(folder, tensor_parallel_size=collective.ranks.size, **options)
        settings = replace(settings, max_num_batched_tokens=64, max_num_seqs=64)
        self.settings = settings
        self._ops = ops = make_ops("cpu", collective)
        with torch.inference_mode():
            self.model = load_model(checkpoint, settings, ops)
            self.cache = KVCache.of_model(self.model.spec, settings, ops)
            self.forward: Forward = make_forward(self.model, self.cache, ops, "cpu", max_tokens=64, max_rows=64)
        self._computed = 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab_size]: the logits of each; of use in the first rank alone."""
        end = self._computed + len(tokens)
        num_blocks = -(-end // self.cache.block_size)
        tables = [array("i", range(num_blocks))]
        plan = plan_of([(self._computed, tokens)], tables, range(len(tokens))).forward
        self._computed = end
        with torch.inference_mode():
            logits = self.forward.run(plan, [tables for _ in self.cache.groups])
            return torch.from_numpy(self._ops.on_host(logits).copy())


def logits(folder: Path, collective: Collective | None, pieces: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """Of a text, computed piece by piece: [tokens, vocab_size]."""
    forward = RankForward(folder, collective or Alone(), **options)
    return torch.cat([forward(piece) for piece in pieces])
