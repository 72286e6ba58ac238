"""Encoders against `sentence-transformers` and `transformers`, and a text's vector whatever else is in its batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from penstock import LLM
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build
from penstock.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError, WrongTaskError
from penstock.models.registry import read_facts, read_spec
from penstock.native import library
from tests.support import jina_bert
from tests.support.encoders import (
    SIZES,
    config_of,
    largest_difference,
    some_pairs,
    some_texts,
    write_embedder,
    write_model,
)
from tests.support.torch_ops import TorchOps

HIDDEN = SIZES["hidden_size"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and sentence-transformers


def open_llm(folder: Path, **options) -> LLM:
    return LLM(str(folder), packed_cache="off", threads=1, **options)


def modules_of(family: str):
    if family in ("bert", "deberta_v2"):
        return [Pooling(HIDDEN, "mean"), Normalize()]
    if family in ("xlm_roberta", "mpnet", "deberta_v3"):
        return [Pooling(HIDDEN, "cls"), Normalize()]
    if family == "modernbert":
        return [Pooling(HIDDEN, ("max", "weightedmean"))]
    if family == "nomic_bert":
        return [Pooling(HIDDEN, "mean_sqrt_len_tokens")]
    if family == "qwen3":
        return [Pooling(HIDDEN, "lasttoken"), Normalize()]
    identity = torch.nn.Identity()
    return [
        Pooling(HIDDEN, "mean"),
        Dense(HIDDEN, 3 * HIDDEN, bias=False, activation_function=identity),
        Dense(3 * HIDDEN, 40, activation_function=torch.nn.Tanh()),
        Normalize(),
    ]


FAMILIES = (
    *("bert", "xlm_roberta", "modernbert", "nomic_bert", "mpnet", "deberta_v2", "deberta_v3"),
    *("qwen3", "gemma3"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def embedder(request, tmp_path_factory) -> Path:
    torch.manual_seed(1)
    return write_embedder(tmp_path_factory.mktemp("embed") / request.param, request.param, *modules_of(request.param))


def test_vectors_are_those_of_sentence_transformers_in_any_company(embedder: Path):
    texts = some_texts()
    theirs = SentenceTransformer(str(embedder), device="cpu").encode(texts)
    with open_llm(embedder, max_num_batched_tokens=160) as llm:
        together = llm.embed(texts)
        alone = np.stack([llm.embed(text)[0] for text in texts])
        backwards = llm.embed(texts[::-1])[::-1]
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
        by_tokens = llm.embed(tokens)
    assert largest_difference(together, theirs) < 1e-4
    assert together.tobytes() == alone.tobytes() == backwards.tobytes() == by_tokens.tobytes()


def test_without_native_kernels_vectors_are_as_near(embedder: Path, monkeypatch: pytest.MonkeyPatch):
    texts = some_texts(6)
    with open_llm(embedder) as llm:
        native = llm.embed(texts)
    monkeypatch.setattr("penstock.native.library", lambda: None)
    with open_llm(embedder) as llm:
        assert largest_difference(llm.embed(texts), native) < 1e-4


def test_in_bfloat16_vectors_are_near_and_the_same_in_any_company(embedder: Path):
    texts = some_texts(8)
    with open_llm(embedder) as llm:
        exact = llm.embed(texts, normalize=True)
    with open_llm(embedder, dtype="bfloat16") as llm:
        with TorchOps() as noted:
            rounded = llm.embed(texts, normalize=True)
        assert noted.names == [] or library() is None
        alone = np.stack([llm.embed(text, normalize=True)[0] for text in texts])
    assert (exact * rounded).sum(1).min() > 0.99
    assert rounded.tobytes() == alone.tobytes()


SCORERS = {
    "bert": transformers.BertForSequenceClassification,
    "xlm_roberta": transformers.XLMRobertaForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "modernbert": transformers.ModernBertForSequenceClassification,
    "qwen3": transformers.Qwen3ForSequenceClassification,
    "camembert": transformers.CamembertForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "mpnet": transformers.MPNetForSequenceClassification,
    "electra": transformers.ElectraForSequenceClassification,
    "deberta_v2": transformers.DebertaV2ForSequenceClassification,
    "deberta_v3": transformers.DebertaV2ForSequenceClassification,
}


@pytest.mark.parametrize("family", SCORERS)
def test_scores_are_those_of_cross_encoder(family: str, tmp_path: Path):
    config = config_of(family, num_labels=1)
    folder = write_model(tmp_path / family, SCORERS[family](config))
    pairs = some_pairs()
    reference = CrossEncoder(str(folder), device="cpu", max_length=128)
    with open_llm(folder) as llm:
        with TorchOps() as noted:
            scores = llm.score([query for query, _ in pairs], [document for _, document in pairs])
        assert noted.names == [] or library() is None
        raw = llm.score([query for query, _ in pairs], [document for _, document in pairs], raw=True)
        alone = [llm.score(*pair)[0] for pair in pairs]
        with pytest.raises(WrongTaskError, match="scores"):
            llm.embed("word1")
    assert largest_difference(scores, reference.predict(pairs)) < 1e-4
    assert largest_difference(raw, reference.predict(pairs, activation_fn=torch.nn.Identity())) < 1e-3
    assert scores == alone


def test_scores_of_qwen2_are_those_of_transformers(tmp_path: Path):
    model = transformers.Qwen2ForSequenceClassification(config_of("qwen2", num_labels=1))
    folder, (pair, *_) = write_model(tmp_path / "qwen2", model), some_pairs()
    with open_llm(folder) as llm:
        (score,) = llm.score(*pair, raw=True)
        tokens = llm.tokenizer.backend.encode(*pair).ids
    with torch.inference_mode():
        assert score == pytest.approx(model.eval()(torch.tensor([tokens])).logits.item(), abs=1e-4)


@pytest.mark.parametrize("family", ["xlm_roberta", "roberta", "qwen3"])
@pytest.mark.parametrize("native", [True, False])
def test_tokens_of_padding_within_a_text_count_as_in_transformers(
    family: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They have no position in Roberta's table, and none ends a text that a language model classifies."""
    model = SCORERS[family](config_of(family, num_labels=1))
    folder = write_model(tmp_path / family, model)
    pad = model.config.pad_token_id
    if family == "qwen3":  # so that a text may end with it
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    if not native:
        monkeypatch.setattr("penstock.native.library", lambda: None)
    queries = ["word1", "word1 [PAD] word2", "[PAD] word1 [PAD][PAD] word3", "word5 [PAD]", "word4"]
    documents = ["word7", "word8 [PAD]", "[PAD] word9 word8 [PAD][PAD]", "[PAD]", "[PAD] [PAD]"]
    with open_llm(folder) as llm:
        ours = llm.score(queries, documents, raw=True)
        texts = [llm.tokenizer.backend.encode(*pair).ids for pair in zip(queries, documents, strict=True)]
    assert [pad in text for text in texts] == [False, True, True, True, True]
    with torch.inference_mode():
        theirs = [model.eval()(torch.tensor([text])).logits.item() for text in texts]
    assert ours == pytest.approx(theirs, abs=1e-3)


