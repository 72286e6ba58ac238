"""The whole engine on a device that is not the CPU: the answers of the reference kernels on the CPU.

The device is pretended (`tests/support/pretended.py`), so that every machine has one. A machine with a GPU tests that,
too.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.engine.build import build_engine
from penstock.frontend.input_processor import InputProcessor
from penstock.text.tokenizer import Tokenizer
from tests.support.checkpoints import write_random, write_tokenizer
from tests.support.controls import Answer, answer, requests_of
from tests.support.pretended import NAME, PretendedDevice


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    """A process of its own: it computes with the reference kernels, and learns of the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_ISA", "reference")
        with ProcessPoolExecutor(1, get_context("spawn")) as made:
            made.submit(os.getpid).result()
            yield made


def break_the_rules() -> None:
    with PretendedDevice() as device:
        there, here = torch.arange(4, device=NAME), torch.arange(4)
        assert there.device.type == NAME
        assert there.to("cpu").device == here.device
        assert (there + here.to(NAME)).cpu().tolist() == [0, 2, 4, 6]
        assert (there * torch.tensor(2)).tolist() == [0, 2, 4, 6]
        there[1:3] += 5
        assert there.tolist() == [0, 6, 7, 3]
        assert device.count > 5
        for mixed in (lambda: there + here, lambda: there[here], lambda: torch.where(there > 1, here, there)):
            with pytest.raises(RuntimeError, match="on the host"):
                mixed()
        with pytest.raises((TypeError, RuntimeError)):
            there.numpy()


def test_the_device_fails_where_a_gpu_would(process: Executor) -> None:
    process.submit(break_the_rules).result()


def answers_on(device: str, folder: Path, options: dict[str, Any]) -> dict[str, Answer]:
    """What the requests under every control of sampling get together, their prompts in chunks."""
    machine = Machine(device=device, cores=1, memory=2**32)
    small = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 24, "threads": 1}
    config = EngineConfig.from_options(model=str(folder), max_model_len=80, **(small | options))
    core = build_engine(config, machine=machine)
    assert core.settings.device == device
    answers = answer(core, requests_of(InputProcessor(Tokenizer.from_path(folder), core.info)))
    assert (core.stats().preemptions > 0) == ("480KiB" in options.values())
    core.close()
    return answers


def answers_there(folder: Path, options: dict[str, Any]) -> dict[str, Answer]:
    with PretendedDevice() as device:
        answers = answers_on(NAME, folder, options)
        assert device.count > 1000
    return answers


SHAPE = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"kv_cache_memory": "480KiB"}),
        ("Granite", {"kv_cache_memory": "1MiB", "kv_cache_dtype": "int8", "quantization": "int8"}),
        ("Mistral", {"kv_cache_memory": "1MiB", "dtype": "bfloat16", "quantization": "int4"}),
        ("Llama", {"kv_cache_memory": "1MiB", "speculation": "ngram", "num_speculative_tokens": 3}),
    ],
)
def test_an_engine_answers_there_what_it_answers_on_the_cpu(
    process: Executor, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    write_model(tmp_path, family)
    there = process.submit(answers_there, tmp_path, options).result()
    here = process.submit(answers_on, "cpu", tmp_path, options).result()
    assert tokens_of(there) == tokens_of(here)


def write_model(folder: Path, family: str) -> None:
    write_random(folder, family, **SHAPE, **({"sliding_window": 5} if family == "Mistral" else {}))
    write_tokenizer(folder, SHAPE["vocab_size"])


def tokens_of(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, _) in answers.items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("family", ["Qwen3", "Granite"])
def test_an_engine_answers_on_a_gpu_what_it_answers_on_the_cpu(process: Executor, tmp_path: Path, family: str) -> None:
    """In float32, whose sums hardly differ: another token is drawn only where two are as likely to seven digits."""
    write_model(tmp_path, family)
    options = {"kv_cache_memory": "1MiB", "dtype": "float32"}
    there, here = (process.submit(answers_on, device, tmp_path, options).result() for device in ("cuda", "cpu"))
    assert tokens_of(there) == tokens_of(here)
