"""Small random encoders in folders as `sentence-transformers` and `transformers` write them, and texts for them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
}
SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
WORDS = [f"word{index}" for index in range(VOCABULARY - 10)]
_BERT_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_DEBERTA: dict[str, Any] = {"relative_attention": True, "max_position_embeddings": 512}
_DEBERTAS: dict[str, dict[str, Any]] = {
    "deberta_v2": {
        "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 24,
        "type_vocab_size": 2,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "conv_groups": 1,
    },
    "deberta_v3": {
        "pos_att_type": "p2c|c2p",
        "position_buckets": 16,
        "max_relative_positions": -1,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
}
_ROBERTAS = {"xlm_roberta": "XLMRobertaConfig", "roberta": "RobertaConfig", "camembert": "CamembertConfig"}
_DECODER: dict[str, Any] = {**SIZES, "head_dim": 16, "num_key_value_heads": 2, "pad_token_id": 0}


def config_of(family: str, **more: Any) -> Any:
    """A config of the family in small sizes."""
    if family == "bert":
        return transformers.BertConfig(**SIZES, **more)
    if family in _ROBERTAS:
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        kind = getattr(transformers, _ROBERTAS[family])
        return kind(**SIZES, **ids, type_vocab_size=1, max_position_embeddings=514, **more)
    if family == "distilbert":
        sizes = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "vocab_size": VOCABULARY}
        return transformers.DistilBertConfig(**sizes, **more)
    if family == "mpnet":
        return transformers.MPNetConfig(**SIZES, **{"max_position_embeddings": 514, **more})
    if family == "electra":
        return transformers.ElectraConfig(**SIZES, **{"embedding_size": 32, **more})
    if family in _DEBERTAS:
        return transformers.DebertaV2Config(**{**SIZES, **_DEBERTA, **_DEBERTAS[family], **more})
    if family == "modernbert":
        return transformers.ModernBertConfig(**SIZES, **_BERT_IDS, local_attention=16, **more)
    if family == "nomic_bert":
        return transformers.NomicBertConfig(**SIZES, **more)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **_DECODER, sliding_window=16, use_bidirectional_attention=True, query_pre_attn_scalar=16, **more
        )
    if family == "qwen2":
        return transformers.Qwen2Config(**{key: value for key, value in _DECODER.items() if key != "head_dim"}, **more)
    if family == "qwen3":
        return transformers.Qwen3Config(**_DECODER, **more)
    return getattr(transformers, f"{family}Config")(**_DECODER, **more)  # of another decoder


def write_model(folder: Path, model: Any, seed: int = 0) -> Path:
    """The model with weights large enough that each part of it matters, and a tokenizer of whole words."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    kind = model.config.model_type
    typed = kind in ("bert", "electra", "deberta-v2") and model.config.type_vocab_size > 1
    write_tokenizer(folder, decoder=hasattr(model.config, "num_key_value_heads"), typed=typed)
    return folder


def write_tokenizer(folder: Path, *, decoder: bool, typed: bool) -> None:
    """Whole words; around them what encoders have, or at the end what decoders that embed have."""
    special = list(SPECIAL.values())
    words = [*special, "yes", "no", *WORDS]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(word, words.index(word)) for word in special]
    if decoder:
        backend.post_processor = processors.TemplateProcessing("$A [EOS]", "$A $B:1 [EOS]:1", ids)
    else:
        backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **SPECIAL)
    made.save_pretrained(folder)


def write_embedder(folder: Path, family: str, *modules: Any, max_length: int = 128, **options: Any) -> Path:
    """A `SentenceTransformer` of the family, with these modules behind the transformer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    made = transformers.AutoModel.from_config(config_of(family))
    inner = write_model(folder.with_name(f"{folder.name}-inner"), made)
    transformer = Transformer(str(inner))
    transformer.max_seq_length = max_length
    SentenceTransformer(modules=[transformer, *modules], device="cpu", **options).save(str(folder))
    return folder


def some_texts(count: int = 12, seed: int = 0, longest: int = 90) -> list[str]:
    """Texts of 1 to `longest` words."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(1, longest))) for _ in range(count - 1)] + ["word1"]


def some_pairs(count: int = 8, seed: int = 1) -> list[tuple[str, str]]:
    """Queries and documents."""
    return list(zip(some_texts(count, seed, 12), some_texts(count, seed + 1, 60), strict=True))


def largest_difference(ours: Any, theirs: Sequence[Any]) -> float:
    """Of two arrays."""
    return float((torch.as_tensor(ours).float() - torch.as_tensor(theirs).float()).abs().max())
