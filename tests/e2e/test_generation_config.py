"""generation_config.json: the same file gives the answers of `transformers`, and a request replaces its defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError
from tests.server.running import running_server
from tests.support.checkpoints import write_tiny_llama

PROMPT = "the quick brown"
GREEDY = SamplingParams(temperature=0.0)
FREE: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": 383}


def ours(folder: Path, *wanted: SamplingParams) -> list[tuple[int, ...]]:
    with LLM(str(folder), kv_cache_memory="8MiB", threads=1) as llm:
        return [tuple(one.outputs[0].token_ids) for one in llm.generate([PROMPT] * len(wanted), list(wanted))]


def theirs(folder: Path) -> tuple[int, ...]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = torch.tensor([tokenizer.encode(PROMPT)])
    texts = {"tokenizer": tokenizer} if model.generation_config.stop_strings else {}
    found = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, pad_token_id=0, **texts)
    return tuple(found[0, given.shape[1] :].tolist())


def write(folder: Path, **generation: Any) -> Path:
    write_tiny_llama(folder)
    (folder / "tokenizer_config.json").write_text("{}")  # whose end token `transformers` does not heed
    (folder / "generation_config.json").write_text(json.dumps(FREE | generation))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """The greedy answer without any of these controls: 24 tokens."""
    folder = write(tmp_path_factory.mktemp("plain"))
    (answer,) = ours(folder, GREEDY)
    assert answer == theirs(folder)
    assert len(answer) == 24
    return answer


@pytest.mark.parametrize(
    "control",
    [
        lambda answer: {"max_new_tokens": 7},
        lambda answer: {"suppress_tokens": [answer[0], answer[5], 5000]},
        lambda answer: {"bad_words_ids": [[answer[1]], [answer[3], answer[4]], [383]]},
        lambda answer: {"sequence_bias": [[[answer[2]], -50.0], [[7], 0.5]]},
        lambda answer: {"eos_token_id": answer[2], "min_new_tokens": 6},
        lambda answer: {"eos_token_id": answer[2], "renormalize_logits": True, "remove_invalid_values": True},
    ],
    ids=["max_new_tokens", "suppress_tokens", "bad_words_ids", "sequence_bias", "min_new_tokens", "harmless"],
)
def test_a_control_of_the_file_has_the_effect_that_it_has_in_transformers(
    tmp_path: Path, plain: tuple[int, ...], control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, **control(plain))
    (answer,) = ours(folder, GREEDY)
    assert answer == theirs(folder)
    assert answer != plain
    assert "have no effect" not in caplog.text


def test_stop_strings_of_the_file_end_an_answer_unless_the_request_has_its_own_or_ignores_ends(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with LLM(str(folder), kv_cache_memory="8MiB", threads=1) as llm:
        text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    first, second = text[6:9], text[15:18]
    write(folder, stop_strings=[first])
    with LLM(str(folder), kv_cache_memory="8MiB", threads=1) as llm:
        ended = llm.generate(PROMPT, GREEDY)[0].outputs[0]
        assert (ended.text, ended.finish_reason) == (text[: text.index(first)], "stop")
        own = llm.generate(PROMPT, SamplingParams(temperature=0.0, stop=second))[0].outputs[0]
        assert own.text == text[: text.index(second)]
        whole = llm.generate(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))[0].outputs[0]
        assert whole.text == text
        pieces = list(llm.stream(PROMPT, GREEDY))
        assert "".join(piece.text for piece in pieces) == ended.text


def test_a_request_replaces_defaults_of_lengths_and_biases(tmp_path: Path, plain: tuple[int, ...]) -> None:
    folder = write(
        tmp_path, max_new_tokens=3, eos_token_id=plain[2], min_new_tokens=3, sequence_bias=[[[plain[0]], -50.0]]
    )
    default, own = ours(
        folder,
        GREEDY,
        SamplingParams(temperature=0.0, max_tokens=9, min_tokens=1, ignore_eos=True, logit_bias={plain[0]: 0}),
    )
    assert len(default) == 3
    assert own == plain[:9]


def test_settings_that_are_not_obeyed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "begin_suppress_tokens": [4],
        "max_length": 100,
        "forced_eos_token_id": 0,
        "sequence_bias": [[[1, 2], 4.0]],
        "of_another_version": "x",
    }
    ours(write(tmp_path, **others, use_cache=False, min_length=0, length_penalty=2.0, forced_bos_token_id=3), GREEDY)
    (line,) = [record.getMessage() for record in caplog.records if "have no effect" in record.getMessage()]
    assert line.endswith(": " + ", ".join(sorted(others)))


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"stop_strings": [1]}, "stop_strings in .* must be a text or a list of texts"),
        ({"stop_strings": ["x"] * 17}, "stop has 17 strings"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens in .* must be a token id"),
        ({"suppress_tokens": list(range(20_000))}, "bad_token_ids has 20000 tokens"),
        ({"bad_words_ids": [1]}, "bad_words_ids in .* must be a list of lists"),
        ({"bad_words_ids": [[1]] * 257}, "bad_words_ids in .* may have 256 sequences of 64 tokens"),
        ({"max_new_tokens": -1}, "max_tokens must be from 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens in .* must be a whole number"),
        ({"min_new_tokens": "x"}, "min_new_tokens in .* must be a number"),
    ],
)
def test_a_control_of_the_wrong_form_or_size_is_named(tmp_path: Path, generation: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ours(write(tmp_path, **generation), GREEDY)


def test_a_server_ends_answers_at_the_stop_strings_of_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with LLM(str(folder), kv_cache_memory="8MiB", threads=1) as llm:
        text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    write(folder, stop_strings=[text[6:9]])
    with running_server("--model", str(folder), "--kv-cache-memory", "8MiB", "--threads", "1") as server:
        (choice,) = server.post("/v1/completions", prompt=PROMPT, temperature=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[6:9])], "stop")
