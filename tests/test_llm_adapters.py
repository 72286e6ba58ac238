"""Adapters offline: the merged model's answers, the same to the bit in any company."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import LLM, SamplingParams
from penstock.api.request import RequestOutput
from penstock.errors import AdapterError, ConfigError, InvalidRequestError
from tests.support.adapters import write_adapter, write_gguf_adapter, write_merged
from tests.support.gguf_files import write_gguf

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
PROMPTS = ["the quick brown fox", "what is the sum of thirty seven and fifty eight, and why is it so", "a"]
OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_num_seqs": 16, "packed_cache": "off", "threads": 2}

Answer = list[tuple[int, float]]


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(folder / "a", tiny_llama, seed=1, rank=4),
        "b": write_adapter(folder / "b", tiny_llama, seed=2, rank=24, size=0.05, dtype="bfloat16"),
        "c": write_adapter(folder / "c", tiny_llama, seed=3, rank=7, targets=("q_proj", "v_proj"), use_rslora=True),
    }


def listed(adapters: dict[str, Path]) -> str:
    return ",".join(f"{name}={path}" for name, path in adapters.items())


def answer(output: RequestOutput) -> Answer:
    assert output.outputs[0].error is None
    assert output.outputs[0].logprobs is not None
    return [(entry.token_id, entry.logprob) for entry in output.outputs[0].logprobs]


def answers(llm: LLM, adapter: str | None) -> list[Answer]:
    return [answer(llm.generate(prompt, PARAMS, adapter=adapter)[0]) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(tiny_llama), adapter=listed(adapters), **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str | None, list[Answer]]:
    """The answers to each prompt, one request at a time."""
    return {name: answers(llm, name) for name in (None, "a", "b", "c")}


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_answer_is_that_of_the_merged_model(
    name: str, alone: dict[str | None, list[Answer]], adapters: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    merged = write_merged(tmp_path / "merged", tiny_llama, adapters[name])
    with LLM(str(merged), **OPTIONS) as llm:
        wanted = answers(llm, None)
    assert alone[name] != alone[None]
    for got, want in zip(alone[name], wanted, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [value for _, value in got] == pytest.approx([value for _, value in want], abs=2e-5)


@pytest.mark.parametrize(("name", "kind"), [("a", "F32"), ("b", "BF16")])
def test_a_gguf_adapter_gives_the_answers_of_its_folder(
    name: str,
    kind: str,
    llm: LLM,
    alone: dict[str | None, list[Answer]],
    adapters: dict[str, Path],
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    file = write_gguf_adapter(tmp_path / "adapter.gguf", tiny_llama, adapters[name], kind=kind)
    llm.load_adapter("gguf", str(file))
    assert answers(llm, "gguf") == alone[name]
    llm.unload_adapter("gguf")


def test_a_gguf_adapter_is_added_to_a_gguf_model(
    alone: dict[str | None, list[Answer]], adapters: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama)
    file = write_gguf_adapter(tmp_path / "folder" / "adapter.gguf", tiny_llama, adapters["a"])
    with LLM(str(tmp_path / "model.gguf"), adapter=f"a={file.parent}", **OPTIONS) as llm:
        assert answers(llm, "a") == alone["a"]
    other = write_gguf_adapter(tmp_path / "other.gguf", tiny_llama, adapters["a"], "qwen2")
    with pytest.raises(AdapterError, match=r"'b' cannot be used: it is for .* qwen2; the model's is llama"):
        LLM(str(tmp_path / "model.gguf"), adapter=f"b={other}", **OPTIONS)


def test_without_a_name_it_answers_as_a_model_without_adapters(
    alone: dict[str | None, list[Answer]], tiny_llama: Path
) -> None:
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        assert answers(llm, None) == alone[None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 8, "kv_cache_memory": "40KiB", "max_model_len": 64, "block_size": 4},
        {"speculation": "ngram"},
    ],
    ids=["together", "in small chunks", "preempted", "guessed ahead"],
)
def test_an_answer_is_the_same_bits_in_any_company(
    changes: dict[str, Any],
    alone: dict[str | None, list[Answer]],
    adapters: dict[str, Path],
    tiny_llama: Path,
) -> None:
    names = [None, "a", "b", "c", "b", "a"]
    asked = [(index, name) for index in range(len(PROMPTS)) for name in names]
    with LLM(str(tiny_llama), adapter=listed(adapters), **(OPTIONS | changes)) as llm:
        outputs = llm.generate([PROMPTS[i] for i, _ in asked], PARAMS, adapter=[name for _, name in asked])
        assert [answer(output) for output in outputs] == [alone[name][index] for index, name in asked]
        if "kv_cache_memory" in changes:
            assert llm.stats().preemptions > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_add_to_a_quantized_base(
    quantization: str, adapters: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    merged = write_merged(tmp_path / "merged", tiny_llama, adapters["a"])
    with LLM(str(tiny_llama), **OPTIONS) as llm, LLM(str(merged), **OPTIONS) as other:
        plain, wanted = text_logprobs(llm, None), text_logprobs(other, None)
    with LLM(str(tiny_llama), adapter=listed(adapters), quantization=quantization, **OPTIONS) as llm:
        made = text_logprobs(llm, "a")
        names = [None, "a", "b", "c"]
        alone = [answer(llm.generate(PROMPTS[1], PARAMS, adapter=name)[0]) for name in names]
        together = llm.generate([PROMPTS[1]] * 4, PARAMS, adapter=names)
    assert [answer(output) for output in together] == alone
    error, effect = (float(abs(one - wanted).mean()) for one in (made, plain))
    assert error < effect * {"int8": 0.1, "int4": 0.4}[quantization]


def text_logprobs(llm: LLM, adapter: str | None) -> NDArray[np.float64]:
    """The log-probabilities of a text's tokens."""
    (output,) = llm.generate([list(range(5, 45))], replace(PARAMS, prompt_logprobs=0), adapter=adapter)
    assert output.prompt_logprobs is not None
    return np.array([entry.logprob for entry in output.prompt_logprobs if entry is not None])


