"""Models of `transformers` as references: random texts, and their logits."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class InFloat64:
    """A model of `transformers` that computes in float64 where its code says float32."""

    class Torch:
        """`torch`, as the model's module sees it."""

        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def __init__(self, model: Any) -> None:
        model.set_experts_implementation("eager")  # others know no float64
        self._model = model.double()

    def __call__(self, tokens: torch.Tensor) -> Any:
        return self._run(self._model, tokens)

    def generate(self, *args: Any, **options: Any) -> Any:
        return self._run(self._model.generate, *args, **options)

    def _run(self, method: Any, *args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(sys.modules[type(self._model).__module__], "torch", self.Torch())
            return method(*args, **options)


def referee(model: Any) -> Any:
    """The model to be held to: exact where there are delta nets, whose two ways in float32 differ too much."""
    config = model.config.get_text_config()
    return (
        InFloat64(model) if any(hasattr(config, key) for key in ("linear_key_head_dim", "linear_head_dim")) else model
    )


def texts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(160) for _ in range(length)] for length in lengths]


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].to(torch.float32)


def cut(text: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The text in pieces of `sizes`, then token by token."""
    first = 0
    while first < len(text):
        size = sizes.pop(0) if sizes else 1
        yield text[first : first + size]
        first += size
