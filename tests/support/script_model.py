"""Script models: tiny checkpoints that say given texts, to test what a server and its clients make of them.

    write_kind(folder, HERMES, {"read": (Turn(calls=(Call("read", {"path": "a"}),)), Turn("Done."))})

A user's message with `SCRIPT=read.` begins the script "read": the model's next answers are its turns in order, and the
last one from then on. A prompt without a script, or without tools unless its script's name begins with text, is
answered by the script "plain".

The model has one layer that adds nothing, so that the next token depends on the last one only. The chat template ends
a prompt with a token of its own for each turn, and each piece of a turn's text is a token that only one other follows.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
TEMPLATES = Path(__file__).parent / "script_models"
PLAIN = "plain"
END = "<|im_end|>"
MARKS = (END, "<|im_start|>")
CONTEXT = 131_072
"""Tokens."""
TRAINED_TOKENS = 4096
HIDDEN, HEAD = 256, 16
SHARPNESS = 3.0
"""Factor of all weights: the most likely token is far more likely than the next, at temperature 1 too."""
PIECE = 3
"""Characters of the shortest pieces."""
FOLLOW = 12.0
"""A token's weight in the row of the one that follows it."""
LIKELY = {END: 6.75, '"': 5.4, "{": 5.0, "}": 4.5, ",": 3.6, "c": 3.4, "f": 3.2}
"""Weights of what is said where a grammar forbids what follows, or where nothing does: it has forced other tokens. A c
begins harmony's channel of calls, an f its final one."""
TEXT_END = 6.0
"""The same for a kind's mark that ends free text, unless it has just been said."""
BYTE, OTHER = 2.25, 1.35
"""The same for the tokens of one byte, and for the others."""


class Answer(NamedTuple):
    """The text of an answer, in pieces where it is a list."""

    thought: str
    """Reasoning with its marks; left out where the template asks for none."""
    rest: str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any] | str
    """A text is broken off: nothing comes after it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says in one answer."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of checkpoints: its chat template, and its notation of answers."""

    template: str
    """The name of its file."""
    answer: Callable[[Turn], Answer]
    opening: str = ""
    """The end of a prompt that opens reasoning."""
    text_end: str = ""
    """The mark that ends free text where a grammar demands calls."""
    forced: Mapping[str, str] = field(default_factory=dict)
    """Tokens of one byte that follow one another where a grammar has forced the first."""


def _hermes(turn: Turn) -> Answer:
    thought = f"<think>\n{turn.thought}\n</think>\n\n" if turn.thought else ""
    return Answer(thought, "\n".join([*([turn.text] if turn.text else []), *map(_hermes_call, turn.calls)]))


def _hermes_call(call: Call) -> str:
    if isinstance(call.arguments, str):
        return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}'
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def _strict(turn: Turn) -> Answer:
    rest = "\n\n".join([*([turn.text] if turn.text else []), *map(_tagged_call, turn.calls)])
    return Answer(f"{turn.thought}\n</think>\n\n", rest)


def _tagged_call(call: Call) -> str:
    begun = f"<tool_call>\n<function={call.name}>\n"
    if isinstance(call.arguments, str):
        return f"{begun}<parameter={call.arguments}"
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in call.arguments.items())
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"{begun}{parameters}</function>\n</tool_call>"


def _harmony(turn: Turn) -> Answer:
    messages = [f"<|channel|>analysis<|message|>{turn.thought}"] if turn.thought else []
    if turn.text:
        messages.append(f"<|channel|>{'commentary' if turn.calls else 'final'}<|message|>{turn.text}")
    messages += map(_harmony_call, turn.calls)
    return Answer("", "<|end|><|start|>assistant".join(messages) + ("<|call|>" if turn.calls else ""))


def _harmony_call(call: Call) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{arguments}"


HERMES = Kind("hermes.jinja", _hermes)
"""Calls as JSON, any order of messages, reasoning that can be turned off."""
STRICT = Kind("strict.jinja", _strict, opening="<think>\n", text_end="\n</parameter>\n")
"""As Qwen 3.5: one system message, the first; calls as tags, arguments as mappings; a prompt opens reasoning."""
HARMONY = Kind("harmony.jinja", _harmony, text_end="<|end|>", forced={"y": "Ġ"})
"""As gpt-oss: channels; a turn with calls has reasoning or text in the history, not both. After "commentary" comes " "
where both a call and a text may come."""


def write_kind(folder: Path, kind: Kind, scripts: Mapping[str, Sequence[Turn]]) -> Path:
    """Write a script model of a kind."""
    answers = {name: [kind.answer(turn) for turn in turns] for name, turns in scripts.items()}
    return write_script_model(folder, answers, (TEMPLATES / kind.template).read_text(), kind)


def write_script_model(
    folder: Path, scripts: Mapping[str, Sequence[Answer]], template: str, kind: Kind = HERMES
) -> Path:
    """Write a checkpoint that says the answers of scripts.

    Args:
        template: a chat template that ends prompts with `{{ say(messages, tools, quiet) }}`.
        kind: whose notation the answers have; its template and its `answer` are not used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary(trained_tokenizer(), kind)
    for name, answers in scripts.items():
        for turn, answer in enumerate(answers):
            vocabulary.add_answer(f"{name}.{turn}", answer)
    turns = {name: len(answers) for name, answers in scripts.items()}
    macro = (TEMPLATES / "say.jinja").read_text().replace("TURNS", json.dumps(turns))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": macro.replace("OPENING", json.dumps(kind.opening)) + template,
    }
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    end = vocabulary.ids[END]
    (folder / "config.json").write_text(json.dumps(_config(len(vocabulary.ids), end)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    save_file(_tensors(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@lru_cache(maxsize=1)
def trained_tokenizer() -> str:
    """A byte-level BPE tokenizer in JSON, trained on the project's pages: English prompts are of usual length."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    return tokenizer.to_str()