OTHER_HEADS = {
    "BertForMaskedLM": "bert",
    "XLMRobertaForMaskedLM": "xlm_roberta",
    "ModernBertForMaskedLM": "modernbert",
    "RobertaModel": "roberta",
    "RobertaForMaskedLM": "roberta",
    "CamembertForMaskedLM": "camembert",
    "DistilBertForMaskedLM": "distilbert",
    "ElectraForPreTraining": "electra",
    "DebertaV2ForMaskedLM": "deberta_v3",
}


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_a_checkpoint_with_a_head_for_something_else_embeds_by_the_mean_of_its_hidden_states(name: str, tmp_path: Path):
    folder = write_model(tmp_path / name, getattr(transformers, name)(config_of(OTHER_HEADS[name])))
    texts = some_texts(4)
    with open_llm(folder) as llm:
        vectors = llm.embed(texts)
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
    model = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        means = [model(torch.tensor([token])).last_hidden_state[0].mean(0) for token in tokens]
    assert largest_difference(vectors, torch.stack(means)) < 1e-4


@pytest.mark.parametrize("native", [True, False])
def test_vectors_and_scores_of_jina_bert_are_those_of_its_definition(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not native:
        monkeypatch.setattr("penstock.native.library", lambda: None)
    texts, (pair, *_) = some_texts(6), some_pairs()
    weights = jina_bert.write_jina_bert(tmp_path / "embedder")
    with open_llm(tmp_path / "embedder") as llm, TorchOps() as noted:
        together = llm.embed(texts)
        alone = np.stack([llm.embed(text)[0] for text in texts])
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
        assert noted.names == [] or not native or library() is None
    means = [jina_bert.hidden_states(weights, one).mean(0) for one in tokens]
    assert largest_difference(together, torch.stack(means)) < 1e-4
    assert together.tobytes() == alone.tobytes() or not native
    jina_bert.write_jina_bert(tmp_path / "scorer", "JinaBertForSequenceClassification")
    with open_llm(tmp_path / "scorer") as llm:
        (score,) = llm.score(*pair, raw=True)
        both = llm.tokenizer.backend.encode(*pair)
    assert score == pytest.approx(jina_bert.score(weights, both.ids, both.type_ids), abs=1e-4)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}word3 {{ m.content }} word4 "
    "{% elif m.role == 'document' %}{{ m.content }} word5{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_that_is_asked_yes_or_no_scores_as_cross_encoder_has_it(tied: bool, tmp_path: Path):
    config = config_of("qwen3", tie_word_embeddings=tied)
    inner = write_model(tmp_path / "inner", transformers.Qwen3ForCausalLM(config))
    (inner / "chat_template.jinja").write_text(TEMPLATE)
    transformer = Transformer(str(inner), transformer_task="text-generation")
    folder = tmp_path / "asked"
    CrossEncoder(modules=[transformer, LogitScore(5, 6)], device="cpu").save_pretrained(str(folder))
    pairs = some_pairs()
    with open_llm(folder) as llm:
        scores = llm.score([query for query, _ in pairs], [document for _, document in pairs])
    assert largest_difference(scores, CrossEncoder(str(folder), device="cpu").predict(pairs)) < 1e-4


