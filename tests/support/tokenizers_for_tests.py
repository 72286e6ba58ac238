"""Small tokenizers of the kinds that checkpoints bring, written to folders as checkpoints bring them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today? 12345 + 67890 = 80235.",
    "def main():\n    print('tokens')\n\treturn None\n\n<b>not html</b> & 'quotes' \"double\"",
    "Größe, naïve café, żółć, привет мир, 你好世界, こんにちは, 안녕하세요, emoji 😀👍🏽👨‍👩‍👧 and é combining.",
] * 4

CHAT_TEMPLATE = """{{ bos_token }}{% if tools %}
<tools>{{ tools | tojson }}</tools>
{% endif %}
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{ raise_exception('unknown role ' + message['role']) }}
    {% endif %}
    {% if loop.index > 50 %}{% break %}{% endif %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% if thinking is defined %}<think>{{ thinking }}{% endif %}{% endif %}"""

SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def byte_level_bpe(vocab_size: int = 420) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama2_bpe() -> Tokenizer:
    """As Llama 2 has it: SentencePiece's marks for spaces, a byte fallback, a space before the text that decoding
    takes away again, and a bos token."""
    pieces = ["<unk>", "<s>", "</s>", *SPECIAL[2:], *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted({c for text in CORPUS[:2] for c in text if c != " "}), "▁T", "he", "lo", "▁w", "or", "▁▁"]
    merges = [("▁", "T"), ("h", "e"), ("l", "o"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _finish_sentencepiece(tokenizer)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's or Gemma's kin have it: a Unigram model, Metaspace, a byte fallback."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((t, 0.0) for t in SPECIAL[2:])]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("▁", -3.0), ("▁The", -5.0), ("▁quick", -5.0), ("Hello", -5.0), ("▁world", -5.0)]
    pieces += [(c, -8.0) for c in sorted({c for text in CORPUS[:2] for c in text if c != " "})]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first"), decoders.Fuse()]
    )
    _finish_sentencepiece(tokenizer)
    return tokenizer


def _finish_sentencepiece(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<unk>", *SPECIAL]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


KINDS = {"byte_level": byte_level_bpe, "llama2": llama2_bpe, "unigram": unigram}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json; `config` overrides, and a value of None leaves out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    content = {key: value for key, value in content.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
