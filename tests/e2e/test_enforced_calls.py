"""Calls of a tiny random model at temperature 1, in formats whose marks are special tokens.

The model knows no format: what is right about an answer that ends by itself is its grammar's doing.
"""

import asyncio
import json

import openai
import pytest

from penstock import LLM, Function, SamplingParams, Structured, Tools
from penstock.api.request import FinishReason
from penstock.parsers.parts import Text, ToolCall
from tests.parsers.answers import MARKS, write_tokenizer
from tests.server.running import running_server
from tests.support.schemas import check_document

TEMPLATES = {
    "harmony": ("x{# <|channel|>analysis<|message|><|end|> #}", ["<|return|>", "<|call|>"]),
    "gemma": ("x{# <|tool_call><|channel>thought<channel|> #}", ["<|return|>"]),
}
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 5},
        "number": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
        "kinds": {"type": "array", "items": {"enum": ["home", "work", 3]}, "maxItems": 2},
    },
    "required": ["number", "kinds"],
    "additionalProperties": False,
}
FIND = Function("find", "Finds a house.", ADDRESS, strict=True)
STOP = Function("stop", "Stops.", strict=True)
LIKELY = dict.fromkeys(range(len(MARKS)), 3.0)
"""A bias towards marks, so that answers are short."""
FORM = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module", params=TEMPLATES)
def checkpoint(request, tmp_path_factory):
    from tests.support.checkpoints import write_tiny_llama  # here: it imports torch, which many tests do without

    template, ends = TEMPLATES[request.param]
    folder = write_tiny_llama(tmp_path_factory.mktemp(request.param), vocab_size=len(MARKS) + 256)
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [MARKS.index(end) for end in ends]}))
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), threads=1) as made:
        yield made


def answers(llm, tools, form=None):
    """The parts of each answer of many seeds that ended by itself."""
    wanted = [
        SamplingParams(n=8, seed=seed, temperature=1.0, max_tokens=200, logit_bias=LIKELY, structured=form)
        for seed in range(4)
    ]
    for output in llm.chat([[{"role": "user", "content": "x"}]] * len(wanted), wanted, tools=tools):
        for answer, parts in zip(output.outputs, llm.parts(output, tools), strict=True):
            assert answer.error is None
            if answer.finish_reason is FinishReason.STOP:
                yield parts


def check_calls(parts):
    """Assert that the calls validate; returns them."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for call in calls:
        check_document(call.arguments, {"find": FIND, "stop": STOP}[call.name].schema)
    return calls


def test_required_calls(llm):
    told = list(answers(llm, Tools((FIND, STOP), "required")))
    assert len(told) > 10
    for parts in told:
        assert check_calls(parts)
        assert not any(isinstance(part, Text) for part in parts)


def test_one_call_of_a_given_tool(llm):
    for parts in answers(llm, Tools.forced((FIND, STOP), "find")):
        (call,) = check_calls(parts)
        assert call.name == "find"


@pytest.mark.parametrize("parallel", [True, False])
def test_optional_calls(llm, parallel):
    counts = [len(check_calls(parts)) for parts in answers(llm, Tools((FIND, STOP), parallel=parallel))]
    assert len(counts) > 10
    assert parallel or max(counts) <= 1


def test_calls_or_a_form(llm):
    kinds = set()
    for parts in answers(llm, Tools((FIND, STOP)), Structured.json_schema(FORM)):
        calls, texts = check_calls(parts), [part.text for part in parts if isinstance(part, Text)]
        assert bool(calls) != bool(texts)
        for text in texts:
            check_document(text, FORM)
        kinds.add(bool(calls))
    assert kinds == {True, False}


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def told(client, **options):
    """Text, calls and finish reason of each answer, by a stream; as a whole they must be the same."""
    whole = await client.chat.completions.create(**options)
    texts, calls, reasons = {}, {}, {}
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            made = calls.setdefault(choice.index, [])
            for call in choice.delta.tool_calls or ():
                made += [(call.function.name, "")] if call.id else []
                made[-1] = (made[-1][0], made[-1][1] + call.function.arguments)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        said = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        streamed = texts[choice.index], calls[choice.index], reasons[choice.index]
        assert streamed == (choice.message.content or "", said, choice.finish_reason)
        yield streamed


def test_what_agents_send_by_default_over_http(checkpoint):
    strict = [{"type": "function", "function": {"name": "find", "parameters": ADDRESS, "strict": True}}]
    lax = [{"type": "function", "function": {"name": "find", "parameters": ADDRESS}}]
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM, "strict": True}}
    asked = [
        {"tools": strict},
        {"tools": lax, "parallel_tool_calls": False},
        {"tools": lax, "tool_choice": "required"},
        {"tools": lax, "tool_choice": {"type": "function", "function": {"name": "find"}}},
        {"tools": lax, "response_format": form},
    ]
    common = {"model": checkpoint.name, "messages": [{"role": "user", "content": "x"}], "n": 6, "temperature": 1}
    common |= {"max_tokens": 200, "seed": 1, "logit_bias": LIKELY}

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for options in asked:
                async for text, calls, reason in told(client, **common, **options):
                    assert reason in ("stop", "tool_calls", "length")
                    assert (reason == "tool_calls") == bool(calls) or reason == "length"
                    if reason != "length" and (options["tools"] is strict or "tool_choice" in options):
                        for _, arguments in calls:
                            check_document(arguments, ADDRESS)
                    if reason == "stop" and "response_format" in options:
                        check_document(text, FORM)
                    assert reason != "stop" or "tool_choice" not in options

    with running_server("--model", str(checkpoint), "--threads", "1") as server:
        asyncio.run(ask())
