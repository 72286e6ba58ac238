"""Answers of a form: every one that ends by `stop` holds, whatever the model would rather have said.

`TEST_SCHEMAS=200` for as many schemas through HTTP; the default keeps the suite short.
"""

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import huggingface_hub
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import LLM, SamplingParams, Structured
from penstock.api.request import FinishReason
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.errors import InvalidRequestError
from tests.server.running import RunningServer, running_server
from tests.support.schemas import ENDLESS, check_document, random_schema

SCHEMAS = int(os.environ.get("TEST_SCHEMAS", "12"))


# ── offline: a tiny random model ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    """Its blocks do not suffice for all that is asked at once: sequences are preempted."""
    with LLM(str(tiny_llama), kv_cache_memory="512KiB", block_size=4, max_num_seqs=16, threads=1) as made:
        yield made


@settings(max_examples=12)
@given(st.integers(0, 10**9))
def test_every_document_that_ends_by_stop_is_valid(llm: LLM, seed: int) -> None:
    dice = Random(seed)
    schemas = [random_schema(dice.randrange(10**9)) for _ in range(6)]
    wanted = [
        SamplingParams(
            structured=Structured.json_schema(schema),
            n=dice.choice([1, 2, 3]),
            temperature=1.5,
            seed=dice.randrange(2**32),
            max_tokens=dice.choice([20, 250]),
            min_tokens=dice.choice([0, 15]),
            ignore_eos=dice.random() < 0.3,
            logprobs=dice.choice([None, 2]),
            repetition_penalty=dice.choice([1.0, 1.3]),
            top_p=dice.choice([1.0, 0.8]),
        )
        for schema in schemas
    ]
    for params, schema, output in zip(wanted, schemas, llm.generate(["a fox"] * 6, wanted), strict=True):
        for answer in output.outputs:
            assert answer.error is None
            if answer.finish_reason is FinishReason.STOP:
                check_document(answer.text, schema)
            else:
                assert len(answer.token_ids) == params.max_tokens
            assert params.logprobs is None or len(answer.logprobs or ()) == len(answer.token_ids)


def test_sequences_were_preempted_on_the_way(llm: LLM) -> None:
    wanted = SamplingParams(structured=Structured.regex("(fox |dog )+"), n=16, seed=1, max_tokens=100, ignore_eos=True)
    (output,) = llm.generate("the quick", wanted)
    assert llm.stats().preemptions > 0
    assert all(re.fullmatch("(fox |dog )*[fodgx]*", answer.text) for answer in output.outputs)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_forms_of_all_kinds(llm: LLM, ignore_eos: bool) -> None:
    forms = {
        "[ab]{3}-[0-9]{2}": Structured.regex("[ab]{3}-[0-9]{2}"),
        "x*y": Structured.grammar('start: "x" start | "y"'),
        "yes|no|größer \\d": Structured.choice(["yes", "no", "größer 1"]),
        r"\{.*\}": Structured.json_object(),
    }
    wanted = [
        SamplingParams(structured=form, temperature=1.5, seed=3, ignore_eos=ignore_eos) for form in forms.values()
    ]
    for pattern, output in zip(forms, llm.generate(["a"] * len(wanted), wanted), strict=True):
        (answer,) = output.outputs
        if answer.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, answer.text, re.DOTALL), answer.text
            assert answer.stop_reason is None or not ignore_eos


def test_a_complete_answer_ends_before_its_min_tokens(llm: LLM) -> None:
    wanted = SamplingParams(structured=Structured.choice(["yes"]), min_tokens=50, seed=1)
    (answer,) = llm.generate("a", wanted)[0].outputs
    assert (answer.text, answer.finish_reason) == ("yes", FinishReason.STOP)


def test_min_tokens_hold_where_the_answer_may_go_on(llm: LLM) -> None:
    wanted = SamplingParams(structured=Structured.regex("(fox )+"), min_tokens=30, max_tokens=200, seed=1)
    (answer,) = llm.generate("a", wanted)[0].outputs
    assert len(answer.token_ids) >= 30


def test_a_bad_form_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        llm.generate("a", SamplingParams(structured=Structured.json_schema({"uniqueItems": True})))
    assert llm.stats().steps == steps


