import json

import pytest
from transformers import AutoTokenizer

from penstock.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import CORPUS, byte_level_bpe

TEXTS = [
    *CORPUS[:3],
    "",
    " a  b",
    "it's 2025\r\n\n  x",
    "e\u0301 <think>é</think>",
    "a<|im_end|>b <tool> c",
    "😀\u200d",
]
ADDED = {"<|endoftext|>": 420, "<|im_start|>": 421, "<|im_end|>": 422, "<tool>": 423}


def write_vocab_json(folder, *, config=None, added=None, model_type=None):
    """vocab.json with merges.txt, and the files of tokens that older checkpoints have beside them."""
    byte_level_bpe().model.save(str(folder))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    return folder


def decoder(ids):
    return {
        str(i): {"content": text, "special": text != "<tool>", "normalized": False, "lstrip": False, "rstrip": False}
        for text, i in ids.items()
    }


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder(ADDED)},
        {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder(ADDED), "add_prefix_space": True},
        {"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": decoder(ADDED), "bos_token": None},
        {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder(ADDED), "split_special_tokens": True},
    ],
)
def test_vocab_json_and_merges_encode_as_transformers(tmp_path, config):
    folder = write_vocab_json(tmp_path, config=config)
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id == 420


def test_roberta_puts_its_tokens_around_texts_and_pairs(tmp_path):
    folder = write_vocab_json(tmp_path, config={"tokenizer_class": "RobertaTokenizer"})
    ours = Tokenizer.from_path(folder)
    bos, eos = (ours.backend.token_to_id(text) for text in ("<s>", "</s>"))
    a, b = (ours.encode(text, add_special_tokens=False) for text in ("Hello", " world"))
    assert ours.encode_texts(["Hello", ("Hello", " world")]) == [
        ((bos, *a, eos), 0),
        ((bos, *a, eos, eos, *b, eos), 0),
    ]


def test_added_tokens_json_and_the_special_tokens_map_count_as_in_older_checkpoints(tmp_path):
    folder = write_vocab_json(tmp_path, added={**ADDED, "<far>": 500}, model_type="qwen2")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    )
    ours = Tokenizer.load(folder)
    assert ours.encode("<|im_start|><tool><far>", add_special_tokens=False) == [421, 423, 500]
    assert ours.eos_token_id == 422
    assert ours.decode([421, 423, 422]) == "<tool>"


def test_add_bos_token_is_obeyed(tmp_path):
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "add_bos_token": True}
    ours = Tokenizer.from_path(write_vocab_json(tmp_path, config=config))
    bos = ours.special_token("</s>")
    assert ours.encode("a")[0] == bos
    assert bos not in ours.encode("a", add_special_tokens=False)
    config |= {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}
    with pytest.raises(CheckpointError, match=r"add_bos_token is true .* defines no bos_token"):
        Tokenizer.from_path(write_vocab_json(tmp_path, config=config))


def test_starcoder_splits_numbers_though_its_class_is_gpt2s(tmp_path):
    config = {"tokenizer_class": "GPT2Tokenizer"}
    folder = write_vocab_json(tmp_path, config=config, model_type="starcoder2")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocabulary, "77": len(vocabulary)}))
    with (folder / "merges.txt").open("a") as file:
        file.write("7 7\n")
    assert len(Tokenizer.from_path(folder).encode("77")) == 2
    (folder / "config.json").write_text("{}")
    assert Tokenizer.from_path(folder).encode("77") == [len(vocabulary)]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.json", '{"a": "b"}', "must be a JSON object of token ids by text"),
        ("vocab.json", '{"a": 5, "b": 5}', "both have id 5"),
        ("vocab.json", '{"a": 1}', "cannot be used"),
        ("vocab.json", '{"a": -1}', "cannot be used"),
        ("merges.txt", "a b c\n", "not two tokens"),
        ("merges.txt", "ab\n", "not two tokens"),
        ("added_tokens.json", '{"h": 9999}', "has id .* but 9999 in the configs"),
        ("added_tokens.json", '{"<x>": -5}', "in a form that is not known"),
        ("added_tokens.json", '{"<x>": "y"}', "in a form that is not known"),
        ("config.json", '{"model_type": "clip"}', "tokenizer_class is None .*whose pre-tokenizer is not known"),
        ("tokenizer_config.json", '{"tokenizer_class": "CLIPTokenizer"}', "CLIPTokenizer"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "add_bos_token .* must be true or false"),
        ("tokenizer_config.json", '{"add_prefix_space": true}', "add_prefix_space is true"),
    ],
)
def test_damaged_and_unknown_vocabularies_are_refused_by_name(tmp_path, file, content, message):
    folder = write_vocab_json(tmp_path, model_type="qwen3")
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(folder)
