"""Greedy answers under controls are those of `transformers`' `generate`, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from tests.support.checkpoints import write_few_tokens

STOPS = [0, 3, 7]
LENGTH = 24
PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 37)), [40, 2, 40, 2, 40, 2, 40, 2, 1]]
# ours, with runs of banned tokens beside; theirs
CONTROLS: list[tuple[dict[str, Any], list[list[int]], dict[str, Any]]] = [
    ({"repetition_penalty": 1.3}, [], {"repetition_penalty": 1.3}),
    ({"repetition_penalty": 0.7}, [], {"repetition_penalty": 0.7}),
    ({}, [[40], [2, 40], [11, 12, 13]], {"bad_words_ids": [[40], [2, 40], [11, 12, 13]]}),
    (
        {"logit_bias": {4: 0.5, 9: -100.0, 20: 1.0}},
        [],
        {"sequence_bias": [[[4], 0.5], [[9], -100.0], [[20], 1.0]]},
    ),
    ({"min_tokens": 15}, [], {"min_new_tokens": 15}),
    ({"bad_token_ids": list(range(10, 40))}, [], {"suppress_tokens": list(range(10, 40))}),
    (
        {"repetition_penalty": 1.1, "logit_bias": {5: 0.3, 6: 0.3}, "min_tokens": 6},
        [[40, 40], [5, 5], [6, 5]],
        {
            "repetition_penalty": 1.1,
            "sequence_bias": [[[5], 0.3], [[6], 0.3]],
            "min_new_tokens": 6,
            "bad_words_ids": [[40, 40], [5, 5], [6, 5]],
        },
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("few-tokens")
    return folder, write_few_tokens(folder)


@pytest.fixture(scope="module")
def core(checkpoint: tuple[Path, Any]) -> Iterator[EngineCore]:
    made = build_engine(EngineConfig.from_options(model=str(checkpoint[0]), kv_cache_memory="1MiB", threads=1))
    yield made
    made.close()


def generate(model: Any, prompt: list[int], controls: dict[str, Any]) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=LENGTH,
            eos_token_id=STOPS,
            pad_token_id=47,
            **controls,
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def test_greedy_answers_under_controls_are_those_of_transformers(
    core: EngineCore, checkpoint: tuple[Path, Any]
) -> None:
    input_processor = InputProcessor(None, core.info)
    found: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    for number, (ours, banned, theirs) in enumerate(CONTROLS):
        for prompt in PROMPTS:
            name = f"{number} {prompt}"
            params = SamplingParams(temperature=0.0, max_tokens=LENGTH, stop_token_ids=STOPS, **ours)
            request = input_processor.make_request(prompt, params, request_id=name, arrival=0.0)
            runs = (*request.params.banned, *(tuple(run) for run in banned))
            core.add_request(replace(request, params=replace(request.params, banned=runs)))
            expected[name] = generate(checkpoint[1], prompt, theirs)
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == expected
    assert len({tuple(answer) for answer in found.values()}) > len(found) / 2