def test_what_a_grammar_forces_saves_steps_and_changes_nothing() -> None:
    schemas = [random_schema(seed) for seed in range(6)]
    wanted = [SamplingParams(structured=Structured.json_schema(s), seed=1, max_tokens=300) for s in schemas]
    told, steps = [], []
    for options in ({}, {"speculation": "ngram"}):
        # by a clock on which a step of many tokens costs what one of a single token does
        engine = build_engine(EngineConfig.from_options(threads=1, **options), clock=lambda: 0.0)
        with LLM(engine=engine) as demo:
            outputs = [demo.generate(["A thing:"], one)[0].outputs[0] for one in wanted]
            told.append([(output.token_ids, output.text, output.finish_reason) for output in outputs])
            steps.append(demo.stats().steps)
    assert told[0] == told[1]
    assert steps[1] < steps[0]


# ── through HTTP: the demo model ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Told:
    """What a stream told of an answer."""

    text: str = ""
    logprob_bytes: list[int] = field(default_factory=list)
    reason: str | None = None


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--threads", "1") as running:
        yield running


def client_of(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=300, max_retries=0)


async def tell(client: openai.AsyncOpenAI, model: str, schema: dict[str, Any], seed: int) -> dict[int, Told]:
    """Two answers to one prompt, streamed, with log-probabilities."""
    told: dict[int, Told] = {0: Told(), 1: Told()}
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Describe thing {seed}."}],
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
        stream=True,
        logprobs=True,
        top_logprobs=3,
        n=2,
        seed=seed,
        temperature=1.0,
        max_tokens=1000,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            one = told[choice.index]
            one.text += choice.delta.content or ""
            for entry in (choice.logprobs.content if choice.logprobs else None) or []:
                one.logprob_bytes += entry.bytes or []
            one.reason = choice.finish_reason or one.reason
    return told


def test_random_schemas_give_valid_documents_streamed_with_logprobs_twice(server: RunningServer) -> None:
    async def tell_all() -> list[dict[int, Told]]:
        async with client_of(server) as client:
            gate = asyncio.Semaphore(16)

            async def one(seed: int) -> dict[int, Told]:
                async with gate:
                    return await tell(client, server.model, random_schema(seed), seed)

            return await asyncio.gather(*map(one, range(SCHEMAS)))

    for seed, answers in enumerate(asyncio.run(tell_all())):
        for answer in answers.values():
            assert answer.reason == "stop"
            check_document(answer.text, random_schema(seed))
            assert bytes(answer.logprob_bytes).decode().startswith(answer.text)


def test_each_dialect_has_its_own_word_for_a_form(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    ask = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        said = client.responses.create(
            model=server.model, input="Hi", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
        )
        chosen = client.chat.completions.create(
            model=server.model, messages=ask, extra_body={"structured_outputs": {"choice": ["left", "right"]}}
        )
    check_document(said.output_text, schema)
    assert said.text is not None
    assert said.text.format is not None
    assert said.text.format.type == "json_schema"
    assert chosen.choices[0].message.content in ("left", "right")
    with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
        message = claude.messages.create(
            model=server.model,
            max_tokens=50,
            messages=ask,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert message.stop_reason == "end_turn"
    check_document(message.content[0].text, schema)
    with huggingface_hub.InferenceClient(server.url) as hub:
        digits = hub.text_generation("Hi", grammar={"type": "regex", "value": "[0-9]{4}"}, details=True)
        told = hub.text_generation("Hi", grammar={"type": "json", "value": schema})
    assert re.fullmatch("[0-9]{4}", digits.generated_text)
    check_document(told, schema)


def test_an_answer_that_is_cut_off_says_so(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        cut = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Hi"}],
            response_format={"type": "json_object"},
            max_tokens=2,
        )
    assert cut.choices[0].finish_reason == "length"


def test_neighbours_of_a_form_that_never_compiles_do_not_notice(server: RunningServer) -> None:
    async def stream(client: openai.AsyncOpenAI, until: "asyncio.Future[Any] | None" = None) -> tuple[str, int]:
        """A text, and how many of its pieces came before something was done."""
        text, early = "", 0
        async for chunk in await client.completions.create(
            model=server.model, prompt="Once", stream=True, max_tokens=150, seed=1, extra_body={"ignore_eos": True}
        ):
            early += until is not None and not until.done()
            text += "".join(choice.text for choice in chunk.choices)
        return text, early

    async def refuse(client: openai.AsyncOpenAI, **form: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=server.model, prompt="x", extra_body={"structured_outputs": form})
        assert caught.value.param == "structured_outputs"
        return caught.value.message

    async def run() -> None:
        async with client_of(server) as client:
            alone, _ = await stream(client)
            refused = asyncio.gather(refuse(client, json=ENDLESS), refuse(client, regex="(a"))
            beside, early = await stream(client, refused)
            assert beside == alone
            endless, unclosed = await refused
            assert "too much time" in endless
            assert "unclosed group" in unclosed
            assert early > 20, "the stream stood still"

    asyncio.run(run())