class Vocabulary:
    """The tokens of a script model, and which follows which."""

    def __init__(self, trained: str, kind: Kind) -> None:
        self.tokenizer: dict[str, Any] = json.loads(trained)
        self.ids: dict[str, int] = self.tokenizer["model"]["vocab"]
        self.num_trained = len(self.ids)
        self.follows: dict[int, int] = {}
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._opening = kind.opening
        self._said = {*LIKELY, kind.text_end}
        self.text_end = self._id_of_piece(kind.text_end) if kind.text_end else None
        self.follows |= {self.ids[one]: self.ids[then] for one, then in kind.forced.items()}

    def add_answer(self, name: str, answer: Answer) -> None:
        """Add the tokens of an answer, after a prompt's last token of this name, or of this name and `.quiet`."""
        if isinstance(answer.rest, str):
            loud, quiet = self._cut(answer.thought + answer.rest), self._cut(answer.rest) if answer.thought else None
        else:
            loud, quiet = [*self._cut(answer.thought), *answer.rest], list(answer.rest)
        self._add_chain(f"<|{name}|>{self._opening}", loud)
        self._add_chain(f"<|{name}.quiet|>", loud if quiet is None else quiet)

    def _add_chain(self, mark: str, pieces: Sequence[str]) -> None:
        chain = [self._id_of_mark(mark), *map(self._id_of_piece, pieces), self.ids[END]]
        for one, then in itertools.pairwise(chain):
            if self.follows.setdefault(one, then) != then:
                raise ValueError(f"{mark}: a piece is said twice: give other pieces")

    def byte_ids(self) -> list[int]:
        """The tokens of one byte."""
        return [self.ids[character] for character in pre_tokenizers.ByteLevel.alphabet()]

    def _cut(self, text: str) -> list[str]:
        """Cut a text into pieces that no answer has said so far."""
        pieces: list[str] = []
        while text:
            size = PIECE
            while size < len(text) and text[:size] in self._said:
                size += 1
            piece, text = text[:size], text[size:]
            while piece in self._said and pieces:  # the text's end: joined to what came before
                self._said.discard(pieces[-1])
                piece = pieces.pop() + piece
            self._said.add(piece)
            pieces.append(piece)
        return pieces

    def _written(self, text: str) -> str:
        """A text as byte-level BPE writes it."""
        return "".join(part for part, _ in self._bytes.pre_tokenize_str(text))

    def _id_of_piece(self, piece: str) -> int:
        return self.ids.setdefault(self._written(piece), len(self.ids))

    def _id_of_mark(self, mark: str) -> int:
        token_id = self.ids.setdefault(mark, len(self.ids))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        self.tokenizer["added_tokens"].append({"id": token_id, "content": mark, "special": True, **flags})
        return token_id


def _config(num_tokens: int, end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        "hidden_size": HIDDEN,
        "intermediate_size": HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end,
    }


def _tensors(vocabulary: Vocabulary) -> dict[str, NDArray[np.float32]]:
    """The weights: a layer of zeros between embeddings and an lm_head that knows what follows.

    A token's embedding is a random direction, that of the token which follows, and 0 where none does. The first
    dimension is 1 for all tokens: its column of the lm_head is what is said where nothing follows.
    """
    num_tokens = len(vocabulary.ids)
    directions = np.random.default_rng(0).standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    embed, head = np.zeros_like(directions), np.zeros_like(directions)
    for one, then in vocabulary.follows.items():
        if then != vocabulary.ids[END]:  # it is the most likely already
            embed[one], head[then] = directions[then], FOLLOW * directions[then]
    if vocabulary.text_end is not None:
        itself = directions[vocabulary.text_end]
        embed[vocabulary.text_end], head[vocabulary.text_end] = itself, -TEXT_END * itself
    embed[:, 0], head[:, 0] = 1.0, 0.0
    head[: vocabulary.num_trained, 0] = OTHER
    head[vocabulary.byte_ids(), 0] = BYTE
    for text, weight in LIKELY.items():
        head[vocabulary.ids[text], 0] = weight
    if vocabulary.text_end is not None:
        head[vocabulary.text_end, 0] = TEXT_END
    head *= SHARPNESS
    layer = {name: np.zeros(shape, np.float32) for name, shape in _zeros()}
    ones = {name: np.ones(HIDDEN, np.float32) for name in _norms()}
    return {"model.embed_tokens.weight": embed, "lm_head.weight": head, **layer, **ones}


def _zeros() -> Iterator[tuple[str, tuple[int, int]]]:
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        yield f"model.layers.0.{name}.weight", (HEAD, HIDDEN)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        yield f"model.layers.0.{name}.weight", (HIDDEN, HEAD)


def _norms() -> Iterator[str]:
    yield "model.norm.weight"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.0.{name}.weight"
