"""The Python API for asyncio, on a small random model in an engine process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from penstock import LLM, AsyncLLM, Function, SamplingParams, Tools
from penstock.api.request import FinishReason
from penstock.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError
from penstock.parsers.parts import ToolCall
from tests.support.checkpoints import write_tiny_llama

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


def with_llm(talk: Callable[[AsyncLLM], Awaitable[T]], model: Path | None) -> T:
    async def run() -> T:
        async with AsyncLLM(None if model is None else str(model), kv_cache_memory="64MiB", threads=1) as llm:
            return await asyncio.wait_for(talk(llm), 120)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes thousands of tokens."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("endless"), max_position_embeddings=32_768)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    return folder


async def until_aborted(llm: AsyncLLM, count: int) -> None:
    deadline = time.monotonic() + 30
    metrics = llm._engine.metrics
    while metrics.success.values["abort"] < count:
        assert time.monotonic() < deadline, metrics.success.values
        await asyncio.sleep(0.01)


def test_many_concurrent_requests_get_the_answers_of_the_offline_api_and_streams_add_up_to_them(
    tiny_llama: Path,
) -> None:
    prompts = [f"hello {number}" for number in range(100)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    with LLM(str(tiny_llama), kv_cache_memory="64MiB", threads=1) as llm:
        expected = [output.outputs for output in llm.generate(prompts, params)]

    async def streamed(llm: AsyncLLM, prompt: str) -> tuple[str, list[int]]:
        deltas = [delta async for delta in llm.stream(prompt, params)]
        assert all(entry.text is not None for delta in deltas for entry in delta.logprobs or ())
        return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]

    async def talk(llm: AsyncLLM) -> None:
        assert repr(llm) == f"AsyncLLM({tiny_llama.name!r}, dtype='float32', max_model_len=512)"
        outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))
        assert [output.outputs for output in outputs] == expected
        assert outputs[3].prompt == "hello 3"
        streams = await asyncio.gather(*(streamed(llm, prompt) for prompt in prompts))
        assert streams == [(answers[0].text, answers[0].token_ids) for answers in expected]
        (ended, *_) = [await one for one in asyncio.as_completed([llm.generate([5, 6], GREEDY)])]
        assert ended.finished
        for call, words in (
            (lambda: llm.generate(7, GREEDY), "the prompt must be text"),  # type: ignore[arg-type]
            (lambda: llm.generate("x", {"max_tokens": 5}), "params must be SamplingParams"),  # type: ignore[arg-type]
            (lambda: llm.generate("x", adapter="none"), "there is no adapter 'none'"),
            (lambda: llm.chat("hello"), "messages must be a list"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await call()
        with pytest.raises(InvalidRequestError):
            await anext(llm.stream("x", SamplingParams(n=1, best_of=2, temperature=1.0)))

    with_llm(talk, tiny_llama)


def test_a_task_that_is_cancelled_or_leaves_its_stream_aborts_its_request(endless: Path) -> None:
    async def read(llm: AsyncLLM, started: asyncio.Event) -> None:
        async for _ in llm.stream("hello", ENDLESS):
            started.set()

    async def talk(llm: AsyncLLM) -> None:
        started = asyncio.Event()
        streaming = asyncio.create_task(read(llm, started))
        waiting = asyncio.create_task(llm.generate("fox", ENDLESS))
        await started.wait()
        for task in (streaming, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_aborted(llm, 2)
        async for delta in llm.stream("hello", ENDLESS):
            assert delta.token_ids
            break
        await until_aborted(llm, 3)
        output = await llm.generate("hello", GREEDY)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH

    with_llm(talk, endless)


def test_chats_are_answered_and_taken_apart() -> None:
    tools = Tools(
        (Function("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}),), "required"
    )
    messages = [{"role": "user", "content": "What is 37 + 58?"}]

    async def talk(llm: AsyncLLM) -> None:
        output = await llm.chat(messages, GREEDY)
        deltas = [delta async for delta in llm.stream_chat(messages, GREEDY)]
        assert "".join(delta.text for delta in deltas) == output.outputs[0].text
        called = await llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=60), tools=tools)
        assert isinstance(llm.parts(called, tools)[0][-1], ToolCall)
        with pytest.raises(InvalidRequestError, match="one conversation"):
            await llm.chat([messages, messages])  # type: ignore[list-item]

    with_llm(talk, None)


def test_open_requests_fail_as_it_closes_and_it_says_where_it_is_not_running(endless: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(endless), kv_cache_memory="64MiB", threads=1)
        assert repr(llm) == "AsyncLLM(not running)"
        async with llm:
            with pytest.raises(InvalidRequestError, match="running already"):
                await llm.__aenter__()
            task = asyncio.create_task(llm.generate("hello", ENDLESS))
            await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError):
            await task
        with pytest.raises(EngineDeadError, match="use it inside `async with`"):
            await llm.generate("hello")

    asyncio.run(run())


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        AsyncLLM(max_num_seq=8)  # type: ignore[call-arg]
    with pytest.raises((ConfigError, CheckpointError), match="missing"):
        asyncio.run(AsyncLLM(str(tmp_path / "missing")).__aenter__())


def test_the_examples_of_the_page_run_and_answer_rightly() -> None:
    page = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    offline, concurrent = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown = [
        subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True).stdout.splitlines()
        for example in (offline, concurrent)
    ]
    sums = ["37 + 58 = 95", "9 - 4 = 5"]
    assert shown[0][:2] == sums
    assert sorted(shown[0][2:]) == [f"{index} {one}" for index, one in enumerate(sums)]
    assert shown[1][0] == "37 + 58 = 95"
    assert sorted(shown[1][1:]) == sorted(f"{number} + 1 = {number + 1}" for number in range(20))


PROGRAM = """
import asyncio, sys
from penstock import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(sys.argv[1], kv_cache_memory="64MiB", threads=1) as llm:
        print(*llm._engine.pids, flush=True)
        async for delta in llm.stream("hello", SamplingParams(ignore_eos=True)):
            print("delta", flush=True)

asyncio.run(main())
"""


def test_ctrl_c_ends_the_program_and_its_engine(endless: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(endless)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "delta\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    assert "Error:" not in errors.replace("CancelledError", "")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the engine goes on"
        time.sleep(0.05)
