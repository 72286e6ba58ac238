"""Requests under every control of sampling, and what an engine answers them."""

from typing import Any

from penstock import SamplingParams
from penstock.api.request import Request, TokenLogprob
from penstock.api.sampling_params import Structured
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from tests.support.schemas import random_schema

CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.9, "typical_p": 0.8},
    {"temperature": 1.0, "share_penalty": 2.0},
    {"temperature": 0.7, "logit_bias": {70: 2.0, 71: -100.0, 5: 100.0}, "bad_token_ids": [5]},
    {"temperature": 1.5, "bad_words": ["a", "the quick", "ab"]},
    {"temperature": 1.0, "allowed_token_ids": list(range(60, 90))},
    {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": list(range(0, 300, 3)), "ignore_eos": False},
    {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": {70: 1.0},
        "bad_words": ["fox"],
        "logprobs": 3,
    },
    {"temperature": 1.5, "ignore_eos": False, "structured": Structured.json_schema(random_schema(1)), "logprobs": 1},
    {
        "temperature": 1.0,
        "structured": Structured.regex("(the |quick |fox )+"),
        "min_tokens": 5,
        "repetition_penalty": 1.2,
    },
    {"temperature": 0.0, "structured": Structured.json_object(), "frequency_penalty": 0.5},
    {"temperature": 1.0, "logprobs": 0, "allowed_token_ids": list(range(40, 80)), "bad_token_ids": [41, 42]},
]
PROMPTS = ["the quick brown fox jumps over", "the quick brown fox", "a lazy dog", "0123456789"]
Answer = tuple[list[int], list[TokenLogprob] | None]


def requests_of(input_processor: InputProcessor) -> list[Request]:
    return [
        input_processor.make_request(
            PROMPTS[i % len(PROMPTS)],
            SamplingParams(**{"seed": i, "max_tokens": 24, "ignore_eos": True} | controls),
            request_id=str(i),
            arrival=0.0,
        )
        for i, controls in enumerate(CONTROLS * 2)
    ]


def answer(core: EngineCore, requests: list[Request], resumed: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """The answers, of sequences resumed after `resumed`, which are part of them."""
    answers: dict[str, Answer] = {}
    for request in requests:
        tokens, logprobs = (resumed or {}).get(request.request_id, ([], None))
        answers[request.request_id] = (list(tokens), None if request.params.logprobs is None else list(logprobs or []))
        core.add_request(request, (tuple(tokens),) if tokens else ())
    while core.has_work:
        for output in core.step():
            assert output.error is None
            tokens, logprobs = answers[output.request_id]
            tokens += output.token_ids
            if logprobs is not None:
                logprobs += output.logprobs or []
    core.check_integrity()
    return answers
