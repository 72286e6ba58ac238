"""The same crowd over HTTP: the real server, the real `openai` package, and the answers of an idle engine."""

import asyncio

import openai

from penstock import LLM
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.text.tokenizer import Tokenizer
from tests.e2e.crowd import Visitor, make_visitors, small_pool
from tests.server.running import RunningServer, running_server
from tests.support.waiting import wait_until


async def visit(client: openai.AsyncOpenAI, model: str, visitor: Visitor) -> str | None:
    """Stream an answer; one that leaves reads a few chunks and goes, with nothing to compare.

    All come at once: a fast engine would be done with the first before the last are there.
    """
    stream = await client.completions.create(
        model=model,
        prompt=visitor.prompt,
        stream=True,
        temperature=visitor.params.temperature,
        seed=visitor.params.seed,
        max_tokens=visitor.params.max_tokens,
        extra_body={"ignore_eos": visitor.params.ignore_eos},
    )
    parts = []
    async with stream:
        async for chunk in stream:
            parts.append(chunk.choices[0].text)
            if visitor.leaves is not None and len(parts) > visitor.leaves - visitor.comes:
                return None
    return "".join(parts)


async def visit_all(server: RunningServer, visitors: list[Visitor]) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=250) as client:
        return await asyncio.gather(*(visit(client, server.model, visitor) for visitor in visitors))


def test_64_clients_at_once_get_the_answers_of_an_idle_engine_and_leave_nothing_behind() -> None:
    visitors = make_visitors(Tokenizer.from_path(DEMO_FOLDER), seed=7)
    with LLM(dtype="float32", enable_prefix_caching=False, threads=1) as llm:
        expected = [llm.generate(v.prompt, v.params)[0].outputs[0].text for v in visitors]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in small_pool().items()]
    with running_server(*flags) as server:
        answers = asyncio.run(visit_all(server, visitors))
        for i, (answer, alone) in enumerate(zip(answers, expected, strict=True)):
            assert answer is None or answer == alone, f"request {i} is answered differently in company"
        wait_until(server.idle)
        assert server.metrics()["penstock_num_preemptions_total"] > 0, "the pool is too large to prove anything"
