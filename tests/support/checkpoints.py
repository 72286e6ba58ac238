"""Random checkpoints for tests, written to disk in Hugging Face's form.

`write_tiny_llama` needs neither torch nor `transformers` (which take seconds to import) and brings a tokenizer;
`write_random` lets `transformers` itself write any of its models, as the reference that ours are held to.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock import native
from tests.support.families import class_name

native.set_num_threads(1)  # matrices this small are faster so, and other work on the machine does not hold them up

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "what is the sum of thirty seven and fifty eight",
    "a request that goes in comes out as tokens and tokens again",
    "naïve café, größer, 日本語, emoji 🙂 and 🚀",
]
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": None,
}


def write_tiny_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of two layers with a byte-level BPE tokenizer and a chat template; `changes` go to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY_LLAMA | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    save_file(_random_llama(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    return folder


class Normals:
    """Normally distributed numbers as `torch.randn` draws them, up to their rounding: seeds keep their meaning."""

    def __init__(self, seed: int) -> None:
        self._bits = RandomState(seed)._bit_generator

    def draw(self, *shape: int) -> NDArray[np.float32]:
        size = math.prod(shape)
        uniform, whole = self._uniform(size), size // 16 * 16
        drawn = np.empty(size, np.float32)
        drawn[:whole] = _box_muller(uniform[:whole])
        if whole < size:
            drawn[-16:] = _box_muller(self._uniform(16))
        return drawn.reshape(shape)

    def _uniform(self, size: int) -> NDArray[np.float32]:
        return np.ldexp((self._bits.random_raw(size) & 0xFFFFFF).astype(np.float32), -24)


def _box_muller(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    first, second = uniform.reshape(-1, 2, 8).swapaxes(0, 1)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), np.float32(2 * np.pi) * second
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1).reshape(-1)


def dtype_named(name: str) -> Any:
    """numpy's dtype, or that of `ml_dtypes`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _random_llama(config: dict[str, Any], seed: int) -> dict[str, NDArray[Any]]:
    normals = Normals(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {layer + "input_layernorm": (hidden,), layer + "post_attention_layernorm": (hidden,)}
        shapes |= {
            layer + f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", query), ("k", kv), ("v", kv))
        }
        shapes |= {layer + "self_attn.o_proj": (hidden, query), layer + "mlp.down_proj": (hidden, inner)}
        shapes |= {layer + f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    dtype = dtype_named(config["torch_dtype"])
    return {
        f"{name}.weight": (normals.draw(*shape) * np.float32(0.2) + np.float32(len(shape) == 1)).astype(dtype)
        for name, shape in shapes.items()
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, the special ones first, and its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_few_tokens(folder: Path) -> Any:
    """A random Llama of so few tokens, none far likelier than all others, that answers often end and every control
    tells. Returns `transformers`' model of it.
    """
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    import torch

    model = write_random(folder, "Llama", vocab_size=48, eos_token_id=0, bos_token_id=None, **shape, **heads)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    model.save_pretrained(folder)
    return model


def write_random(folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", **config: Any) -> Any:
    """Let `transformers` write a random `family` ("Llama", "Qwen3", ... or the whole name of a class) and return its
    model, for reference.

    The weights are larger than freshly initialised ones, and biases and norms (around what they are then, 1 or 0) are
    random, too: an overlooked one would not show otherwise.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import transformers
    native.set_num_threads(1)  # torch's
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(seed)
    kind = getattr(transformers, family if "For" in family else class_name(family))
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(parameter.mean().round().item() if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if "correction" in name or "expert_bias" in name:
                buffer.normal_(0.0, 0.2)
            if "layer_scalar" in name:
                buffer.normal_(1.0, 0.2)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model