def test_a_reranker_whose_folder_says_nothing_is_asked_in_the_form_of_qwen3(tmp_path: Path):
    model = transformers.Qwen3ForCausalLM(config_of("qwen3"))
    folder = write_model(tmp_path / "bare", model)
    with open_llm(folder, task="score") as llm:
        (score,) = llm.score("word1", "word2")
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given '
            "a web search query, retrieve relevant passages that answer the query\n<Query>: word1\n<Document>: word2"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    assert score == pytest.approx(torch.softmax(logits[[6, 5]], 0)[1].item(), abs=1e-4)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory) -> Path:
    prompts = {"query": "word7 word8 ", "document": "word9 ", "empty": ""}
    folder = tmp_path_factory.mktemp("prompted") / "bert"
    return write_embedder(folder, "bert", *modules_of("bert"), max_length=40, prompts=prompts)


def test_prompts_and_truncation_and_dimensions_are_those_of_sentence_transformers(prompted: Path):
    texts = some_texts(6)
    model = SentenceTransformer(str(prompted), device="cpu")
    with open_llm(prompted) as llm:
        queries = llm.embed(texts, prompt_name="query", truncate=True)
        assert largest_difference(queries, model.encode_query(texts)) < 1e-4
        assert largest_difference(llm.embed(texts, truncate=True), model.encode(texts)) < 1e-4
        short = llm.embed(texts, truncate=True, dimensions=16)
        theirs = model.encode(texts, truncate_dim=16, normalize_embeddings=True)
        assert largest_difference(short, theirs) < 1e-4
        assert np.allclose(np.linalg.norm(short, axis=1), 1)
        (score,) = llm.score(texts[0], texts[1], truncate=True)
        wanted = model.encode_query(texts[0]) @ model.encode_document(texts[1])
        assert score == pytest.approx(float(wanted), abs=1e-4)