def test_an_adapter_may_be_a_hub_id(
    alone: dict[str | None, list[Answer]],
    adapters: dict[str, Path],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0123456789012345678901234567890123456789"
    repository = tmp_path / "models--someone--lora"
    shutil.copytree(adapters["a"], repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    with LLM(str(tiny_llama), adapter="x=someone/lora", **OPTIONS) as llm:
        assert answers(llm, "x") == alone["a"]
        with pytest.raises(AdapterError, match="nobody/lora is not a local folder, and could not be downloaded"):
            llm.load_adapter("y", "nobody/lora")


def test_the_prefix_cache_is_apart_by_adapter_and_shared_by_its_requests(llm: LLM) -> None:
    prompt = list(range(5, 105))
    cached = {
        (name, turn): llm.generate([prompt], PARAMS, adapter=name)[0].num_cached_tokens
        for turn in range(2)
        for name in (None, "a", "b")
    }
    assert cached == {(name, turn): 96 * turn for turn in range(2) for name in (None, "a", "b")}


def test_those_not_needed_for_longest_give_way_and_come_back(
    alone: dict[str | None, list[Answer]], adapters: dict[str, Path], tiny_llama: Path
) -> None:
    options = OPTIONS | {"adapter_memory": "80KiB"}  # "b" takes 192 KiB, "a" 32
    small = {name: path for name, path in adapters.items() if name != "b"}
    with LLM(str(tiny_llama), adapter=listed(small), **options) as llm:
        with pytest.raises(AdapterError, match=r"'b' has .* raise adapter_memory"):
            llm.load_adapter("b", str(adapters["b"]))
        for name in ("a", "c"):
            assert answers(llm, name) == alone[name]
        assert llm.stats().adapters_loaded == 2
    with LLM(str(tiny_llama), adapter=listed(small), **(OPTIONS | {"adapter_memory": "33KiB"})) as llm:
        names = ["a", "c", None, "a", "c"]
        outputs = llm.generate([PROMPTS[0]] * 5, PARAMS, adapter=names)
        assert [answer(output) for output in outputs] == [alone[name][0] for name in names]
        assert llm.stats().adapters_loaded == 1


def test_adapters_are_loaded_and_unloaded_at_run_time(
    alone: dict[str | None, list[Answer]], adapters: dict[str, Path], tiny_llama: Path
) -> None:
    with LLM(str(tiny_llama), adapter_memory="1MiB", **OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match="no adapter 'x'"):
            llm.generate("hello", adapter="x")
        llm.load_adapter("x", str(adapters["a"]))
        assert answers(llm, "x") == alone["a"]
        llm.load_adapter("x", str(adapters["a"]))  # the same once more
        with pytest.raises(AdapterError, match="'x' already"):
            llm.load_adapter("x", str(adapters["c"]))
        llm.unload_adapter("x")
        with pytest.raises(InvalidRequestError, match="no adapter 'x'"):
            llm.unload_adapter("x")
        llm.load_adapter("x", str(adapters["c"]))
        assert answers(llm, "x") == alone["c"]


def test_files_that_changed_fail_their_requests_alone(
    adapters: dict[str, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "changing", tiny_llama, seed=5)
    with LLM(str(tiny_llama), adapter=listed({**adapters, "changing": folder}), **OPTIONS) as llm:
        write_adapter(folder, tiny_llama, seed=6)
        failed, served = llm.generate(["hello", "hello"], PARAMS, adapter=["changing", "a"])
        assert "have changed" in str(failed.outputs[0].error)
        assert served.outputs[0].error is None
        write_adapter(folder, tiny_llama, seed=5)
        assert llm.generate("hello", PARAMS, adapter="changing")[0].outputs[0].error is None


def test_without_planned_memory_none_can_be_loaded(adapters: dict[str, Path], tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), **OPTIONS) as llm, pytest.raises(AdapterError, match="--adapter-memory"):
        llm.load_adapter("a", str(adapters["a"]))


def test_an_engine_does_not_start_with_a_listed_adapter_that_does_not_fit(tiny_llama: Path, tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", tiny_llama, r=8)
    with pytest.raises(AdapterError, match=r"'wrong' cannot be used: .*lora_A\.weight has the shape \[4, 128\]"):
        LLM(str(tiny_llama), adapter=f"wrong={wrong}", **OPTIONS)


@pytest.mark.parametrize("option", ["a", "a=", "=b", "a=x,a=y"])
def test_an_adapter_option_is_a_name_and_a_path(option: str, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="adapter"):
        LLM(str(tiny_llama), adapter=option, **OPTIONS)


def test_the_plan_tells_of_the_adapters_and_the_engine_takes_no_more(llm: LLM, adapters: dict[str, Path]) -> None:
    assert "KiB adapters" in llm.memory_plan
    with pytest.raises(InvalidRequestError, match="3 prompts, but 2 adapters"):
        llm.generate(["a", "b", "c"], adapter=["a", "b"])
