"""Blocks that are kept in a file: found again by the next engine, with the same bits, or not at all."""

import json
import os
import random
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock.api.request import SequenceOutput
from penstock.engine.core import EngineCore
from penstock.errors import ConfigError
from penstock.runner import rank_blocks
from penstock.runner.block_file import PAGE
from tests.e2e.engines import Answer, answers_of, engine, memory_for, request_of
from tests.server.running import RunningServer, running_server
from tests.support.checkpoints import write_random
from tests.support.needs import needs_native, needs_torch
from tests.support.waiting import wait_until

PROMPT = random.Random(3).choices(range(3, 200), k=200)
WORDS = " ".join(f"word{i}" for i in range(120))


def answer(core: EngineCore, prompt: list[int] = PROMPT) -> tuple[Answer, int]:
    """A prompt's answer, and how many of its tokens were cached."""
    found = core.stats().prefix_hit_tokens
    (told,) = answers_of(core, [request_of(core, "r", prompt)]).values()
    wait_until(lambda: core.poll_transfers() or not core.is_writing)  # type: ignore[func-returns-value]
    core.check_integrity()
    return told, core.stats().prefix_hit_tokens - found


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "int8"}, pytest.param({"block_size": 5}, marks=needs_torch)], ids=str
)
def test_the_next_engine_finds_the_prefix_and_answers_the_same(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    without, _ = answer(engine(tiny_llama, **options))
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB", **options)
    assert answer(core) == (without, 0)
    core.close()
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB", **options)
    told, cached = answer(core)
    if (
        "block_size" in options
    ):  # PyTorch's products of one row may differ from those of many in the last bit, as MKL's on Xeons
        assert told[0] == without[0]
    else:
        assert told == without
    assert cached == 199 // core.info.block_size * core.info.block_size
    core.close()
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600
    assert (tmp_path / "kv").stat().st_size <= 8 * 2**20


def test_what_memory_has_no_room_for_comes_back_from_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    options = {"max_model_len": 240, "kv_cache_memory": memory_for(tiny_llama, 18)}
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB", **options)
    first, _ = answer(core)
    answer(core, PROMPT[::-1])
    assert answer(core) == (first, 192)
    stats = core.stats().tier
    assert stats is not None
    assert stats.loaded >= 8
    core.close()


def test_a_damaged_file_loses_cache_and_no_answer(tiny_llama: Path, tmp_path: Path) -> None:
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:1MiB")
    first, _ = answer(core)
    core.close()
    rng = random.Random(4)
    with open(tmp_path / "kv", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for place in range(PAGE, size, PAGE // 4):
            file.seek(place + rng.randrange(PAGE // 4))
            file.write(rng.randbytes(3))
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:1MiB")
    assert answer(core) == (first, 0)
    core.close()


def test_a_file_of_another_model_is_begun_anew(tiny_llama: Path, tmp_path: Path) -> None:
    core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:1MiB")
    answer(core)
    core.close()
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    without, _ = answer(engine(other))
    core = engine(other, kv_disk=f"{tmp_path}/kv:1MiB")
    assert answer(core) == (without, 0)
    core.close()


@pytest.mark.parametrize(
    ("wanted", "others", "words"),
    [
        ("{}/kv:0", {}, "must be positive"),
        ("{}/missing/kv", {}, "cannot be opened"),
        (":1MiB", {}, "names no file"),
        ("{}/kv:9KiB", {}, "no room for a block"),
        ("{}/kv", {"enable_prefix_caching": False}, "leave enable_prefix_caching on"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny_llama: Path, tmp_path: Path, wanted: str, others: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(tiny_llama, kv_disk=wanted.format(tmp_path), **others)


SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
SLIDING_AND_FULL = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
LATENTS = {
    "num_key_value_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}


@pytest.mark.parametrize(
    ("family", "changes", "num_read"), [("Gemma3", SLIDING_AND_FULL, 12 + 2), ("DeepseekV3", LATENTS, 12)]
)
def test_windows_beside_full_attention_and_latents_are_kept(
    tmp_path: Path, family: str, changes: dict[str, Any], num_read: int
) -> None:
    write_random(tmp_path, family, **SHAPE | changes)
    without, _ = answer(engine(tmp_path))
    core = engine(tmp_path, kv_disk=f"{tmp_path}/kv:8MiB")
    assert answer(core) == (without, 0)
    core.close()
    core = engine(tmp_path, kv_disk=f"{tmp_path}/kv:8MiB")
    assert answer(core) == (without, 192)
    stats = core.stats().tier
    assert stats is not None
    assert stats.loaded == num_read, "of a window, what is seen"
    core.close()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Mistral", {"sliding_window": 24}), ("Lfm2", {"layer_types": ["conv", "full_attention"]})],
)
def test_models_of_windows_alone_and_of_states_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    write_random(tmp_path, family, **SHAPE | changes)
    with pytest.raises(ConfigError, match=r"kv_disk keeps blocks of models .* has sliding windows only, or recurrent"):
        engine(tmp_path, kv_disk=f"{tmp_path}/kv")


def complete(server: RunningServer) -> tuple[str, int]:
    """An answer, and the cached tokens of its prompt."""
    told = server.post("/v1/completions", prompt=WORDS, max_tokens=12, temperature=0, ignore_eos=True).json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_restarted_server_finds_the_prefix(tmp_path: Path) -> None:
    flags = ["--threads", "1", "--kv-cache-memory", "64MiB", "--kv-disk", f"{tmp_path}/kv:64MiB"]
    with running_server(*flags) as server:
        first, cached = complete(server)
        assert cached == 0
    with running_server(*flags) as server:
        text, cached = complete(server)
        assert text == first
        assert cached > 100
        # An engine that is killed has written what it computed, too.
        server.post("/v1/completions", prompt=f"Now {WORDS}", max_tokens=2)
        written = 'penstock_block_transfers_total{what="written"}'
        wait_until(lambda: server.metrics()[written] > 3)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert complete(server) == (first, cached)


@needs_native
def test_the_blocks_of_two_ranks_are_kept_and_found_again(tiny_llama: Path, tmp_path: Path) -> None:
    without, _ = answer(engine(tiny_llama))
    for cached in (0, 192):
        core = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB", tensor_parallel_size=2, threads=2)
        assert answer(core) == (without, cached)
        core.close()
    alone = engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB")  # whose blocks have their heads in another order
    assert answer(alone) == (without, 0)
    alone.close()


@needs_native
def test_an_engine_of_two_ranks_goes_on_with_blocks_that_another_has_computed(tiny_llama: Path) -> None:
    (wanted, logprobs), _ = answer(engine(tiny_llama))
    cores = [engine(tiny_llama, role, tensor_parallel_size=2, threads=2) for role in ("prefill", "decode")]
    request = request_of(cores[0], "r", PROMPT)
    cores[0].add_request(request)
    told: list[SequenceOutput] = []
    while not told:
        told = cores[0].step()
    cores[0].hand_over("r")
    wait_until(lambda: cores[0].poll_transfers() or not cores[0].is_writing)  # type: ignore[func-returns-value]
    ((_, source),) = cores[0].drain_handovers()
    cores[1].add_request(request, (tuple(told[0].token_ids),), source)
    while cores[1].has_work:
        told += cores[1].step()
    assert [token for output in told for token in output.token_ids] == wanted
    assert [entry for output in told for entry in output.logprobs or ()] == logprobs
    stats = cores[1].stats().tier
    assert stats is not None
    assert stats.pulled == len(PROMPT) // cores[1].info.block_size
    for core in cores:
        core.close()


@needs_native
def test_a_system_that_hides_the_memory_of_ranks_is_told(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_blocks, "_LIBC", None)  # which has no such calls
    with pytest.raises(ConfigError, match="the system forbids to read the memory of child processes"):
        engine(tiny_llama, kv_disk=f"{tmp_path}/kv:8MiB", tensor_parallel_size=2, threads=2)
