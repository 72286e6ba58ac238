"""Measure what quantization costs in quality: `python -m tools.eval_quantization`.

Two measurements of each way to keep weights and cache, against float32:

    accuracy     the demo model's tasks, on held-out items, answered greedily by Penstock
    closeness    of the next token's distribution, over given texts: how far it is from float32's (Kullback-Leibler
                 divergence, in nats), and how often the likeliest token is the same

The second also on a model with random weights. The exit code is 1 if int8 loses more than 1 % of the accuracy or int4
more than 3 %.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from tests.support.checkpoints import write_tiny_llama
from tests.support.stepping import Stepper
from tools.demo_tasks import TASKS, Item, is_correct, make

VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8, int8 cache": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4, int8 cache": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}
MAY_LOSE = {"int8": 0.01, "int4": 0.03, "int8 cache": 0.01, "int8, int8 cache": 0.01, "int4, int8 cache": 0.03}
RANDOM_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, and from which of them on the predictions count."""

    token_ids: list[int]
    begin: int


def draw_items(tasks: list[str], count: int, seed: int) -> dict[str, list[Item]]:
    items = {}
    for task in tasks:
        rng = Random(f"{seed} {task}")
        items[task] = [make(task, rng, "held_out") for _ in range(count)]
    return items


# ── accuracy ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy(items: dict[str, list[Item]], options: dict[str, Any]) -> dict[str, float]:
    """The share of right answers, by task."""
    listed = [(task, item) for task, of_task in items.items() for item in of_task]
    with LLM(**options) as llm:
        prompts = [llm.encode_chat(list(item.messages), tools=list(item.tools) or None) for _, item in listed]
        replies = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=400))
    right = dict.fromkeys(items, 0)
    for (task, item), reply in zip(listed, replies, strict=True):
        right[task] += is_correct(item, reply.outputs[0].text)
    return {task: right[task] / len(of_task) for task, of_task in items.items()}


def print_accuracy(items: dict[str, list[Item]], variants: list[str], threads: int | None) -> bool:
    """The table of accuracies; False if one is below what it may be."""
    print(f"| task | {' | '.join(variants)} |\n|---|{'---|' * len(variants)}")
    shares = {}
    for name in variants:
        shares[name] = accuracy(items, {"threads": threads, **VARIANTS[name]})
        print(f"{name}: done", file=sys.stderr)
    for task in items:
        print(f"| {task} | {' | '.join(f'{100 * shares[name][task]:.1f} %' for name in variants)} |")
    means = {name: sum(shares[name].values()) / len(items) for name in variants}
    print(f"| all | {' | '.join(f'{100 * means[name]:.2f} %' for name in variants)} |", flush=True)
    return all(means["float32"] - means[name] <= lost for name, lost in MAY_LOSE.items() if name in means)


# ── closeness ────────────────────────────────────────────────────────────────────────────────────────────────────────


def demo_texts(items: dict[str, list[Item]], count: int) -> list[Text]:
    """`count` items of each task with their right answers, whose tokens count."""
    texts = []
    with LLM(kv_cache_memory="16MiB") as llm:
        assert llm.tokenizer is not None
        for of_task in items.values():
            for item in of_task[:count]:
                prompt = llm.encode_chat(list(item.messages), tools=list(item.tools) or None)
                texts.append(Text(prompt + llm.tokenizer.encode(item.answer), len(prompt)))
    return texts


def random_texts(vocab_size: int, count: int, seed: int) -> list[Text]:
    rng = Random(seed)
    return [Text([rng.randrange(vocab_size) for _ in range(200)], 1) for _ in range(count)]


def predictions(folder: Path, texts: list[Text], options: dict[str, Any]) -> list[Tensor]:
    """The log-probabilities [tokens that count, vocab_size] float32 that a model gives to each text."""
    stepper = Stepper(folder, 1, block_size=32, kv_cache_memory="64MiB", **options)
    results = []
    for text in texts:
        stepper.computed[0] = 0  # the blocks are written anew
        logits = stepper.step({0: text.token_ids[:-1]})[0][text.begin - 1 :]
        results.append(torch.log_softmax(logits.float(), -1))
    return results


def print_closeness(folder: Path, texts: list[Text], variants: list[str]) -> None:
    truth = torch.cat(predictions(folder, texts, VARIANTS["float32"]))
    print(
        f"| {len(truth):,} tokens | mean KL | 99th percentile | largest | same likeliest token |\n|---|---|---|---|---|"
    )
    for name in variants[1:]:
        guess = torch.cat(predictions(folder, texts, VARIANTS[name]))
        kl = (truth.exp() * (truth - guess)).sum(-1)
        same = (truth.argmax(-1) == guess.argmax(-1)).double().mean()
        numbers = (f"{float(value):.2g}" for value in (kl.mean(), kl.quantile(0.99), kl.max()))
        print(f"| {name} | {' | '.join(numbers)} | {100 * float(same):.2f} % |", flush=True)


def write_random(folder: Path) -> Path:
    """A Llama with random weights of the size that training gives: a row of a matrix has the length 1."""
    write_tiny_llama(folder, **RANDOM_MODEL)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t / (t.norm(dim=1, keepdim=True) if t.dim() == 2 else 1) for name, t in tensors.items()}, file)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="items a task for the accuracy; a tenth for closeness")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    arguments = parser.parse_args()
    variants = ["float32", *(name for name in arguments.variants if name != "float32")]
    items = draw_items(arguments.tasks, arguments.count, arguments.seed)
    print("\nThe demo model, right answers:\n")
    good = print_accuracy(items, variants, arguments.threads)
    count = max(1, arguments.count // 10)
    print("\nThe demo model, right answers given:\n")
    print_closeness(DEMO_FOLDER, demo_texts(items, count), variants)
    with tempfile.TemporaryDirectory() as folder:
        print("\nA Llama with random weights, random texts:\n")
        print_closeness(write_random(Path(folder)), random_texts(384, count, arguments.seed), variants)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