def edited(folder: Path, name: str, **changes: Any) -> Path:
    """Change a JSON file of the folder."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("family", ["bert", "modernbert"])  # vectors of length 1, and others
def test_a_folders_truncate_dim_is_that_of_sentence_transformers(family: str, tmp_path: Path):
    folder = write_embedder(tmp_path / "model", family, *modules_of(family))
    edited(folder, "config_sentence_transformers.json", truncate_dim=16)
    texts = some_texts(4)
    model = SentenceTransformer(str(folder), device="cpu")
    with open_llm(folder) as llm:
        assert largest_difference(llm.embed(texts), model.encode(texts)) < 1e-4
        scaled = llm.embed(texts, normalize=True)
        assert largest_difference(scaled, model.encode(texts, normalize_embeddings=True)) < 1e-4
        assert llm.embed([]).shape == (0, 16)
        assert llm.embed(texts, dimensions=40).shape == (4, 40)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_the_similarities_that_the_folder_names(name: str, tmp_path: Path):
    folder = write_embedder(tmp_path / "model", "bert", Pooling(HIDDEN, "cls"))
    edited(folder, "config_sentence_transformers.json", similarity_fn_name=name)
    query, *documents = some_texts(7)
    model = SentenceTransformer(str(folder), device="cpu")
    wanted = model.similarity(model.encode([query]), model.encode(documents))[0]
    with open_llm(folder) as llm:
        torch.testing.assert_close(torch.tensor(llm.score(query, documents)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Gemma2", "Granite", "Olmo2", "Phi3"])
def test_decoders_without_a_head_embed(family: str, tmp_path: Path):
    folder = write_embedder(tmp_path / "model", family, Pooling(HIDDEN, "lasttoken"), Normalize(), max_length=100)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [f"{family}Model"]
    texts = some_texts(4)
    with open_llm(folder) as llm:
        assert largest_difference(llm.embed(texts), SentenceTransformer(str(folder), device="cpu").encode(texts)) < 1e-4


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "distilbert"])
def test_the_longest_text_is_in_files_of_several_names(kind: str, tmp_path: Path):
    folder = write_embedder(tmp_path / "model", "xlm_roberta", *modules_of("xlm_roberta"))
    (folder / "sentence_bert_config.json").unlink()
    (folder / f"sentence_{kind}_config.json").write_text(json.dumps({"max_seq_length": 10, "do_lower_case": False}))
    texts = some_texts(4)
    model = SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == 10
    with open_llm(folder) as llm:
        assert largest_difference(llm.embed(texts, truncate=True), model.encode(texts)) < 1e-4
        with pytest.raises(PromptTooLongError, match="10 tokens"):
            llm.embed("word1 " * 20)


def test_what_is_refused_is_refused_by_name(prompted: Path):
    with open_llm(prompted) as llm:
        with pytest.raises(PromptTooLongError, match="40 tokens"):
            llm.embed(["word1", "word1 " * 60])
        with pytest.raises(InvalidRequestError, match="it has: document, empty, query"):
            llm.embed("word1", prompt_name="passage")
        with pytest.raises(InvalidRequestError, match="from 1 to 64"):
            llm.embed("word1", dimensions=65)
        with pytest.raises(InvalidRequestError, match="at least one character"):
            llm.embed([""])
        with pytest.raises(InvalidRequestError, match="token ids go from 0"):
            llm.embed([[1, 300]])
        with pytest.raises(InvalidRequestError, match="2 queries do not go with 3 documents"):
            llm.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(WrongTaskError, match="does not generate"):
            llm.generate("word1")
    for option in ({"kv_cache_memory": "64MiB"}, {"kv_disk": "/nowhere:1GiB"}, {"speculation": "ngram"}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} is for models that generate"):
            open_llm(prompted, **option)
    with pytest.raises(ConfigError, match="prefill_engines are for models that generate"):
        build(replace(EngineConfig.from_options(model=str(prompted)), role="prefill"))
    with pytest.raises(CheckpointError, match="cannot generate"):
        open_llm(prompted, task="generate")
    with pytest.raises(CheckpointError, match="no classification head"):
        open_llm(prompted, task="score")


def test_a_model_that_generates_has_no_embeddings(tiny_llama: Path):
    with open_llm(tiny_llama) as llm, pytest.raises(WrongTaskError, match="generates text"):
        llm.embed("hello")


def test_a_decoder_embeds_where_its_folder_or_the_caller_says_so(tmp_path: Path):
    model = transformers.Qwen3ForCausalLM(config_of("qwen3"))
    folder = write_model(tmp_path / "plain", model)
    texts = some_texts(4)
    with open_llm(folder, task="embed") as llm:
        vectors = llm.embed(texts)
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
    with torch.inference_mode():
        hidden = [model.model(torch.tensor([token])).last_hidden_state[0] for token in tokens]
    assert largest_difference(vectors, torch.stack([one.mean(0) for one in hidden])) < 1e-4


@pytest.mark.parametrize(
    "family", ["GPT2", "OPT", "Bloom"]
)  # positions; positions from a row on; normalized embeddings
def test_a_decoder_that_embeds_has_its_positions_and_the_norm_of_its_embeddings(tmp_path: Path, family: str):
    made = transformers.AutoModelForCausalLM.from_config(config_of(family)).eval()
    folder = write_model(tmp_path / "plain", made)
    texts = some_texts(3)
    with open_llm(folder, task="embed") as llm:
        vectors = llm.embed(texts)
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
    with torch.inference_mode():
        hidden = [made.base_model(torch.tensor([one])).last_hidden_state[0] for one in tokens]
    assert largest_difference(vectors, torch.stack([one.mean(0) for one in hidden])) < 1e-4


@pytest.mark.parametrize("window", [None, 4])
def test_a_decoder_made_to_embed_attends_to_both_sides_where_its_config_says_so(tmp_path: Path, window: int | None):
    """As gte-Qwen2; `is_causal` is read by `transformers` and vLLM."""
    windows = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = transformers.Qwen2Model(config_of("qwen2", is_causal=False, **windows))
    folder = write_model(tmp_path, model)
    texts = some_texts(4)
    with open_llm(folder, task="embed", max_num_batched_tokens=160) as llm:
        vectors = llm.embed(texts)
        tokens = [llm.tokenizer.backend.encode(text).ids for text in texts]
    assert json.loads((folder / "config.json").read_text())["is_causal"] is False
    with torch.inference_mode():
        hidden = [model(torch.tensor([token])).last_hidden_state[0] for token in tokens]
    assert largest_difference(vectors, torch.stack([one.mean(0) for one in hidden])) < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modules.json": [{"type": "x.Pooling", "path": "../1_Pooling"}]}, "within the folder"),
        ({"modules.json": [{"type": "x.CNN", "path": ""}]}, "CNN"),
        ({"modules.json": {"a": 1}}, "list of modules"),
        ({"1_Pooling/config.json": {"pooling_mode": "sum"}}, "sum"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
        ({"sentence_bert_config.json": {"max_seq_length": "long"}}, "max_seq_length"),
        (
            {"sentence_bert_config.json": {"modality_config": {"text": {"method_output_name": "pooler_output"}}}},
            "method_output_name of modality_config .* must be last_hidden_state or logits, not 'pooler_output'",
        ),
        ({"sentence_bert_config.json": {"modality_config": {"text": {"method": "encode"}}}}, "must be forward"),
        ({"config_sentence_transformers.json": {"similarity_fn_name": "maxsim"}}, "maxsim.*supported: cosine, dot"),
        ({"config_sentence_transformers.json": {"truncate_dim": 0}}, "truncate_dim"),
        ({"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "q"}}, "no such prompt"),
    ],
)
def test_files_that_are_not_understood_are_refused_by_name(change, words: str, prompted: Path, tmp_path: Path):
    folder = tmp_path / "changed"
    for file in prompted.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(prompted)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    for name, content in change.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        open_llm(folder)


def test_a_position_bias_of_other_buckets_is_refused(tmp_path: Path):
    config = config_of("mpnet", relative_attention_num_buckets=16)
    folder = write_model(tmp_path / "mpnet", transformers.MPNetModel(config))
    with pytest.raises(CheckpointError, match=r"relative_attention_num_buckets 16 .* supported: 32"):
        open_llm(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relative_attention": False}, "relative_attention False .* supported: True"),
        ({"pos_att_type": ["c2p", "p2p"]}, r"pos_att_type 'p2p' .* supported: 'c2p', 'p2c'"),
        ({"position_buckets": 1100}, "position_buckets 1100 .* less than twice max_relative_positions, 512"),
        ({"conv_kernel_size": 4}, "conv_kernel_size 4 .*an odd number"),
        ({"embedding_size": 32}, "embedding_size 32 .* supported: 64"),
        ({"norm_rel_ebd": "rms"}, "norm_rel_ebd 'rms'"),
    ],
)
def test_a_deberta_of_another_form_is_refused(change: dict[str, Any], words: str, tmp_path: Path):
    config = config_of("deberta_v3") if "position_buckets" in change else config_of("deberta_v2")
    config.save_pretrained(tmp_path)
    edited(tmp_path, "config.json", architectures=["DebertaV2Model"], **change)
    with pytest.raises(CheckpointError, match=words):
        read_spec(open_checkpoint(str(tmp_path)))


def test_tables_by_distance_and_a_convolution_are_in_the_memory_plan(tmp_path: Path):
    plain, with_tables = (
        read_facts(open_checkpoint(str(write_model(tmp_path / name, transformers.AutoModel.from_config(config)))))
        for name, config in {
            "none": config_of("deberta_v3", pos_att_type=[]),
            "both": config_of("deberta_v3", conv_kernel_size=3),
        }.items()
    )
    assert (plain.table_elements, with_tables.table_elements) == (0, 3 * 2 * HIDDEN * 32)
    assert with_tables.layers[0].activation_sizes[:2] == plain.layers[0].activation_sizes
    assert with_tables.layers[0].activation_sizes[2].native == (3 + 2) * HIDDEN
    mpnet = write_model(tmp_path / "mpnet", transformers.AutoModel.from_config(config_of("mpnet")))
    assert read_facts(open_checkpoint(str(mpnet))).biased_heads == SIZES["num_attention_heads"]


def test_a_linear_layer_of_something_else_than_the_vector_is_refused(tmp_path: Path):
    folder = write_embedder(tmp_path / "model", "bert", Pooling(HIDDEN, "mean"), Dense(HIDDEN, 8))
    edited(folder / "2_Dense", "config.json", module_input_name="token_embeddings")
    with pytest.raises(
        CheckpointError, match=r"module_input_name .* must be sentence_embedding, not 'token_embeddings'"
    ):
        open_llm(folder)


def test_unknown_settings_of_a_folder_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_embedder(tmp_path / "model", "bert", Pooling(HIDDEN, "mean"), Dense(HIDDEN, 8), Normalize())
    with open_llm(folder):
        assert "no effect" not in caplog.text
    edited(folder, "sentence_bert_config.json", processing_kwargs={"text": {"padding": True}})
    edited(folder / "1_Pooling", "config.json", pooling_mode_new=True)
    with open_llm(folder):
        (line,) = [message for message in caplog.messages if "unknown and have no effect" in message]
    assert "pooling_mode_new in " in line
    assert f"processing_kwargs in {folder}/sentence_bert_config.json" in line


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "deberta_v3"])  # with windows, with biases by distance
def test_a_text_longer_than_a_step_goes_alone(family: str, tmp_path: Path):
    config = config_of(family, max_position_embeddings=1030)
    folder = write_model(tmp_path / family, transformers.AutoModel.from_config(config))
    texts = ["word1 " * 700, "word2", "word3 word4"]
    with open_llm(folder, max_num_batched_tokens=64, max_model_len=1024) as llm:
        together = llm.embed(texts)
        alone = np.stack([llm.embed(text)[0] for text in texts])
    assert together.tobytes() == alone.tobytes()
    with torch.inference_mode():
        reference = transformers.AutoModel.from_pretrained(folder)
        tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(texts[0])["input_ids"]])
        theirs = reference(tokens).last_hidden_state[0].mean(0)
    assert largest_difference(together[0], theirs) < 1e-4
