"""Train the demo model that ships inside the package: `python -m tools.train_demo_model`.

A Qwen3-shaped chat model of about 2.7 million parameters, trained from scratch on the tasks of `demo_tasks.py`. Each
step sees a batch of short conversations (several tasks a conversation) and a batch of long ones (copying, and recalling
facts over filler) whose length grows in the course of training. Only the assistant's tokens are learned. Every batch
depends on the seed and the step's number alone, so a resumed run sees the data that an unbroken one would.

Needs torch, tokenizers and safetensors; runs on two CPU cores in about an hour.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools import demo_tasks
from tools.demo_tasks import SYSTEM_PROMPTS, Item, Message, Tool, assistant
from tools.demo_tokenizer import END_OF_TEXT, TURN_END, build_tokenizer, render, save_tokenizer

CONTEXT = 2048
IGNORED = -100  # the label of a token that is not learned


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (as in Hugging Face's Qwen3); x: [batch, heads, tokens, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class DemoModel(nn.Module):
    """Parameters carry the names that Hugging Face's Qwen3ForCausalLM gives them, so saving is a plain dump."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(CONTEXT), frequencies)  # [tokens, head_dim / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if is_output else 0.03)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states before the output matrix, [batch, tokens, hidden]."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.get_buffer("cos")[: tokens.shape[1]], self.get_buffer("sin")[: tokens.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest matrices with equal singular values, by Newton-Schulz steps; matrices: [count, rows, columns].

    The quintic and its coefficients are Keller Jordan's (Muon, 2024). float32, since this CPU has no bfloat16 units.
    """
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, all matrices of one size at a time (torch's own takes one at a time)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_size: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_size.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
            for (rows, columns), parameters in by_size.items():
                wide = [self.direction(p, group["momentum"]) for p in parameters]
                wide = [update if tuple(update.shape) == (rows, columns) else update.T for update in wide]
                for parameter, update in zip(parameters, orthogonalise(torch.stack(wide)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    oriented = update if tuple(parameter.shape) == (rows, columns) else update.T
                    scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                    parameter.add_(oriented, alpha=-group["lr"] * scale)

    def direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"]
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def make_optimizers(model: DemoModel, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Two Muons, so that each of two threads can step one, and AdamW for the embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(hidden[::2], lr=muon_lr), Muon(hidden[1::2], lr=muon_lr), adam]


def learning_rate_scale(step: int, warmup: int, steps: int, decay: int) -> float:
    """Up, level, then straight down to nothing: the level part can be made longer without a new start."""
    return min((step + 1) / warmup, 1.0, max(steps - step, 0) / decay)


# ---- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def system_turn(rng: Random) -> tuple[Message, ...]:
    """Mostly none or a usual one; now and then words that mean nothing, so that no system prompt throws the model."""
    kind = rng.random()
    if kind < 0.5:
        return ()
    text = rng.choice(SYSTEM_PROMPTS) if kind < 0.85 else demo_tasks.random_text(rng, rng.randint(2, 15))
    return ({"role": "system", "content": text},)


def turns(item: Item) -> tuple[Message, ...]:
    return (*item.messages, assistant(item.answer))


@dataclass(frozen=True, slots=True)
class Stage:
    """What the batches hold from a step on; found by looking at what the judged tasks still lacked."""

    first_step: int
    parts: dict[str, float]  # of the short items, by task
    digits: tuple[int, ...]  # the largest number of digits of a sum, drawn from these
    lengths: tuple[int, ...]  # tokens of a long conversation
    is_long: Callable[[int], bool]  # whether a step's second batch holds long conversations, or short ones too
    tools: float = 0.25  # the share of short batches that offer tools
    copies: float = 0.5  # the share of long conversations that copy; the others recall


STAGES = (
    Stage(  # attention learns to copy, on short texts first
        first_step=0,
        parts={"arithmetic": 8, "reverse": 3, "sort": 4, "json": 3, "refer_back": 3, "small_talk": 0.3},
        digits=(1, 2, 2, 2, 2, 2, 2, 3),
        lengths=(128, 256, 256, 512, 1024, 1536),
        is_long=lambda step: True,
    ),
    Stage(  # sums and sorting
        first_step=1000,
        parts={"arithmetic": 18, "reverse": 2, "sort": 6, "json": 3, "refer_back": 3, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(256, 512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 == 0,
    ),
    Stage(  # long copies, spelling, earlier turns
        first_step=1750,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 6, "refer_back": 6, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(256, 512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 != 0,
        tools=0.3,
        copies=0.65,
    ),
    Stage(  # a copy is right only if each of its 250 tokens is
        first_step=2500,
        parts={"arithmetic": 10, "reverse": 3, "sort": 4, "json": 5, "refer_back": 6, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(512, 1024, 1024, 2048),
        is_long=lambda step: True,
        tools=0.3,
        copies=0.8,
    ),
    Stage(  # what is still wrong now and then: sums, and "your first answer"
        first_step=2750,
        parts={"arithmetic": 18, "reverse": 2, "sort": 3, "json": 3, "refer_back": 10, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(512, 1024, 1024, 2048),
        is_long=lambda step: step % 2 == 0,
        tools=0.2,
        copies=0.8,
    ),
    Stage(  # everything, for as long as it takes, and facts far above as often as copies
        first_step=3400,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 4, "refer_back": 12, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 != 0,
        tools=0.15,
        copies=0.5,
    ),
    Stage(  # which of several facts is asked for, more often and nearer; the learning rate begins anew here
        first_step=5000,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 4, "refer_back": 8, "small_talk": 0.4},
        digits=(1, 2, 2, 2, 2, 2, 2, 2),
        lengths=(128, 256, 512, 1024, 1024, 2048),
        is_long=lambda step: True,
        tools=0.15,
        copies=0.35,
    ),
)


def stage_at(step: int) -> Stage:
    return [stage for stage in STAGES if stage.first_step <= step][-1]


def short_item(rng: Random, stage: Stage) -> Item:
    task = rng.choices(list(stage.parts), list(stage.parts.values()))[0]
    if task == "small_talk":
        return demo_tasks.small_talk(rng)
    size = rng.choice(stage.digits) if task == "arithmetic" else None
    return demo_tasks.make(task, rng, "train", size)


def tool_turns(rng: Random, tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    exchange = demo_tasks.tool_exchange(rng, "train", tools)
    question, reply = demo_tasks.user(exchange.question), assistant(exchange.reply)
    return (question, exchange.call_message, exchange.result_message, reply)


def short_conversation(rng: Random, num_items: int, with_tools: bool, stage: Stage) -> Conversation:
    tools = demo_tasks.offer_tools(rng) if with_tools else ()
    messages = list(system_turn(rng))
    for _ in range(num_items):
        if tools and rng.random() < 0.8:
            messages += tool_turns(rng, tools)
        else:
            messages += turns(short_item(rng, stage))
    return Conversation(tuple(messages), tools)


def copy_conversation(rng: Random, length: int) -> Conversation:
    """Copies of growing variety until about `length` tokens are full (a word is some 1.3 tokens, and comes twice)."""
    messages = list(system_turn(rng))
    left = length
    while left > 40:
        words = rng.randint(5, max(6, min(300, int(left / 2.9) - 12)))
        if rng.random() < 0.5:
            words = max(5, min(300, int(left / 2.9) - 12))
        messages += turns(demo_tasks.copy(rng, "train", words))
        left -= int(words * 2.7) + 20
    return Conversation(tuple(messages))


def recall_conversation(rng: Random, length: int) -> Conversation:
    """Notes with facts strewn in (half of the time all at the start, as in the task), then a question for each."""
    facts = demo_tasks.draw_facts(rng, "train", rng.randint(3, 6 if length < 400 else 12))
    words = max(5, int((length - 48 * len(facts)) / 1.3))
    parts = [demo_tasks.random_text(rng, n) for n in split_sum(rng, words, 1 if rng.random() < 0.5 else 4)]
    statements = [fact.statement for fact in facts]
    notes = statements + parts if len(parts) == 1 else rng.sample(statements + parts, len(statements) + len(parts))
    messages = list(system_turn(rng))
    rng.shuffle(facts)
    for number, fact in enumerate(facts):
        question = fact.question(rng)
        asked = question if number else f"Read these notes.\n\n{' '.join(notes)}\n\n{question}"
        messages += [demo_tasks.user(asked), assistant(fact.statement)]
    return Conversation(tuple(messages))


def split_sum(rng: Random, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return [max(1, high - low) for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and the label of each (the same id where it is learned)."""
    segments = render(conversation.messages, conversation.tools)
    encoded = tokenizer.encode_batch([text for text, _ in segments])
    ids, labels = [], []
    for (_, learned), piece in zip(segments, encoded, strict=True):
        ids += piece.ids
        labels += piece.ids if learned else [IGNORED] * len(piece.ids)
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]], length: int) -> tuple[Tensor, Tensor]:
    """Cut to `length`, pad to the longest; tokens and next-token labels, both [rows, tokens]."""
    width = min(length, CONTEXT, max(len(ids) for ids, _ in rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (ids, targets) in enumerate(rows):
        ids, targets = ids[:width], targets[1 : width + 1]
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(targets)] = torch.tensor(targets)
    return tokens, labels


def longest_at(step: int) -> int:
    """The curriculum: short texts until attention has learned to copy, then the whole context."""
    return 256 if step < 600 else 512 if step < 1000 else 1024 if step < 1200 else CONTEXT


def short_batch(tokenizer: Tokenizer, rng: Random, step: int, size: int) -> tuple[Tensor, Tensor]:
    stage = stage_at(step)
    with_tools, items = rng.random() < stage.tools, rng.choice([1, 12, 12])
    width = 256 if items > 1 else 160 if with_tools else 48  # a longer row is cut: little is lost, and little is padded
    conversations = [short_conversation(rng, items, with_tools, stage) for _ in range(size // width)]
    return collate([encode(tokenizer, conversation) for conversation in conversations], width)


def long_batch(tokenizer: Tokenizer, rng: Random, step: int, size: int) -> tuple[Tensor, Tensor]:
    stage = stage_at(step)
    length = rng.choice([length for length in stage.lengths if length <= longest_at(step)])
    makers = [copy_conversation if rng.random() < stage.copies else recall_conversation for _ in range(size // length)]
    return collate([encode(tokenizer, make(rng, length)) for make in makers], length * 5 // 4)


def batches(tokenizer: Tokenizer, seed: int, step: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The step's two batches of about `size` tokens each."""
    rng = Random(f"{seed} {step}")
    second = long_batch if stage_at(step).is_long(step) else short_batch
    return [short_batch(tokenizer, rng, step, size), second(tokenizer, rng, step, size)]


def vocabulary_texts(seed: int) -> Iterator[str]:
    rng = Random(f"{seed} vocabulary")
    for _ in range(4000):
        drawn = (
            short_conversation(rng, 4, with_tools=False, stage=STAGES[0]),
            short_conversation(rng, 2, with_tools=True, stage=STAGES[0]),
            recall_conversation(rng, 400),
            copy_conversation(rng, 300),
        )
        yield from (text for conversation in drawn for text, _ in render(conversation.messages, conversation.tools))


# ---- judging ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: DemoModel, tokenizer: Tokenizer, task: str, count: int) -> float:
    """The share of held-out items answered exactly.

    Greedy decoding writes the answer if and only if every token of it is the likeliest after those before it, so one
    pass over question and answer judges an item without generating.
    """
    rng = Random(f"judge {task}")
    right = 0
    for _ in range(count):
        item = demo_tasks.make(task, rng, "held_out")
        ids, _ = encode(tokenizer, Conversation(item.messages, item.tools))
        head = tokenizer.encode("<|im_start|>assistant\n").ids
        answer = tokenizer.encode(item.answer + TURN_END).ids
        hidden = model(torch.tensor([ids + head + answer[:-1]]))[0, -len(answer) :]
        right += bool((model.logits(hidden).argmax(-1) == torch.tensor(answer)).all())
    return right / count


# ---- the run ---------------------------------------------------------------------------------------------------------


def export(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder that ships; weights in bfloat16 to halve it, computed in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(model.shape),
        "rope_scaling": None,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.shape.num_hidden_layers,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    generation = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)


Forward = Callable[[Tensor], Tensor]


def gradients(model: DemoModel, forward: Forward, batch: tuple[Tensor, Tensor]) -> tuple[float, tuple[Tensor, ...]]:
    """The mean loss over learned tokens (the output matrix is applied to those alone), and its gradients."""
    tokens, labels = batch
    learned = labels != IGNORED
    logits = model.logits(forward(tokens)[learned])
    loss = F.cross_entropy(logits, labels[learned], reduction="sum") / learned.sum().clamp(min=1)
    return loss.item(), torch.autograd.grad(loss, tuple(model.parameters()))


class Trainer:
    """The state of a run.

    The step's two batches, and then the two Muons, run in two threads of one core each: on two busy cores that is
    nearly twice as fast as one batch on both, whose threads wait for each other at every operation.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = build_tokenizer(vocabulary_texts(arguments.seed))
        self.model = DemoModel(Shape(self.tokenizer.get_vocab_size()))
        self.forward: Forward = torch.compile(self.model, dynamic=True) if arguments.compile else self.model
        self.optimizers = make_optimizers(self.model, arguments.muon_lr, arguments.adam_lr)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.pool = ThreadPoolExecutor(2)
        self.step = 0
        self.seen = 0  # tokens
        if self.checkpoint.exists():
            self.resume()

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def resume(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seen = saved["step"], saved["seen"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        unfinished = self.work / "checkpoint.unfinished"
        torch.save({**state, "step": self.step, "seen": self.seen}, unfinished)
        unfinished.replace(self.checkpoint)
        export(self.model, self.tokenizer, self.work / "model")

    def advance(self) -> list[float]:
        """One step; the losses of its batches."""
        drawn = batches(self.tokenizer, self.arguments.seed, self.step, self.arguments.batch_tokens)
        results = list(self.pool.map(lambda batch: gradients(self.model, self.forward, batch), drawn))
        for parameter, *parts in zip(self.model.parameters(), *(parts for _, parts in results), strict=True):
            parameter.grad = torch.stack(parts).sum(0)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = learning_rate_scale(self.step, 100, self.arguments.steps, self.arguments.decay)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.step += 1
        self.seen += sum(tokens.numel() for tokens, _ in drawn)
        return [loss for loss, _ in results]

    def judge(self) -> str:
        scores = {task: accuracy(self.model, self.tokenizer, task, 20) for task in demo_tasks.TASKS}
        return " ".join(f"{task} {score:.2f}" for task, score in scores.items())

    def run(self) -> None:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        print(f"{count:,} parameters, vocabulary {self.model.shape.vocab_size}, from step {self.step}", flush=True)
        losses: list[list[float]] = []
        started, seen_before = time.time(), self.seen
        while self.step < self.arguments.steps:
            losses.append(self.advance())
            if self.step % 50 == 0:
                short, long = (sum(column) / len(losses) for column in zip(*losses, strict=True))
                speed = (self.seen - seen_before) / (time.time() - started)
                clock = time.strftime("%H:%M:%S")
                print(f"{clock} step {self.step} short {short:.4f} long {long:.4f} {speed:.0f} tok/s", flush=True)
                losses, started, seen_before = [], time.time(), self.seen
            if self.step % self.arguments.judge_every == 0 or self.step == self.arguments.steps:
                self.save()
                print(f"  {self.seen:,} tokens: {self.judge()}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("demo-train"), help="checkpoint and exported model go here")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps in all")
    parser.add_argument("--decay", type=int, default=1300, help="last steps, over which the learning rate falls to 0")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of each of a step's two batches")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="learning rate of the hidden matrices")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="learning rate of the embedding and the norms")
    parser.add_argument("--judge-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile (faster)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    Trainer(arguments).run()


if __name__ == "__main__":
    main()
